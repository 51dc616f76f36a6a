"""Engines whose model is cut over two processes: the same tokens as of one, and nobody left over.

Starting a process takes seconds, so one pair of ranks serves most of these tests, each of which
builds an engine over it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_heads import random_head
from engines import GREEDY, drain, engine_of, expect_empty, held_back, load, outputs
from forethought import LLM, AsyncLLM
from forethought.backends.tensor_parallel import collectives, ranks, sharded
from forethought.backends.tensor_parallel import engine_ranks as tensor_parallel
from forethought.backends.tensor_parallel.launcher import LocalLauncher, LocalProcess
from forethought.backends.tensor_parallel.ranks import Ranks
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
)
from forethought.config.engine import KvCacheConfig, LlmArgs
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.errors import EngineStopped, ModelError, ParameterError
from forethought.kv.storage import KvStorage
from forethought.model import loader
from forethought.model.causal_lm import CausalLM
from forethought.model.runner import ModelRunner
from forethought.outputs import RequestOutput
from models import prompts, tiny
from mtp_modules import saved

PAGE_SIZE = 4
PROMPTS = prompts((1, 9, 30, 17))
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.9, frequency_penalty=0.3, n=3, max_tokens=12, ignore_eos=True, seed=5
)

Pair = tuple[Ranks, CausalLM]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two ranks of the tiny Llama, and rank 0's model."""
    cache = KvCacheConfig(tokens_per_block=PAGE_SIZE)
    args = LlmArgs(tensor_parallel_size=2, device="cpu", kv_cache_config=cache)
    model_dir = tiny("llama")
    with tensor_parallel.starting(args, model_dir, torch.device("cpu")) as started:
        assert started is not None
        lm = loader.load(model_dir, dtype="float32", shard=started.shard)
        tensor_parallel.join(started, lm, args, model_dir, 1)
    yield started, lm
    started.close()
    assert all(map(has_ended, started.process_ids))


def has_ended(process_id: int) -> bool:
    """Whether a process is gone, or is only remembered until its parent asks for its status."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def two_ranks(pair: Pair, num_pages: int = 64, **settings: Any) -> Engine:
    started, lm = pair
    storage = sharded.ShardedStorage(started, lm, PAGE_SIZE)
    storage.resize(num_pages)
    return engine_of(sharded.ShardedRunner(lm, storage, started), **settings)


def one_process(num_pages: int = 64, **settings: Any) -> Engine:
    lm = load("llama")
    storage = KvStorage(lm.layer_shapes, num_pages, PAGE_SIZE, lm.dtype)
    return engine_of(ModelRunner(lm, storage), **settings)


def finish(machine: Engine, *sequences: Any) -> None:
    for sequence in sequences:
        machine.close(sequence)
    expect_empty(machine)


def batch(machine: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    started = [machine.add(prompt, params) for prompt in PROMPTS]
    assert [event.error for event in drain(machine) if event.error] == []
    expect_empty(machine)
    return [output for samples in started for output in outputs(samples)]


def preempted(machine: Engine) -> list[list[int]]:
    found = batch(machine)
    assert machine.stats.preemptions > 0
    return found


def prefixed(machine: Engine) -> list[list[int]]:
    (first,) = machine.add(PROMPTS[2], GREEDY)
    drain(machine)
    (second,) = machine.add([*PROMPTS[2], 7], GREEDY)
    drain(machine)
    assert machine.stats.cached >= 28
    expect_empty(machine)
    return outputs([first, second])


def forked(machine: Engine) -> list[list[int]]:
    """Forks write behind a shared page, which is copied; then one is rewound."""
    (parent,) = machine.add(PROMPTS[1], GREEDY, keep=True)
    drain(machine)
    left, right = machine.fork(parent, 14), machine.fork(parent)
    machine.extend(left, [5, 6, 7])
    for sequence in (left, right):
        machine.resume(sequence, GREEDY)
    drain(machine)
    machine.rewind(left, 11)
    machine.resume(left, GREEDY)
    drain(machine)
    found = outputs([parent, left, right])
    finish(machine, parent, left, right)
    return found


def concurrent(machine: Engine) -> list[list[int]]:
    """Two sequences that attend to each other's tokens."""
    both = [machine.open([*PROMPTS[1], *own]) for own in ([5, 6], [7, 8, 9])]
    for one, other in (both, both[::-1]):
        machine.attend_to(one, {other: len(PROMPTS[1])})
        machine.resume(one, GREEDY)
    drain(machine)
    found = outputs(both)
    finish(machine, *both)
    return found


