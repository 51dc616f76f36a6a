"""Rules for the whole suite: no network, one thread per process, CUDA tests only where CUDA is.

Ctrl-C raises KeyboardInterrupt, as in a terminal; a job in the background would ignore it.
"""

from __future__ import annotations

import gc
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

# Before torch or transformers are imported by any test.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import HealthCheck, Phase, settings

collect_ignore = ["clients"]  # make test-clients runs them, in an environment of their own

# The same examples every time, however slow the machine; --hypothesis-profile=random draws others.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("random"), derandomize=True, database=None)
settings.load_profile("same")
settings.register_profile(
    "unshrunk",
    settings.get_profile("random"),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)  # a failure is enough where nobody reads the example: see scripts/mutants.py


class NetworkForbidden(RuntimeError):
    """A test tried to leave this machine."""


def _check(host: object) -> None:
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost"):
        return
    try:
        inside = ipaddress.ip_address(str(name)).is_loopback
    except ValueError:
        inside = False
    if not inside:
        raise NetworkForbidden(f"tests must not reach the network, and one asked for {name!r}")


@pytest.fixture(autouse=True, scope="session")
def _loopback_only() -> Iterator[None]:
    connect, connect_ex, getaddrinfo = (
        socket.socket.connect,
        socket.socket.connect_ex,
        socket.getaddrinfo,
    )

    def guarded(original: Any) -> Any:
        def call(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                _check(address[0])
            return original(self, address)

        return call

    def guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        _check(host)
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded(connect))
        patch.setattr(socket.socket, "connect_ex", guarded(connect_ex))
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield


@pytest.fixture(autouse=True)
def _threads_stay_as_they_are() -> Iterator[None]:
    """``num_threads`` of an LLM is that of the process: tests after one that leaves torch with more
    threads than there are processors would wait for them in each operation."""
    yield
    torch = sys.modules.get("torch")
    expected = int(os.environ["OMP_NUM_THREADS"])
    if torch is not None and (left := torch.get_num_threads()) > expected:
        torch.set_num_threads(expected)
        pytest.fail(f"this test has left torch with {left} threads instead of {expected}")


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a full garbage collection, of which there are many in
    tests and more by themselves, need not look through millions of their objects each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no CUDA; torch is imported only if one is there."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
