"""A replica as its ingresses see it: order of messages, what it tells and when, leases."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from forethought.cluster import replica as replica_module
from forethought.cluster.messages import (
    Branch,
    Close,
    Copied,
    Copy,
    Generate,
    Progress,
    Reach,
    Stop,
)
from forethought.cluster.replica import Replica
from forethought.config.sampling import SamplingParams
from forethought.engine.base import FRESH, Begun
from forethought.errors import EngineStopped, ParameterError, RequestError, UsageError
from forethought.outputs import FinishReason

FIELDS = {"dtype": "float32", "num_threads": 1, "max_seq_len": 600}
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
PROMPT = list(range(40, 60))


def played(play: Callable[[Replica], Awaitable[Any]]) -> Any:
    """What ``play`` returns, with a replica that is empty afterwards."""

    async def run() -> Any:
        replica = Replica(FIELDS)
        try:
            await replica.connect("me")
            result = await play(replica)
            await replica.leave("me")
            await until_empty(replica)
            return result
        finally:
            replica._llm.shutdown()

    return asyncio.run(run())


async def until_empty(replica: Replica) -> None:
    """No sequence is left, and every page is where it belongs."""
    engine, call = replica._llm._frontend.local_engine, replica._llm._thread.call
    async with asyncio.timeout(60):
        while await asyncio.wrap_future(call(lambda: list(engine.scheduler))):
            await asyncio.sleep(0.005)
    await asyncio.wrap_future(call(engine.check_integrity))


def generate(handle: int, number: int, length: int = 0, rest: list[int] = PROMPT, **fields: Any):
    begun = fields.pop("begun", FRESH)
    return Generate(handle, number, length, rest, PARAMS.replace(**fields), begun)


async def until_end(replica: Replica, *numbers: int) -> dict[int, list[Progress]]:
    """What is told of generations until all have ended; commands are as they are sent."""
    told: dict[int, list[Progress]] = {number: [] for number in numbers}
    going = set(numbers)
    while going:
        for progress in pickle.loads(pickle.dumps(await replica.updates("me"))).progress:
            told.setdefault(progress.generation, []).append(progress)
            if progress.finish_reason is not None or progress.error is not None:
                going.discard(progress.generation)
    return told


def tokens(told: list[Progress]) -> list[int]:
    return [token for progress in told for token in progress.tokens]


def test_messages_that_come_in_another_order_are_run_in_theirs() -> None:
    async def play(replica: Replica) -> list[int]:
        await replica.tell("me", 2, [generate(1, 11)])
        await replica.tell("me", 1, [Branch(1, 0, len(PROMPT)), Close(0)])
        await replica.tell("me", 0, [generate(0, 10)])
        return tokens((await until_end(replica, 11))[11])

    async def alone(replica: Replica) -> list[int]:
        await replica.tell("me", 0, [generate(0, 10)])
        return tokens((await until_end(replica, 10))[10])

    assert played(play) == played(alone)


def test_a_session_goes_on_from_any_of_its_lengths_and_an_output_that_began_elsewhere() -> None:
    async def play(replica: Replica) -> None:
        await replica.tell("me", 0, [generate(0, 0)])
        whole = tokens((await until_end(replica, 0))[0])
        more = [generate(0, 1, 30, whole[10:25], begun=Begun(25)), generate(1, 2)]
        await replica.tell("me", 1, more)
        told = await until_end(replica, 1, 2)
        assert tokens(told[1]) == whole[25:]
        assert tokens(told[2]) == whole
        assert sum(progress.usage.decoded for progress in told[2]) == 60

    played(play)


def test_first_tokens_awaited_ones_and_the_end_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_module, "GATHER", 1000.0)

    async def play(replica: Replica) -> list[int]:
        async with asyncio.timeout(60):
            await replica.tell("me", 0, [generate(0, 0, max_tokens=500), Reach(0, 200, 200)])
            first = (await replica.updates("me")).progress[0]
            sizes = [len(first.tokens)]
            while sum(sizes) < 200:
                sizes += [len(p.tokens) for p in (await replica.updates("me")).progress]
            assert sum(sizes) == 200  # it is held there
            await replica.tell("me", 1, [Reach(0, 500, 1000)])
            rest = await until_end(replica, 0)
            assert len(tokens(rest[0])) == 300
            return sizes

    assert len(played(play)) <= 3


def test_a_stopped_generation_is_not_told_of_and_its_session_stays() -> None:
    async def play(replica: Replica) -> None:
        await replica.tell("me", 0, [generate(0, 0, max_tokens=500)])
        first = tokens((await replica.updates("me")).progress)
        await replica.tell("me", 1, [Stop(0), generate(0, 1, len(PROMPT) + 1, [])])
        told = await until_end(replica, 1)
        assert first
        assert len(tokens(told[1])) == 60

    played(play)


def test_errors_of_a_generation_are_told_and_end_nothing_else() -> None:
    async def play(replica: Replica) -> None:
        params = {"guided_decoding": {"regex": "((("}}
        await replica.tell("me", 0, [generate(0, 0, **params), generate(1, 1), generate(2, 2, 9)])
        told = await until_end(replica, 0, 1, 2)
        assert isinstance(told[0][-1].error, ParameterError)
        assert len(tokens(told[1])) == 60
        assert told[2][-1].error is not None

    played(play)


def test_log_probabilities_begin_with_the_tokens_that_are_told() -> None:
    async def play(replica: Replica) -> None:
        begun = [*PROMPT, 7, 8, 9]
        await replica.tell("me", 0, [generate(0, 0, 0, begun, logprobs=0, begun=Begun(3))])
        for progress in (await until_end(replica, 0))[0]:
            pairs = zip(progress.tokens, progress.logprobs or (), strict=True)
            assert all(token in scores for token, scores in pairs)

    played(play)


async def copied(source: Replica, number: int, target: Replica, command: Copy) -> Copied:
    """The answer to a copy, whose pages travel as between processes."""
    fetched = asyncio.create_task(source.pages("me", command.target))
    await source.tell("me", number, [command])
    return await target.receive("me", command.target, pickle.loads(pickle.dumps(await fetched)))


def test_a_session_is_copied_in_parts_while_it_generates_and_goes_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_module, "COPY_BYTES", 200_000)  # of some 40 tokens
    params = PARAMS.replace(max_tokens=500, logprobs=0)

    async def play(source: Replica) -> list[Progress]:
        target = Replica(FIELDS)
        await target.connect("me")
        await source.tell("me", 0, [Generate(0, 0, 0, PROMPT, params, FRESH)])
        await source.updates("me")
        parts = [await copied(source, 1, target, Copy(0, 7, 0))]
        while parts[-1].num_left > 40:
            command = Copy(0, 7, parts[-1].num_tokens)
            parts.append(await copied(source, len(parts) + 1, target, command))
        last = Copy(0, 7, parts[-1].num_tokens, generation=0)
        final = await copied(source, len(parts) + 1, target, last)
        told = (await until_end(source, 0))[0]
        assert told[-1].finish_reason is FinishReason.ABORT
        num_begun = final.num_tokens - len(PROMPT)
        go_on = Generate(7, 1, final.num_tokens, [], params, Begun(num_begun))
        await target.tell("me", 0, [go_on])
        rest = (await until_end(target, 1))[1]
        assert rest[-1].usage.prefilled + sum(p.usage.prefilled for p in rest[:-1]) <= 1
        assert all(part.num_bytes <= 200_000 for part in parts)
        await target.leave("me")
        target._llm.shutdown()
        return tokens(rest)

    async def alone(replica: Replica) -> list[int]:
        await replica.tell("me", 0, [Generate(0, 0, 0, PROMPT, params, FRESH)])
        return tokens((await until_end(replica, 0))[0])

    rest = played(play)
    assert rest
    assert played(alone)[-len(rest) :] == rest


def test_a_copy_of_no_session_fails_for_the_one_that_fetches_it() -> None:
    async def play(replica: Replica) -> None:
        await replica.tell("me", 0, [Copy(3, 7, 0)])
        with pytest.raises(RequestError):
            await replica.pages("me", 7)
        await replica.drain()
        assert (await replica.updates("me")).is_draining
        assert (await replica.status()).is_draining

    played(play)


def test_an_ingress_that_asks_no_more_loses_its_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "LEASE", 0.3)

    async def play(replica: Replica) -> None:
        await replica.tell("me", 0, [generate(0, 0, max_tokens=500)])
        async with asyncio.timeout(60):
            while replica._ingresses:
                await asyncio.sleep(0.01)
        with pytest.raises(EngineStopped, match="not known"):
            await replica.updates("me")
        with pytest.raises(EngineStopped, match="not known"):
            await replica.tell("me", 1, [])

    played(play)


def test_a_replica_whose_engine_has_died_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(replica: Replica) -> None:
        await replica.tell("me", 0, [generate(0, 0, max_tokens=500)])
        await replica.updates("me")
        replica._llm._thread.stop()
        with pytest.raises(EngineStopped, match="died"):
            await replica.updates("me")

    async def run() -> None:
        replica = Replica(FIELDS)
        await replica.connect("me")
        await play(replica)

    asyncio.run(run())


def test_a_replica_listens_to_the_network_only_for_an_ingress_of_another_machine() -> None:
    async def run() -> list[str | None]:
        replica = Replica(FIELDS, host=lambda: "127.0.0.2")
        entrances = []
        try:
            for machine in (None, "127.0.0.2", "127.0.0.3", "127.0.0.2"):
                entrances.append((await replica.connect("me", machine)).entrance)
            unreachable = Replica(FIELDS, host=lambda: "192.0.2.77")  # of no machine
            unreachable._loaded = replica._loaded
            entrances.append((await unreachable.connect("me", "127.0.0.3")).entrance)
        finally:
            for _, server in replica._listener._opened.values():
                server.close()
            replica._llm.shutdown()
        assert len(replica._listener._opened) == 2
        return [entrance and entrance.host for entrance in entrances]

    hosts = [None, "127.0.0.1", "127.0.0.2", "127.0.0.1", None]
    assert asyncio.run(run()) == hosts


def test_a_model_that_cannot_be_loaded_is_refused_where_it_is_asked_for() -> None:
    async def run() -> None:
        await Replica({"model": "/nowhere"}).connect("me")

    with pytest.raises(UsageError):
        asyncio.run(run())


def test_a_replica_that_no_ingress_asks_for_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()
    monkeypatch.setattr(replica_module, "LEASE", 0.2)
    monkeypatch.setattr(replica_module, "ORPHAN", 0.2)
    monkeypatch.setattr(Replica, "retire", lambda self: ended.set())

    async def play(replica: Replica) -> None:
        async with asyncio.timeout(60):
            await ended.wait()

    played(play)


def test_an_ingress_that_leaves_is_told_whether_others_ask() -> None:
    async def play(replica: Replica) -> None:
        await replica.connect("other")
        await replica.updates("other")
        assert await replica.leave("me") == 1
        assert await replica.leave("other") == 0

    played(play)