def snapshot(machine: Engine) -> list[list[int]]:
    """A sequence that is saved, and restored with pages of other slots."""
    (first,) = machine.add(PROMPTS[2], GREEDY, keep=True)
    drain(machine)
    kept = machine.capture(first, first.tokens)
    assert kept.kv[0].shape[2] == 2, "the heads of both ranks"
    restored = machine.restore(kept)
    machine.resume(restored, GREEDY)
    drain(machine)
    assert machine.stats.prefilled == len(PROMPTS[2]) + 1
    found = outputs([first, restored])
    finish(machine, first, restored)
    return found


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [
        (batch, {}),
        (batch, {"max_num_tokens": 8}),
        (lambda machine: batch(machine, SAMPLED), {}),
        (prefixed, {}),
        (forked, {}),
        (preempted, {"num_pages": 20}),
        (concurrent, {}),
        (snapshot, {}),
    ],
    ids=["greedy", "chunked", "sampled", "prefix", "fork", "preemption", "concurrent", "snapshot"],
)
def test_two_ranks_give_the_tokens_of_one_process(
    pair: Pair, scenario: Callable[[Engine], list[list[int]]], settings: dict[str, Any]
) -> None:
    expected = scenario(one_process(**settings))
    assert scenario(two_ranks(pair, **settings)) == expected


def drafters() -> dict[str, Callable[[], DecodingBaseConfig]]:
    draft_model = {"max_draft_len": 4, "speculative_model": tiny("llama", seed=7)}
    return {
        "ngram": lambda: NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=3),
        "draft model": lambda: DraftTargetDecodingConfig(**draft_model),
        "draft tree": lambda: DraftTargetDecodingConfig(
            draft_choices=[[0], [1], [0, 0], [1, 0], [0, 0, 0]], speculative_model=tiny("llama")
        ),
        "eagle": lambda: EagleDecodingConfig(max_draft_len=4, speculative_model=random_head()),
        "mtp": lambda: MTPDecodingConfig(max_draft_len=4, speculative_model=saved("llama")),
    }


@pytest.mark.parametrize("name", ["ngram", "draft model", "draft tree", "eagle", "mtp"])
def test_drafts_of_rank_0_are_verified_by_all_ranks(pair: Pair, name: str) -> None:
    machine = two_ranks(pair, speculative=[drafters()[name]()])
    params = GREEDY.replace(max_tokens=40)
    assert batch(machine, params) == batch(one_process(), params)
    assert machine.stats.drafted > 0
    machine.speculation.shutdown()


def test_pages_that_gave_nan_are_cleared_on_all_ranks(pair: Pair) -> None:
    """A masked slot weighs 0, and 0 * NaN is NaN: the second try computes on cleared slots."""
    machine = two_ranks(pair, num_pages=8)
    numbers = list(range(8 * PAGE_SIZE))
    storage = machine.runner.storage
    shapes = storage.read_slots(numbers)
    storage.write_slots(numbers, [torch.full_like(stack, torch.nan) for stack in shapes])
    (sequence,) = machine.add(PROMPTS[1], GREEDY)
    assert [event.error for event in drain(machine) if event.error] == []
    assert outputs([sequence]) == batch(one_process())[1:2]
    expect_empty(machine)


