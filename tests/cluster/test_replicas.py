"""Replicas of the embedded reasoner on Ray: what is generated outlives ``kill -9`` unchanged."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from openai import OpenAI

from engines import after_each_call
from forethought.cluster import actors, drain, links_of, open_llm
from forethought.cluster.actors import NAMESPACE, drain_replica, statuses
from forethought.cluster.connection import Connection
from forethought.cluster.engine import ClusterEngine
from forethought.cluster.entrance import Entrance
from forethought.cluster.link import Role
from forethought.cluster.prefill import Delays, PrefillSplit
from forethought.config.sampling import SamplingParams
from forethought.engine.step import Event
from forethought.errors import ParameterError, UsageError
from forethought.llm.async_llm import AsyncLLM
from forethought.methods.stack import stack
from forethought.outputs import CompletionOutput
from forethought.scaffolding import ScaffoldingLlm
from forethought.server.backends.engine_backend import EngineBackend
from forethought.workers.local import EngineWorker
from http_servers import served
from stream_cases import stream_cases

FIELDS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_batch_size": 160}
QUESTIONS = [f"Question: What is {n} + {3 * n} * 2?\n" for n in range(11, 24)]
PARAMS = stream_cases(400)


@pytest.fixture(scope="module")
def local() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**FIELDS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def cluster(ray_here: None) -> Iterator[AsyncLLM]:
    llm = open_llm(replicas=2, **FIELDS)
    yield llm
    engine = engine_of(llm)
    llm._thread.call(engine.check_integrity).result()
    assert not engine._remotes, "sequences are left"
    for link in links_of(llm):
        if link.is_up:
            check_replica(llm, link.name)
    llm.shutdown()


def engine_of(llm: AsyncLLM) -> ClusterEngine:
    engine = llm._frontend.engine
    assert isinstance(engine, ClusterEngine)
    return engine


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def check_replica(llm: AsyncLLM, name: str) -> None:
    """Every page of a replica's KV cache is where it belongs, and no sequence is left."""
    import ray

    def num_left(replica: Any) -> int:
        engine = replica._llm._frontend.local_engine
        replica._llm._thread.call(engine.check_integrity).result(60)
        return len(list(engine.scheduler))

    actor = ray.get_actor(name, NAMESPACE)
    wait_until(lambda: ray.get(actor.__ray_call__.remote(num_left)) == 0)


def all_up(llm: AsyncLLM, count: int = 2) -> None:
    wait_until(lambda: sum(link.is_up for link in links_of(llm)) == count)


def kill_one(llm: AsyncLLM) -> int:
    """``kill -9`` of the replica with the most generations; its process."""
    link = max(links_of(llm), key=lambda link: (link.is_up, link.num_generating))
    assert link.description is not None
    os.kill(link.description.process, signal.SIGKILL)
    return link.description.process


def _scores(sample: CompletionOutput) -> list[float]:
    pairs = zip(sample.logprobs or (), sample.token_ids, strict=False)
    return [scores[token].logprob for scores, token in pairs]


async def streamed(
    llm: AsyncLLM, prompt: str, params: SamplingParams, silences: list[float]
) -> tuple[list[Any], list[list[float]]]:
    """The samples of a stream, each of whose items goes on from the one before; and the
    log-probabilities of the tokens."""
    outputs, texts = [], [""] * params.n
    heard = time.monotonic()
    async for output in llm.stream(prompt, params, gather=0.01):
        if output.outputs != outputs:
            silences.append(time.monotonic() - heard)
            heard = time.monotonic()
        outputs = output.outputs
        for index, sample in enumerate(outputs):
            assert sample.text.startswith(texts[index])
            texts[index] = sample.text
    samples = [(s.token_ids, s.text, s.finish_reason, s.thinking) for s in outputs]
    return samples, [_scores(sample) for sample in outputs]


