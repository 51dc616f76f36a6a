"""Replicas whose ranks are actors of Ray: the same tokens as one process, and no rank left over."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forethought.backends.tensor_parallel.collectives import PortMeeting
from forethought.cluster import actors, entrance, links_of, open_llm, ranks
from forethought.cluster.actors import NAMESPACE, Resources, release
from forethought.cluster.engine import ClusterEngine
from forethought.cluster.entrance import Entrance
from forethought.cluster.ranks import _hello, connect
from forethought.config.sampling import SamplingParams
from forethought.errors import ModelError, ParameterError
from forethought.llm.async_llm import AsyncLLM

FIELDS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "forward": "auto", "device": "cpu"}
PROMPTS = [f"Question: What is {n} + {3 * n} * 2?\n" for n in (11, 12)]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.9, "top_p": 0.9, "seed": 6, "n": 2, "frequency_penalty": 0.3},
]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    llm = AsyncLLM(**FIELDS)
    outputs = asyncio.run(all_streams(llm))
    llm.shutdown()
    return outputs


@pytest.fixture(scope="module")
def cluster(ray_here: None) -> Iterator[AsyncLLM]:
    """Two replicas of two ranks each, all of whose processes are gone at the end."""
    llm = open_llm(replicas=2, tensor_parallel_size=2, **FIELDS)
    wait_until(lambda: sum(link.is_up for link in links_of(llm)) == 2)
    yield llm
    engine = engine_of(llm)
    llm._thread.call(engine.check_integrity).result()
    assert not engine._remotes, "sequences are left"
    processes = [number for name in names_of(llm) for number in processes_of(name)]
    for name in names_of(llm):
        on_replica(name, lambda replica: replica._llm._thread.call(
            replica._llm._frontend.local_engine.check_integrity).result(30))  # fmt: skip
    llm.shutdown()
    assert len(processes) == 4
    wait_until(lambda: all(map(has_ended, processes)))
    assert groups_in_use() == []


def engine_of(llm: AsyncLLM) -> ClusterEngine:
    engine = llm._frontend.engine
    assert isinstance(engine, ClusterEngine)
    return engine


def names_of(llm: AsyncLLM) -> list[str]:
    return [link.name for link in links_of(llm) if link.is_up]


def on_replica(name: str, function: Callable[[Any], Any]) -> Any:
    import ray

    return ray.get(ray.get_actor(name, NAMESPACE).__ray_call__.remote(function))


def processes_of(name: str) -> list[int]:
    """The processes of a replica's ranks, from rank 0 on."""
    return on_replica(
        name,
        lambda replica: [
            os.getpid(),
            *replica._llm._frontend.local_engine.runner.ranks.process_ids,
        ],
    )


def groups_in_use() -> list[str]:
    import ray

    groups = ray.util.placement_group_table().values()
    return [group["name"] for group in groups if group["state"] != "REMOVED"]


def has_ended(process_id: int) -> bool:
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


async def all_streams(llm: AsyncLLM, happen: Callable[[], None] | None = None) -> list[Any]:
    """What streams with all params give; something happens when one has forty tokens."""
    common: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
    pending = [happen]

    async def streamed(prompt: str, params: SamplingParams) -> list[Any]:
        samples: list[Any] = []
        async for output in llm.stream(prompt, params, gather=0.01):
            samples = output.outputs
            if len(samples[0].token_ids) > 40 and (now := pending.pop() if pending else None):
                now()
        return [(sample.token_ids, sample.text, sample.finish_reason) for sample in samples]

    jobs = [
        streamed(prompt, SamplingParams(**common | fields))
        for prompt in PROMPTS
        for fields in PARAMS
    ]
    return await asyncio.gather(*jobs)


def test_tokens_are_those_of_one_process(cluster: AsyncLLM, expected: list[Any]) -> None:
    assert asyncio.run(all_streams(cluster)) == expected
    assert sorted(groups_in_use()) == sorted(names_of(cluster))


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_its_replica_and_changes_no_stream(
    cluster: AsyncLLM, expected: list[Any], rank: int
) -> None:
    """Its other rank ends with it, and another replica comes in its place."""
    wait_until(lambda: len(names_of(cluster)) == 2)
    lost, processes = cluster.stats.replicas_lost, list[int]()

    def kill() -> None:
        link = max(links_of(cluster), key=lambda link: link.num_generating)
        processes.extend(processes_of(link.name))
        os.kill(processes[rank], signal.SIGKILL)

    assert asyncio.run(all_streams(cluster, kill)) == expected
    assert len(processes) == 2
    assert cluster.stats.replicas_lost == lost + 1
    wait_until(lambda: all(map(has_ended, processes)))
    wait_until(lambda: len(names_of(cluster)) == 2)
    assert not set(processes) & {n for name in names_of(cluster) for n in processes_of(name)}


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_runs_is_noticed(cluster: AsyncLLM) -> None:
    wait_until(lambda: len(names_of(cluster)) == 2)
    lost, name = cluster.stats.replicas_lost, names_of(cluster)[0]
    processes = processes_of(name)
    os.kill(processes[1], signal.SIGKILL)
    wait_until(lambda: cluster.stats.replicas_lost == lost + 1)
    wait_until(lambda: all(map(has_ended, processes)))
    wait_until(lambda: len(names_of(cluster)) == 2)