def test_one_process_restores_what_two_ranks_have_saved(pair: Pair) -> None:
    source, target = two_ranks(pair), one_process()
    (first,) = source.add(PROMPTS[2], GREEDY, keep=True)
    drain(source)
    restored = target.restore(source.capture(first, first.tokens))
    for machine, sequence in ((source, first), (target, restored)):
        machine.resume(sequence, GREEDY)
        drain(machine)
    assert target.stats.prefilled == 1
    assert outputs([restored]) == outputs([first])
    finish(source, first)
    finish(target, restored)
    assert source.runner.storage.whole_layers == target.runner.storage.whole_layers


def test_the_ranks_on_a_cpu_share_its_memory(pair: Pair) -> None:
    started, lm = pair
    storage = sharded.ShardedStorage(started, lm, PAGE_SIZE)
    config = KvCacheConfig(host_cache_size=10 * 2 * storage.bytes_per_page)
    assert resolve._fill(config, storage, [], useful=1000) == 10 * PAGE_SIZE
    assert storage.num_pages == 10


def test_the_gpu_with_the_least_memory_says_how_many_pages_there_are(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, lm = pair
    storage = sharded.ShardedStorage(started, lm, PAGE_SIZE)
    monkeypatch.setattr(storage, "device", torch.device("cuda"))
    per_page = storage.bytes_per_page
    monkeypatch.setattr(storage, "resize", lambda num_pages: None)
    config = KvCacheConfig(free_gpu_memory_fraction=0.5)
    for own, other in ((1000 * per_page, 400 * per_page), (400 * per_page, 1000 * per_page)):
        monkeypatch.setattr(resolve, "free_gpu_memory", lambda device, own=own: own)
        monkeypatch.setattr(started, "ask", lambda command, other=other: [other])
        assert resolve._fill(config, storage, [], useful=10_000) == 180 * PAGE_SIZE


def test_an_interrupt_takes_effect_when_all_ranks_have_made_the_forward(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = two_ranks(pair)
    (sequence,) = machine.add(PROMPTS[1], GREEDY)
    machine.step()
    network = machine.runner.lm.network
    assert isinstance(network, sharded.ShardedNetwork)
    embed = network.own.embed

    def interrupted(token_ids: torch.Tensor) -> torch.Tensor:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return embed(token_ids)

    monkeypatch.setattr(network.own, "embed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        machine.step()
    drain(machine)
    assert outputs([sequence]) == batch(one_process())[1:2]
    expect_empty(machine)


def test_a_forked_child_is_told_that_it_has_no_ranks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = two_ranks(pair)
    own = os.getpid()
    monkeypatch.setattr(ranks.os, "getpid", lambda: own + 1)
    with pytest.raises(EngineStopped, match=f"belong to process {own}"):
        machine.add(PROMPTS[0], GREEDY)


@pytest.fixture
def llm() -> Iterator[LLM]:
    """A model in two processes, which are gone at the end."""
    made = LLM(
        tiny("qwen3", vocab_size=512),
        tokenizer="forethought/reasoner",
        tensor_parallel_size=2,
        dtype="float32",
        device="cpu",
        kv_cache_config={"max_tokens": 512},
    )
    own, machine = ranks_of(made), made._running().engine
    yield made
    expect_empty(machine)
    made.shutdown()
    assert all(map(has_ended, own.process_ids))
    with pytest.raises(EngineStopped, match="shut down"):
        made.generate(PROMPTS[0])


def ranks_of(llm: LLM) -> Ranks:
    runner = llm._running().engine.runner
    assert isinstance(runner, sharded.ShardedRunner)
    return runner.ranks


def test_a_killed_rank_fails_all_requests_with_its_number_and_the_signal(llm: LLM) -> None:
    (other,), params = ranks_of(llm).process_ids, GREEDY.replace(max_tokens=200)
    lost = r"lost rank 1 of 2.*SIGKILL"

    async def ask() -> None:
        async with AsyncLLM.over(llm) as served:
            with held_back(served, after=1) as let_go:
                stream = served.stream(PROMPTS[1], params)
                await anext(stream)
                others = [
                    asyncio.create_task(served.generate(prompt, params)) for prompt in PROMPTS[2:]
                ]
                await asyncio.sleep(0)
                os.kill(other, signal.SIGKILL)
                let_go.set()
                for failing in (last(stream), *others):
                    with pytest.raises(EngineStopped, match=lost):
                        await failing
            with pytest.raises(EngineStopped, match=lost):
                await served.generate(PROMPTS[0], params)

    asyncio.run(ask())
    with pytest.raises(EngineStopped, match=lost):
        llm.generate(PROMPTS[0], params)


def test_the_rank_named_is_the_one_that_did_not_follow_another() -> None:
    followed, killed = ranks.FOLLOWED, "its process was killed"
    state = ranks._State([], LocalLauncher(), causes={1: followed, 2: killed, 3: followed})
    assert state.first_cause() == (2, killed)
    state.causes = {1: followed}
    assert state.first_cause() == (1, followed)
    state.causes = {}
    assert state.first_cause() is None
    state.launcher.close()


def test_a_rank_0_that_leaves_a_forward_ends_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = llm._running().engine.runner.lm.network
    assert isinstance(network, sharded.ShardedNetwork)

    def leave(token_ids: torch.Tensor) -> torch.Tensor:
        raise SystemExit

    monkeypatch.setattr(network.own, "embed", leave)
    with pytest.raises(SystemExit):
        llm.generate(PROMPTS[1], GREEDY)
    monkeypatch.undo()
    with pytest.raises(EngineStopped, match="rank 0 of 2 failed with SystemExit"):
        llm.generate(PROMPTS[1], GREEDY)


def test_signals_to_all_processes_of_a_program_are_for_rank_0(llm: LLM) -> None:
    """It may have requests to finish first, as a server that is told to stop does."""
    (other,), params = ranks_of(llm).process_ids, GREEDY.replace(max_tokens=20)
    expected = llm.generate(PROMPTS[1], params).outputs[0].token_ids
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(other, number)
    assert llm.generate(PROMPTS[1], params).outputs[0].token_ids == expected


async def last(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def test_a_rank_that_does_not_answer_ends_the_engine_after_a_while(llm: LLM) -> None:
    lm = loader.load(tiny("qwen3", vocab_size=512), dtype="float32", device="cpu", forward="auto")
    machine, params = one_over(lm), GREEDY.replace(max_tokens=20)
    (expected,) = machine.add(PROMPTS[1], params)
    drain(machine)
    assert llm.generate(PROMPTS[1], params).outputs[0].token_ids == outputs([expected])[0]

    started = ranks_of(llm)
    stream = llm.stream(PROMPTS[1], params)
    next(stream)
    os.kill(started.process_ids[0], signal.SIGSTOP)
    started.collectives._group.set_timeout(timedelta(milliseconds=100))
    with pytest.raises(EngineStopped, match=r"does not answer.*Timed out"):
        list(stream)
    assert llm.stats.failed_forwards == 1  # it is not repeated
    for prompt in PROMPTS:
        with pytest.raises(EngineStopped, match="does not answer"):
            llm.generate(prompt, params)


def one_over(lm: CausalLM) -> Engine:
    return engine_of(ModelRunner(lm, KvStorage(lm.layer_shapes, 64, PAGE_SIZE, lm.dtype)))


def test_a_rank_that_cannot_load_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    started = Ranks(2)
    load_settings = {"path": tmp_path / "missing", "dtype": "float32"}
    with pytest.raises(EngineStopped, match=r"rank 1 of 2.*ModelError.*missing"):
        started.connect(torch.device("cpu"), load_settings, PAGE_SIZE, 1)
    assert all(map(has_ended, started.process_ids))
    started.close()


def test_a_rank_that_has_ended_after_loading_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = Ranks(2)
    receive = started._receive

    def kill(process: LocalProcess) -> Any:
        reply = receive(process)
        process.popen.kill()
        process.popen.wait()
        return reply

    monkeypatch.setattr(started, "_receive", kill)
    monkeypatch.delattr(ranks, "Collectives")  # they would be waited for
    with pytest.raises(EngineStopped, match=r"rank 1 of 2.*SIGKILL"):
        started.connect(torch.device("cpu"), {"path": tiny("llama")}, PAGE_SIZE, 1)
    assert all(map(has_ended, started.process_ids))


def test_a_rank_that_was_told_nothing_removes_the_directory(tmp_path: Path) -> None:
    """Rank 0 was killed before it could say what to load."""
    directory = tmp_path / "ranks"
    directory.mkdir()
    process = LocalProcess.start(1, str(directory))
    process.commands.close()
    assert process.popen.wait(120) == 0
    assert not directory.exists()
    process.lifeline.close()


PROGRAM = """
import sys
from forethought import LLM, AsyncLLM
llm = LLM(sys.argv[1], tokenizer="forethought/reasoner", tensor_parallel_size=2, device="cpu",
          dtype="float32", kv_cache_config={"max_tokens": 512})
print(*llm.lend("me").engine.runner.ranks.process_ids, flush=True)
sys.stdin.read(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_no_rank_and_no_file_outlives_the_program(end: str, tmp_path: Path) -> None:
    """It begins at the top of a main module, without a guard; then it ends, or is killed."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tiny("llama", vocab_size=512)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
    )
    with program:
        assert program.stdin is not None
        assert program.stdout is not None
        other = int(program.stdout.readline())
        assert not has_ended(other)
        if end == "kill":
            program.kill()
        else:
            program.stdin.write(b"\n")
            program.stdin.flush()
        program.wait(120)
    until = time.monotonic() + 120
    while not has_ended(other) and time.monotonic() < until:
        threading.Event().wait(0.01)
    assert has_ended(other)
    assert list(tmp_path.glob("forethought-ranks-*")) == []


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"forward": "native"}, 'forward="native"'),
        ({"fuse": False}, "fuse=False"),
        ({"cuda_graphs": True}, "cuda_graphs=True"),
        ({"quantization": "int8"}, 'quantization="int8"'),
        ({"device": "meta"}, "meta"),
    ],
)
def test_settings_that_exclude_it_are_refused_before_anything_is_started(
    settings: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tensor_parallel, "Ranks")
    args = LlmArgs(**{"tensor_parallel_size": 2, "device": "cpu", **settings})
    with pytest.raises(ParameterError, match="tensor_parallel_size=2") as refused:
        resolve.build(args, tiny("llama"))
    assert why in str(refused.value)