def expect_same(outputs: list[Any], expected: list[Any]) -> None:
    """The same tokens and texts; log-probabilities within the rounding of float32."""
    assert [samples for samples, _ in outputs] == [samples for samples, _ in expected]
    for (_, scores), (_, others) in zip(outputs, expected, strict=True):
        for values, other in zip(scores, others, strict=True):
            assert values == pytest.approx(other, abs=1e-3)


async def all_streams(
    llm: AsyncLLM,
    copies: int,
    counts: Sequence[int] = (),
    silences: list[float] | None = None,
    happen: Callable[[AsyncLLM], object] = kill_one,
) -> list[Any]:
    """Streams with all params for all questions; something happens at some numbers of tokens, in
    the thread of the engine."""
    silences, pending = [] if silences is None else silences, deque(counts)

    def stepped(events: list[Event]) -> None:
        longest = max((len(event.sequence.output) for event in events), default=-1)
        if pending and longest >= pending[0]:
            pending.popleft()
            happen(llm)

    with after_each_call(llm._frontend.engine, "step", stepped):
        return await asyncio.gather(
            *[
                streamed(llm, question, SamplingParams(**fields), silences)
                for question in QUESTIONS[:copies]
                for fields in PARAMS.values()
            ]
        )


@pytest.fixture(scope="module")
def expected(local: AsyncLLM) -> list[Any]:
    return asyncio.run(all_streams(local, 2))


def test_streams_are_those_of_one_engine(cluster: AsyncLLM, expected: list[Any]) -> None:
    expect_same(asyncio.run(all_streams(cluster, 2)), expected)


def move_all(llm: AsyncLLM) -> int:
    """Begin to move every sequence to the other replica, in the thread of the engine; how many."""
    engine, links = engine_of(llm), [link for link in links_of(llm) if link.takes]
    others = {
        remote: next(link for link in links if link is not remote.link)
        for remote in engine._remotes.values()
        if remote.link is not None
    }
    return sum(engine.migration.move(remote, link) for remote, link in others.items())


def test_moves_at_several_tokens_under_streams_of_all_kinds_change_none(
    cluster: AsyncLLM, expected: list[Any]
) -> None:
    all_up(cluster)
    before, moved = cluster.stats.migrated, engine_of(cluster).num_moved
    counts = [1, 2, 3, 40, 110, 111, 230, 330]
    assert asyncio.run(all_streams(cluster, 2, counts, happen=move_all)) == expected
    assert cluster.stats.migrated - before > 10
    assert engine_of(cluster).num_moved == moved


METHODS: dict[str, dict[str, Any]] = {
    "majority_vote@4": {"early_stop": False},  # which samples are ended is a matter of time
    "dynasor": {"chunk_size": 16, "certainty_threshold": 6},
    "dynasor+majority_vote@3": {"early_stop": False},
}
TAGS = ("generation", "generation_with_dynasor_cot")


def method_outputs(llm: AsyncLLM, happen: Callable[[AsyncLLM], object]) -> list[Any]:
    """The answers, samples and probes of several methods at once; something happens after each step
    of the engine."""
    running, params = [], {"temperature": 1.0, "seed": 3, "max_tokens": 400}
    with ExitStack() as opened:
        then = after_each_call(llm._frontend.engine, "step", lambda _: happen(llm))
        opened.enter_context(then)
        workers = dict.fromkeys(TAGS, EngineWorker(llm))
        for name, settings in METHODS.items():
            scaffolding = opened.enter_context(ScaffoldingLlm(stack(name, **settings), workers))
            generate = partial(scaffolding.generate_async, sampling_params=params)
            running += [(name, generate(prompt)) for prompt in QUESTIONS[:6]]
        outputs = [(name, future.result().output) for name, future in running]
    return [(name, output.text, output.candidates, output.meta) for name, output in outputs]


@pytest.fixture(scope="module")
def method_results(local: AsyncLLM) -> list[Any]:
    return method_outputs(local, lambda _: None)


def test_methods_go_on_with_the_same_votes_and_probes_while_their_handles_move(
    cluster: AsyncLLM, method_results: list[Any]
) -> None:
    all_up(cluster)
    before = cluster.stats.migrated
    assert method_outputs(cluster, move_all) == method_results
    assert cluster.stats.migrated > before