def test_more_ranks_than_machines_have_room_for_are_refused_before_anything_is_started(
    ray_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("forethought.cluster.worker.Fleet")
    with pytest.raises(ParameterError, match=r"tensor_parallel_size=16.*room for 8 such ranks"):
        open_llm(replicas=1, tensor_parallel_size=16, **FIELDS)
    with pytest.raises(ParameterError, match=r"a rank takes 5 CPUs.*room for 1 such ranks"):
        open_llm(replicas=1, tensor_parallel_size=2, **{**FIELDS, "num_threads": 5})


def test_the_room_for_ranks_is_counted_machine_by_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = [{"CPU": 6.0, "GPU": 1.0}, {"CPU": 3.0, "GPU": 4.0}, {"CPU": 64.0}]
    nodes = [{"Alive": True, "Resources": machine} for machine in machines]
    nodes.append({"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}})
    monkeypatch.setattr(actors, "_ray", lambda: SimpleNamespace(nodes=lambda: nodes))
    Resources(2, 1, 2).check_capacity()
    Resources(6, 0, 11).check_capacity()
    Resources(100, 1, 1).check_capacity()  # in one process: it waits
    for refused in (Resources(2, 1, 3), Resources(4, 1, 2), Resources(6, 0, 12)):
        with pytest.raises(ParameterError, match="room for"):
            refused.check_capacity()


def test_a_model_that_cannot_be_cut_ends_the_start_and_leaves_nothing(ray_here: None) -> None:
    before = set(groups_in_use())
    with pytest.raises(ModelError, match="tensor_parallel_size=3"):
        open_llm(replicas=1, tensor_parallel_size=3, **FIELDS)
    wait_until(lambda: set(groups_in_use()) <= before)  # those of others may end meanwhile


def test_a_placement_group_that_a_dead_replica_has_left_is_replaced(ray_here: None) -> None:
    import ray

    ray.util.placement_group([{"CPU": 1}], name="replica-stale", lifetime="detached")
    actors._bundle("replica-stale", Resources(1, 0, 2))
    groups = ray.util.placement_group_table().values()
    (group,) = [g for g in groups if g["name"] == "replica-stale" and g["state"] != "REMOVED"]
    assert len(group["bundles"]) == 2
    release("replica-stale")
    assert "replica-stale" not in groups_in_use()
    release("replica-stale")


def test_only_those_who_know_the_secret_are_ranks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as others:
        meeting_point = Entrance.of(listener)
        for secret, hello in ((meeting_point.secret, (True, 3, os.getpid())), (b"t" * 32, None)):
            rank = others.submit(
                connect, meeting_point._replace(secret=secret), 3, is_lifeline=True
            )
            accepted, _ = listener.accept()
            assert _hello(accepted, meeting_point) == hello
            if hello is None:
                assert isinstance(rank.exception(), ConnectionError)
                continue
            connection, host = rank.result()
            assert host == "127.0.0.1"
            accepted.close()
            connection.close()
        with socket.create_connection(listener.getsockname()) as silent:
            silent.shutdown(socket.SHUT_WR)
            assert _hello(listener.accept()[0], meeting_point) is None


def test_a_stranger_that_sends_a_byte_at_a_time_does_not_keep_ranks_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, timeouts = [0.0], list[float]()

    def drip(size: int) -> bytes:
        now[0] += 1.0
        return b"s"

    accepted: Any = SimpleNamespace(
        settimeout=timeouts.append, recv=drip, sendall=lambda data: None, close=lambda: None
    )
    for module in (ranks, entrance):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert _hello(accepted, Entrance("127.0.0.1", 0, b"s" * 32)) is None
    assert now[0] == ranks.HELLO_SECONDS
    assert timeouts == [ranks.HELLO_SECONDS - seconds for seconds in range(len(timeouts))]


def test_ranks_meet_at_a_port_of_rank_0() -> None:
    meeting, store = PortMeeting.open("127.0.0.1", 2)
    other = meeting.store(2)
    store.set("a", "1")
    assert other.get("a") == b"1"
