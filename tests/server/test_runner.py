"""The process of the server: its log, and its garbage collections."""

import gc
import io
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from forethought.server import runner
from forethought.server.runner import LogHandler
from http_servers import eventually

LONG = 3600.0
"""Seconds that are not over before the end of a test."""


class Written(io.StringIO):
    """Keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    log = logging.Logger("of the test")
    yield log
    for handler in log.handlers:
        handler.close()


def test_lines_are_gathered_and_written_together(log: logging.Logger) -> None:
    stream = Written()
    handler = LogHandler(stream, LONG)
    log.addHandler(handler)
    log.info("one %d", 1)
    log.info("two")
    assert stream.writes == []
    handler.flush()
    assert stream.writes == ["one 1\ntwo\n"]


def test_a_warning_is_written_at_once_behind_the_lines_before_it(log: logging.Logger) -> None:
    stream = Written()
    log.addHandler(LogHandler(stream, LONG))
    log.info("one")
    log.warning("two")
    eventually(lambda: stream.getvalue() == "one\ntwo\n")


def test_who_logs_a_warning_waits_for_no_write(log: logging.Logger) -> None:
    goes_on = threading.Event()

    class Stuck(Written):
        def write(self, text: str) -> int:
            assert goes_on.wait(LONG)
            return super().write(text)

    stream = Stuck()
    log.addHandler(LogHandler(stream, LONG))
    for number in range(3):
        log.warning("%d", number)
    assert stream.writes == []
    goes_on.set()
    eventually(lambda: stream.getvalue() == "0\n1\n2\n")


def test_lines_come_by_themselves(log: logging.Logger) -> None:
    stream = Written()
    log.addHandler(LogHandler(stream, 0.0))
    for text in ("one", "two"):
        log.info(text)
        eventually(lambda text=text: stream.getvalue().endswith(f"{text}\n"))


def test_a_line_that_cannot_be_written_hurts_no_other(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream = Written()
    log.addHandler(LogHandler(stream, LONG))
    log.info("%d", "no number")
    log.warning("two")
    eventually(lambda: stream.getvalue() == "two\n")


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Nothing is left out of garbage collections, as in a program of its own."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("freezes", [False, True])
def test_collections_are_rare_while_it_serves_and_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch, freezes: bool
) -> None:
    """Also in a program that has frozen objects of its own."""
    if freezes:
        gc.freeze()
    seen: list[tuple[int, int]] = []

    class Server:
        started, force_exit = True, False

        def __init__(self, *_: object) -> None:
            pass

        def run(self, **_: object) -> None:
            seen.append((gc.get_threshold()[0], gc.get_freeze_count()))

    monkeypatch.setattr(runner, "Server", Server)
    before = gc.get_threshold()
    app: Any = None
    with runner.bind("127.0.0.1", 0) as bound:
        assert runner.serve(app, bound, 1.0, lambda url: None) == 0
    [(threshold, num_frozen)] = seen
    assert threshold > before[0]
    assert num_frozen > 0
    assert gc.get_threshold() == before
    assert (gc.get_freeze_count() > 0) == freezes
