"""``forethought cluster`` lists replicas and drains one; the cluster of Ray is a double here."""

from __future__ import annotations

import pytest

from forethought.cli.main import main
from forethought.cluster import actors
from forethought.cluster.replica import Status, Traffic
from forethought.outputs import EngineLoad


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of replicas that were drained."""
    names: list[str] = []
    replicas = {
        "a-0": Status(False, EngineLoad(3, 1, 0.25), Traffic()),
        "a-1": Status(True, EngineLoad(0, 0, 0.0), Traffic(3, 0, 17, 2)),
        "a-prefill-0": Status(False, EngineLoad(0, 0, 0.0), Traffic(9, 1, 40, 5)),
        "a-2": None,
    }
    monkeypatch.setattr(actors, "start_ray", lambda address, count: names.append(address))
    monkeypatch.setattr(actors, "statuses", lambda: replicas)
    monkeypatch.setattr(actors, "drain_replica", names.append)
    return names


def test_replicas_are_listed_with_their_loads(
    drained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a-0  up  3 running, 1 waiting, 25% of its KV cache; sent 0 sequences, 0 pages; "
        "received 0, 0",
        "a-1  draining  0 running, 0 waiting, 0% of its KV cache; sent 3 sequences, 17 pages; "
        "received 0, 2",
        "a-prefill-0  up (prefill)  0 running, 0 waiting, 0% of its KV cache; "
        "sent 9 sequences, 40 pages; received 1, 5",
        "a-2  does not answer",
    ]
    assert drained == ["auto"]


def test_a_replica_is_drained_by_its_name_in_the_cluster_at_an_address(drained: list[str]) -> None:
    assert main(["cluster", "drain", "a-0", "--ray-address", "10.0.0.1:6379"]) == 0
    assert drained == ["10.0.0.1:6379", "a-0"]


@pytest.mark.parametrize("line", ["cluster drain", "cluster list a-0", "cluster nope"])
def test_a_drain_has_a_name_and_a_list_has_none(drained: list[str], line: str) -> None:
    assert main(line.split()) == 2
    assert drained == []