@pytest.mark.parametrize("moves", [True, False])
def test_a_session_is_forked_and_rewound_after_its_replica_has_died_or_it_has_moved(
    cluster: AsyncLLM, local: AsyncLLM, moves: bool
) -> None:
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=30, ignore_eos=True)

    async def play(llm: AsyncLLM, kill: Callable[[], None]) -> list[list[int]]:
        async with llm.start(QUESTIONS[0]) as session:
            await session.generate(params)
            kill()
            probe = await session.branch(session.prompt_length + 10, "\nThe answer is")
            await probe.generate(params)
            await session.rewind(session.prompt_length + 20)
            await session.generate(params)
            tokens = [session.tokens, probe.tokens]
            await probe.close()
            return tokens

    def kill() -> None:
        (home,) = {r.link for r in engine_of(cluster)._remotes.values() if r.link is not None}
        os.kill(home.description.process, signal.SIGKILL)
        wait_until(lambda: home.is_dead)

    def move() -> None:
        before = cluster.stats.migrated
        assert cluster._thread.call(move_all, cluster).result() == 1
        wait_until(lambda: cluster.stats.migrated > before)

    all_up(cluster)
    assert asyncio.run(play(cluster, move if moves else kill)) == asyncio.run(
        play(local, lambda: None)
    )


def test_a_kill_under_streams_of_all_kinds_changes_none(
    cluster: AsyncLLM, expected: list[Any]
) -> None:
    all_up(cluster)
    before = engine_of(cluster).num_moved
    expect_same(asyncio.run(all_streams(cluster, 2, [60])), expected)
    assert engine_of(cluster).num_moved - before >= 5


@pytest.mark.slow
@pytest.mark.parametrize("count", [90, 3])
def test_a_kill_of_the_target_in_the_middle_of_moves_changes_no_stream(
    cluster: AsyncLLM, expected: list[Any], count: int
) -> None:
    def happen(llm: AsyncLLM) -> None:
        engine, target = engine_of(llm), links_of(llm)[0]
        for remote in engine._remotes.values():
            engine.migration.move(remote, target)
        engine._flush()
        os.kill(target.description.process, signal.SIGKILL)

    all_up(cluster)
    expect_same(asyncio.run(all_streams(cluster, 2, [count], happen=happen)), expected)


def test_methods_go_on_with_the_same_votes_and_probes_after_a_kill(
    cluster: AsyncLLM, method_results: list[Any]
) -> None:
    killed: list[int] = []

    def kill(llm: AsyncLLM) -> None:
        if not killed and len(engine_of(llm)._running) > 3:
            killed.append(kill_one(llm))

    all_up(cluster)
    before = engine_of(cluster).num_moved
    assert method_outputs(cluster, kill) == method_results
    assert engine_of(cluster).num_moved > before


def test_errors_of_a_request_are_those_of_one_engine(cluster: AsyncLLM) -> None:
    async def ask(**fields: Any) -> None:
        await cluster.generate(QUESTIONS[0], SamplingParams(max_tokens=5, **fields))

    for fields in ({"adapter": "none"}, {"guided_decoding": {"regex": "(((("}}):
        with pytest.raises(UsageError):
            asyncio.run(ask(**fields))
    with pytest.raises(UsageError, match="snapshot"):
        asyncio.run(cluster.restore("notes"))
    assert cluster.why_not_concurrent() is not None


def test_a_prompt_is_scored_as_by_one_engine(cluster: AsyncLLM, local: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0, n=2)

    def scores(llm: AsyncLLM) -> list[Any]:
        output = asyncio.run(llm.generate(QUESTIONS[0], params))
        entries = output.prompt_logprobs or []
        assert entries[0] is None
        return [round(next(iter(entry.values())).logprob, 3) for entry in entries[1:] if entry]

    assert scores(cluster) == scores(local)