@pytest.mark.parametrize(
    "architecture",
    ["llama_mqa", "gemma3", "phi3", "qwen3_moe", "gpt2", "qwen3_5", "bamba", "jamba", "lfm2"],
)
def test_models_that_cannot_be_cut_are_refused_before_anything_is_started(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tensor_parallel, "Ranks")
    with pytest.raises(ModelError, match="tensor_parallel_size=2"):
        resolve.build(LlmArgs(tensor_parallel_size=2, device="cpu"), tiny(architecture))


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    args = LlmArgs(tensor_parallel_size=2, device="cuda")
    with pytest.raises(ParameterError, match="there are 1 GPUs"):
        tensor_parallel.check(args, tiny("llama"), torch.device("cuda"))
    with pytest.raises(ParameterError, match="single one"):
        tensor_parallel.check(args, tiny("llama"), torch.device("cuda:1"))


def test_a_torch_without_the_collectives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.dist, "is_available", lambda: False)
    args = LlmArgs(tensor_parallel_size=2, device="cpu")
    with pytest.raises(ParameterError, match=r"without torch\.distributed"):
        tensor_parallel.check(args, tiny("llama"), torch.device("cpu"))


def test_a_machine_without_a_temporary_directory_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_dir = tiny("llama")

    def refuse(prefix: str) -> str:
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ParameterError, match=r"No usable temporary directory.*TMPDIR"):
        resolve.build(LlmArgs(tensor_parallel_size=2, device="cpu"), model_dir)
