"""What actors of Ray are made with; Ray itself is a double here."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forethought.cluster import actors
from forethought.cluster.actors import ReplicaActor, Resources, name_of, start_ray
from forethought.cluster.replica import Replica
from forethought.errors import ModelError, ParameterError


@pytest.mark.parametrize(
    ("total", "fields", "num_replicas", "resources"),
    [
        ({"CPU": 2}, {}, 2, (1, 0)),
        ({"CPU": 2}, {}, 3, (1, 0)),
        ({"CPU": 16}, {"num_threads": 3}, 2, (3, 0)),
        ({"CPU": 64, "GPU": 8}, {}, 8, (8, 1)),
        ({"CPU": 64, "GPU": 8}, {"tensor_parallel_size": 4}, 2, (8, 1, 4)),
        ({"CPU": 64}, {"tensor_parallel_size": 2}, 1, (32, 0, 2)),
        ({"CPU": 64, "GPU": 8}, {"device": "cpu"}, 2, (32, 0)),
        ({"CPU": 64, "node:a": 1, "node:b": 1, "node:__internal_head__": 1}, {}, 1, (32, 0)),
    ],
)
def test_a_replica_takes_an_equal_share_of_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
    total: dict[str, float],
    fields: dict[str, Any],
    num_replicas: int,
    resources: tuple[int, ...],
) -> None:
    ray = SimpleNamespace(cluster_resources=lambda: total)
    monkeypatch.setattr(actors, "_ray", lambda: ray)
    assert Resources.share(fields, num_replicas) == Resources(*resources)


def test_the_process_of_a_replica_that_nobody_needs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(actors.os, "_exit", lambda status: ended.append("process"))
    ranks: Any = SimpleNamespace(release=lambda: ended.append("ranks"))
    Replica({}, ranks=ranks).retire()
    assert ended == ["ranks"], "another process may be where it is"
    ReplicaActor({}, ranks=ranks).retire()
    assert ended == ["ranks", "ranks", "process"]


def test_replicas_are_found_again_by_the_arguments_of_their_model() -> None:
    names = {name_of({"model": model, "dtype": "float32"}) for model in ("a", "b", "a")}
    assert len(names) == 2


def test_a_cluster_that_cannot_be_joined_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(**options: Any) -> None:
        tried.append(options["address"])
        raise ConnectionError(f"nothing at {options['address']}")

    ray = SimpleNamespace(is_initialized=lambda: False, init=refuse)
    monkeypatch.setattr(actors, "_ray", lambda: ray)
    monkeypatch.setattr(actors, "_TOKEN", Path("/nothing"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        for there in (address, "auto"):
            with pytest.raises(ParameterError, match=rf"{there}.*ray start"):
                start_ray(there, 2)
    assert tried == [address, "auto"]
    for nowhere in (address, "127.0.0.1:99999", f"ray://{address}"):
        with pytest.raises(ParameterError, match=rf"{nowhere}.*ray start"):
            start_ray(nowhere, 2)
    assert tried == [address, "auto"], "Ray would try for minutes"


def test_the_error_of_a_replica_is_that_of_its_method_without_the_traceback() -> None:
    ray_error = pytest.importorskip("ray").exceptions.RayTaskError
    for cause in (ModelError("too large", "why", "what to do"), OSError(28, "no space")):
        raised = ray_error("connect", "Traceback ...", cause).as_instanceof_cause()
        error = actors._as_error(raised)
        assert str(cause) in str(error)
        assert "Traceback" not in str(error)