def test_a_prompt_as_long_as_the_context_is_scored(cluster: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    ids = [5 + n % 50 for n in range(cluster.max_length)]
    output = asyncio.run(cluster.generate(ids, params))
    assert len(output.prompt_logprobs or []) == len(ids)


def test_replicas_refuse_what_they_cannot_honour() -> None:
    for fields in ({"snapshot_dir": "notes"}, {"replicas": 0}):
        with pytest.raises(ParameterError):
            open_llm(**fields)


def test_another_ingress_finds_the_same_replicas_and_leaves_them(cluster: AsyncLLM) -> None:
    all_up(cluster)
    other = open_llm(replicas=2, **FIELDS)
    all_up(other)
    processes = [{link.description.process for link in links_of(llm)} for llm in (cluster, other)]
    assert processes[0] == processes[1]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=50)
    outputs = [asyncio.run(llm.generate(QUESTIONS[0], params)) for llm in (cluster, other)]
    assert outputs[0].outputs == outputs[1].outputs
    other.shutdown()
    again = asyncio.run(cluster.generate(QUESTIONS[0], params))
    assert again.outputs == outputs[0].outputs
    assert {link.description.process for link in links_of(cluster)} == processes[0]


def test_where_a_replica_cannot_be_reached_calls_of_ray_take_the_place_of_its_connection(
    cluster: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(entrance: Entrance, ingress: str) -> Connection:
        raise ConnectionRefusedError(f"by {entrance.host}")

    monkeypatch.setattr(Connection, "open", refuse)
    other = open_llm(replicas=2, **FIELDS)
    all_up(other)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=50)
    outputs = [asyncio.run(llm.generate(QUESTIONS[1], params)) for llm in (cluster, other)]
    assert outputs[0].outputs == outputs[1].outputs
    links = [*links_of(cluster), *links_of(other)]
    assert [link.channel._connection is not None for link in links] == [True] * 2 + [False] * 2
    other.shutdown()


def test_clients_of_the_server_notice_no_death(cluster: AsyncLLM) -> None:
    def texts(client: OpenAI, model: str, kill: Callable[[], None] | None) -> list[str]:
        text, reasoning = "", ""
        for chunk in client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is 12 + 34 * 5?"}],
            stream=True,
            seed=7,
            temperature=1.0,
            max_tokens=900,
            extra_body={} if "@" in model else {"ignore_eos": True},
        ):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            reasoning += getattr(delta, "reasoning", None) or ""
            if kill is not None and (text or reasoning):
                kill()
                kill = None
        return [text, reasoning]

    llm = open_llm(replicas=2, **FIELDS)
    all_up(llm)
    with served(EngineBackend(llm, "reasoner", replicas=links_of(llm))) as server:
        for model in ("reasoner", "majority_vote@4-reasoner"):
            expected = texts(server.client, model, None)
            all_up(llm)
            assert texts(server.client, model, lambda: kill_one(llm)) == expected
        wait_until(lambda: llm.stats.replicas_lost == 2)
        metrics = server.send("/metrics", method="GET").text
    assert "forethought:replicas_lost_total 2.0" in metrics
    assert f'forethought:upstream_healthy{{server="{links_of(llm)[0].name}"}}' in metrics


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_streams_outlive_a_kill_at_any_token(cluster: AsyncLLM, local: AsyncLLM) -> None:
    expected, silences = asyncio.run(all_streams(local, len(QUESTIONS))), []
    assert len(expected) > 100
    for count in (0, 1, 2, 3, 17, 51, 120, 233, 350):
        all_up(cluster)
        moved = engine_of(cluster).num_moved
        silence: list[float] = []
        expect_same(asyncio.run(all_streams(cluster, len(QUESTIONS), [count], silence)), expected)
        assert engine_of(cluster).num_moved > moved, f"nothing ran at {count}"
        silences.append(max(silence))
    assert max(silences) < 10, silences  # under 2 s, where the machine is not busy with others


