"""One Ray for all tests of replicas, on this machine's loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from forethought.cluster import fleet, migration


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Ray is started, and ended with the session."""
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "forethought[ray]"')
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        namespace="forethought",
        num_cpus=8,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        _system_config={"worker_niceness": 0},
    )
    yield
    ray.shutdown()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas start again, and are looked at, without a delay; failed moves are tried again."""
    monkeypatch.setattr(fleet, "FIRST_DELAY", 0.0)
    monkeypatch.setattr(fleet, "TICK", 0.02)
    monkeypatch.setattr(migration, "RETRY", 0.0)
