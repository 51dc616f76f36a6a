"""Prompts prefilled apart for the embedded reasoner: outputs are those of one engine. Replicas are
in this process, without Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from typing import Any

import pytest

from engines import after_each_call
from forethought.assets import reasoner_dir
from forethought.cluster.engine import ClusterEngine
from forethought.cluster.fleet import Fleet
from forethought.cluster.link import Role
from forethought.cluster.prefill import Delays, PrefillSplit
from forethought.cluster.worker import over
from forethought.config.engine import LlmArgs
from forethought.config.sampling import SamplingParams
from forethought.llm.async_llm import AsyncLLM
from forethought.methods.stack import stack
from forethought.scaffolding import ScaffoldingLlm
from forethought.workers.local import EngineWorker
from local_replicas import LocalReplica
from models import prompts, tiny
from stream_cases import stream_cases

FIELDS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_batch_size": 48,
    "max_num_tokens": 64,
    "max_seq_len": 900,
}
PARAMS = stream_cases(80)
PARAMS["one"] = PARAMS["seeded"] | {"max_tokens": 1}


class AllLong(PrefillSplit):
    """All prompts with more than a chunk to compute are prefilled apart."""

    def source(self, here: Delays, length: int, apart: Any) -> Any:
        place = next((place for place, _ in apart), None)
        return place if here.num_uncomputed > FIELDS["max_num_tokens"] else None


def prompt(number: int) -> str:
    """About 250 tokens, which begin in another way for each number."""
    numbers = ", ".join(str((7 * number + 13) * n % 997) for n in range(40))
    return f"Question: {number}: of {numbers}, what is the first plus {number} * 2?\n"


class Cluster:
    """One prefill replica and one that decodes."""

    def __init__(self, **fields: Any) -> None:
        self.fields, self.replicas = FIELDS | fields, dict[str, LocalReplica]()
        fleet = Fleet(self._open, "replica", 2, num_prefill=1)
        fleet.wait(2)
        self.llm = over(fleet, LlmArgs.from_dict(self.fields))
        engine = self.llm._frontend.engine
        assert isinstance(engine, ClusterEngine)
        self.engine = engine
        engine.split = AllLong(engine._costs)

    def _open(self, name: str, reply: Any) -> LocalReplica:
        self.replicas[name] = LocalReplica(self.fields, name, reply)
        return self.replicas[name]

    def all_up(self) -> None:
        wait_until(lambda: sum(link.is_up for link in self.engine.fleet.links) == 2)

    def kill(self, role: Role) -> None:
        self.replicas[f"replica-{role}-0"].die()

    def close(self) -> None:
        self.all_up()
        self.llm._thread.call(self.engine.check_integrity).result()
        assert not self.engine._remotes, "sequences are left"
        for replica in self.replicas.values():
            wait_until(lambda replica=replica: replica.num_left() == 0)
        self.llm.shutdown()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def local() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**FIELDS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


async def streamed(llm: AsyncLLM, text: str, params: SamplingParams) -> list[Any]:
    outputs: list[Any] = []
    async for output in llm.stream(text, params, gather=0.01):
        outputs = output.outputs
    return [(s.token_ids, s.text, s.finish_reason, s.thinking, _scores(s)) for s in outputs]


def _scores(sample: Any) -> list[float]:
    pairs = zip(sample.logprobs or (), sample.token_ids, strict=False)
    return [round(scores[token].logprob, 3) for scores, token in pairs]


async def all_streams(llm: AsyncLLM, first: int = 0) -> list[Any]:
    """A stream with each of the params, each of another prompt, numbered from ``first`` on."""
    return await asyncio.gather(
        *[
            streamed(llm, prompt(number), SamplingParams(**fields))
            for number, fields in enumerate(PARAMS.values(), first)
        ]
    )


def test_streams_of_all_kinds_are_those_of_one_engine(cluster: Cluster, local: AsyncLLM) -> None:
    before = cluster.llm.stats
    assert asyncio.run(all_streams(cluster.llm)) == asyncio.run(all_streams(local))
    stats, num_streams = cluster.llm.stats, len(PARAMS)
    assert stats.prefilled_apart - before.prefilled_apart >= num_streams - 1  # one has one token
    assert stats.migrated_tokens - before.migrated_tokens > 150 * (num_streams - 1)
    sent, received = (
        cluster.replicas[f"replica-{role}-0"].replica._traffic
        for role in (Role.PREFILL, Role.DECODE)
    )
    assert sent.num_sent == received.num_received > 0
    assert sent.pages_sent == received.pages_received > sent.num_sent


def test_a_prompt_that_is_cached_where_it_decodes_is_not_sent_over(
    cluster: Cluster, local: AsyncLLM
) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20)

    async def turns(llm: AsyncLLM) -> list[Any]:
        text = prompt(50)
        outputs = []
        for _ in range(3):
            output = await llm.generate(text, params)
            outputs.append(output.outputs)
            text += output.outputs[0].text + "\nAnd the second?\n"
        return outputs

    before = cluster.llm.stats
    assert asyncio.run(turns(cluster.llm)) == asyncio.run(turns(local))
    assert cluster.llm.stats.prefilled_apart - before.prefilled_apart == 1
    assert cluster.llm.stats.prefilled - before.prefilled < 2 * 250


METHODS: dict[str, dict[str, Any]] = {
    "majority_vote@3": {},
    "dynasor": {"chunk_size": 16, "certainty_threshold": 4},
}
TAGS = ("generation", "generation_with_dynasor_cot")


def method_outputs(llm: AsyncLLM) -> list[Any]:
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 120}
    workers, outputs = dict.fromkeys(TAGS, EngineWorker(llm)), []
    for name, settings in METHODS.items():
        with ScaffoldingLlm(stack(name, **settings), workers) as scaffolding:
            generate = partial(scaffolding.generate_async, sampling_params=params)
            running = [generate(prompt(number)) for number in range(60, 62)]
            for future in running:
                output = future.result().output
                outputs.append((name, output.text, output.candidates, output.meta))
    return outputs


@pytest.fixture(scope="module")
def method_results(local: AsyncLLM) -> list[Any]:
    return method_outputs(local)


@pytest.mark.parametrize("dies", [None, Role.PREFILL, Role.DECODE])
def test_votes_and_probes_are_those_of_one_engine(
    cluster: Cluster, method_results: list[Any], dies: Role | None
) -> None:
    cluster.all_up()
    with nullcontext() if dies is None else killed(cluster, dies, "a prompt has begun"):
        assert method_outputs(cluster.llm) == method_results


MOMENTS: dict[str, tuple[str, Callable[[ClusterEngine], bool]]] = {
    "a prompt has begun": ("_begin", lambda engine: bool(engine._running)),
    "a chunk has arrived": (
        "migration.copied",
        lambda engine: any(move.num_copied for move in engine.migration._moves.values()),
    ),
    "a stream has gone on": (
        "_take",
        lambda engine: any(
            remote.has_begun and remote.link is not None and remote.link.role is Role.DECODE
            for remote in engine._running.values()
        ),
    ),
}
"""After a call of a method of the engine, if something is true."""


@contextmanager
def killed(cluster: Cluster, dies: Role, moment: str) -> Iterator[None]:
    """One of the two replicas dies at a moment, which is seen in the thread of the engine."""
    (name, is_now), pending = MOMENTS[moment], [dies]

    def look(_: object) -> None:
        if pending and is_now(cluster.engine):
            cluster.kill(pending.pop())

    *path, method = name.split(".")
    with after_each_call(reduce(getattr, path, cluster.engine), method, look):
        yield
    assert not pending


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("dies", [Role.PREFILL, Role.DECODE])
def test_a_kill_of_either_replica_changes_no_stream(
    cluster: Cluster, local: AsyncLLM, dies: Role, moment: str
) -> None:
    cluster.all_up()
    first = 100 * (1 + 2 * [*MOMENTS].index(moment) + (dies is Role.DECODE))
    before = cluster.llm.stats
    with killed(cluster, dies, moment):
        outputs = asyncio.run(all_streams(cluster.llm, first))
    assert outputs == asyncio.run(all_streams(local, first))
    assert cluster.llm.stats.replicas_lost == before.replicas_lost + 1
    cluster.all_up()


def test_a_prompt_whose_scores_are_asked_for_is_computed_where_it_decodes(
    cluster: Cluster, local: AsyncLLM
) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0)

    def scores(llm: AsyncLLM) -> list[float]:
        output = asyncio.run(llm.generate(prompt(70), params))
        entries = (output.prompt_logprobs or [])[1:]
        return [round(next(iter(entry.values())).logprob, 3) for entry in entries if entry]

    cluster.all_up()
    before = cluster.llm.stats.prefilled_apart
    assert scores(cluster.llm) == scores(local)
    assert cluster.llm.stats.prefilled_apart == before


def test_of_a_short_prompt_or_an_extension_the_same_tokens_are_scored_as_by_one_engine(
    cluster: Cluster, local: AsyncLLM
) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)

    async def scores(llm: AsyncLLM) -> list[Any]:
        output = await llm.generate([51], params.replace(n=2))
        for prompt_ids in ([51], [51, 87, 425]):
            alone = await llm.generate(prompt_ids, params.replace(n=2, max_tokens=0))
            assert len(alone.prompt_logprobs or ()) == len(prompt_ids)
            assert [sample.finish_reason for sample in alone.outputs] == ["length"] * 2
        async with llm.start("What is 12 + 7?") as session:
            await session.extend(" Twelve and seven.")
            await session.generate(params)
            scored = session.prompt_logprobs
        values = [s and round(next(iter(s.values())).logprob, 2) for s in scored]
        return [output.prompt_logprobs, values]

    cluster.all_up()
    assert asyncio.run(scores(cluster.llm)) == asyncio.run(scores(local))


@pytest.mark.parametrize("architecture", ["qwen3_5", "bamba"])
def test_states_of_recurrent_layers_go_over_with_the_last_pages(architecture: str) -> None:
    model = str(tiny(architecture, vocab_size=512))
    fields: dict[str, Any] = {"model": model, "tokenizer": str(reasoner_dir()), "max_seq_len": 256}
    fields["kv_cache_config"] = {"max_tokens": 2048}
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)

    async def run(llm: AsyncLLM) -> list[Any]:
        outputs = await asyncio.gather(*[llm.generate(row, params) for row in prompts([150, 201])])
        return [output.outputs[0].token_ids for output in outputs]

    llm = AsyncLLM(**FIELDS | fields)
    expected = asyncio.run(run(llm))
    llm.shutdown()
    cluster = Cluster(**fields)
    outputs = asyncio.run(run(cluster.llm))
    assert cluster.llm.stats.prefilled_apart == 2
    decode = cluster.replicas["replica-decode-0"].replica._llm.stats
    assert decode.prefilled == 0, "what was sent over was computed again"
    cluster.close()
    assert outputs == expected