def test_a_replica_that_hangs_or_has_just_died_is_listed_and_is_not_drained(
    cluster: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_up(cluster)
    monkeypatch.setattr(actors, "_STATUS_SECONDS", 1.0)
    lost, (link, other) = cluster.stats.replicas_lost, links_of(cluster)
    assert link.description is not None
    os.kill(link.description.process, signal.SIGSTOP)
    try:
        assert [statuses()[name] is None for name in (link.name, other.name)] == [True, False]
        with pytest.raises(ParameterError, match=f"{link.name} does not answer"):
            drain_replica(link.name)
    finally:
        os.kill(link.description.process, signal.SIGKILL)
    while cluster.stats.replicas_lost == lost:
        assert statuses()[other.name] is not None
    all_up(cluster)


def test_a_drained_replica_ends_and_its_streams_go_on(
    cluster: AsyncLLM, expected: list[Any]
) -> None:
    all_up(cluster)
    engine, names, asked = engine_of(cluster), list[str](), list[Future[None]]()
    assert {link.name for link in links_of(cluster)} <= statuses().keys()
    moved, lost = engine.num_moved, cluster.stats.replicas_lost

    def happen(llm: AsyncLLM) -> None:
        link = max(links_of(llm), key=lambda link: link.num_open)
        names.append(link.name)
        asked.append(threads.submit(drain_replica, link.name))

    with ThreadPoolExecutor(1) as threads:
        expect_same(asyncio.run(all_streams(cluster, 2, [60], happen=happen)), expected)
        asked[0].result()
    wait_until(lambda: names[0] not in [link.name for link in links_of(cluster)])
    assert (engine.num_moved, cluster.stats.replicas_lost) == (moved, lost)
    (last,) = links_of(cluster)
    for refused in (
        lambda: asyncio.run(drain(cluster, last.name)),
        lambda: drain_replica(last.name),
    ):
        with pytest.raises(ParameterError, match="cannot be drained"):
            refused()


@pytest.fixture
def split(ray_here: None) -> Iterator[AsyncLLM]:
    llm = open_llm(replicas=2, prefill_replicas=1, **FIELDS | {"max_num_tokens": 192})
    all_up(llm)
    yield llm
    llm._thread.call(engine_of(llm).check_integrity).result()
    llm.shutdown()


def test_prompts_are_prefilled_in_a_replica_of_their_own_and_outlive_its_death(
    split: AsyncLLM, local: AsyncLLM
) -> None:
    """Of a question with 60 numbers before it, in chunks of 192 tokens."""
    prompts = [" ".join(map(str, range(n, n + 60))) + f"\n{q}" for n, q in enumerate(QUESTIONS)]
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=120, ignore_eos=True)

    async def run(llm: AsyncLLM, happen: Callable[[], None] | None = None) -> list[Any]:
        jobs = [asyncio.create_task(llm.generate(prompt, params)) for prompt in prompts[:6]]
        if happen is not None:
            await asyncio.to_thread(happen)
        outputs = [output.outputs[0] for output in await asyncio.gather(*jobs)]
        return [(s.token_ids, s.text, s.finish_reason) for s in outputs]

    def kill_prefill() -> None:
        wait_until(lambda: split.stats.prefilled_apart > 0)
        (link,) = [link for link in links_of(split) if link.role is Role.PREFILL]
        assert link.description is not None
        os.kill(link.description.process, signal.SIGKILL)

    engine_of(split).split = AllApart(engine_of(split)._costs)
    assert asyncio.run(run(split, kill_prefill)) == asyncio.run(run(local))
    wait_until(lambda: split.stats.replicas_lost == 1)
    all_up(split)
    traffic = {name: s.traffic for name, s in statuses().items() if s and "-decode-" in name}
    assert [t.num_received > 0 and t.pages_received > 10 for t in traffic.values()] == [True]
    for link in links_of(split):
        check_replica(split, link.name)


class AllApart(PrefillSplit):
    """All prompts are prefilled apart."""

    def source(self, here: Delays, length: int, apart: Any) -> Any:
        return next((link for link, _ in apart), None)
