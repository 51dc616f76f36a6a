"""Threads of the native forward keep step, sleep while they wait, and give way to others."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from pathlib import Path

import pytest

from forethought.backends.cpu import library

COMPILER = library.find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
SECOND = 1000
HOUR = 3600 * SECOND


def compiled(directory: Path, *options: str) -> ctypes.CDLL:
    path = directory / "team.so"
    source, headers = Path(__file__).with_name("team.cpp"), library.SOURCE.parent
    command = [str(COMPILER), *library.FLAGS, *options, f"-I{headers}", str(source)]
    subprocess.run([*command, "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="module")
def team(tmp_path_factory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("team"))


def in_thread(function: ctypes._NamedFuncPointer, *args: int) -> int:
    """The result in a thread of its own, which has a team of its own."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("num_threads", [1, 2, pytest.param(3, marks=pytest.mark.slow), 8])
def test_no_thread_passes_a_barrier_before_the_others(team, num_threads: int) -> None:
    assert in_thread(team.members, num_threads) == num_threads
    assert in_thread(team.phases_out_of_step, num_threads, 500) == 0


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("slow"), "-DTEAM_PAUSE()=usleep(2000)")


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_that_fall_asleep_while_the_last_one_is_interrupted_are_released(
    slow: ctypes.CDLL, num_threads: int
) -> None:
    """It has been counted and has not released the others yet, and did not see them asleep."""
    assert in_thread(slow.phases_out_of_step, num_threads, 50) == 0


def test_a_team_grows_and_shrinks(team) -> None:
    def run() -> None:
        found.extend(team.phases_out_of_step(count, 5) for count in (2, 4, 1, 3, 4, 2))

    found: list[int] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [0] * 6


def test_a_forked_process_has_a_team_of_its_own(team) -> None:
    def run() -> None:
        before = team.phases_out_of_step(2, 5)
        child = os.fork()
        if not child:
            os._exit(team.phases_out_of_step(2, 5))
        found.extend([before, os.waitpid(child, 0)[1], team.phases_out_of_step(2, 5)])

    found: list[int] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [0, 0, 0]


def stat(thread: int) -> list[str]:
    """The fields of a thread of this process after its name: state, ..., ticks in user mode"""
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()


def threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux says which threads sleep")
def test_threads_that_wait_sleep_after_a_bounded_number_of_looks(team) -> None:
    reading, writing = os.pipe()
    before = threads()
    caller = threading.Thread(target=team.wait_for_byte, args=(3, reading))
    caller.start()
    try:
        asleep: set[int] = set()
        while len(asleep) < 3:  # the caller and both that it has started
            asleep = {thread for thread in threads() - before if stat(thread)[0] == "S"}
        ticks = [int(stat(thread)[11]) for thread in asleep]
        assert max(ticks) < os.sysconf("SC_CLK_TCK")  # they have not looked for a second
    finally:
        os.write(writing, b"x")
        caller.join()
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("slept", "times", "now", "is_high"),
    [
        pytest.param([], [], HOUR, False, id="nothing"),
        pytest.param([SECOND], [HOUR], HOUR + 1, False, id="a single pause"),
        pytest.param([5, 20], [HOUR, HOUR + 30], HOUR + 40, True, id="two in a row"),
        pytest.param([5, 20], [HOUR, HOUR + 30], HOUR + 30 + 20 - 1, True, id="for a while"),
        pytest.param([5, 20], [HOUR, HOUR + 30], HOUR + 30 + 20, False, id="not for ever"),
        pytest.param([5, 20], [HOUR, HOUR + 200], HOUR + 201, False, id="much work between"),
        pytest.param([1] * 9, range(HOUR, HOUR + 18, 2), HOUR + 18, False, id="less than a slice"),
        pytest.param([1] * 12, range(HOUR, HOUR + 24, 2), HOUR + 24, True, id="many short ones"),
        pytest.param([1] * 99, range(HOUR, HOUR + 990, 10), HOUR + 990, False, id="few short ones"),
        pytest.param(
            [5, 20, 20],
            [HOUR, HOUR + 30, HOUR + 70],
            HOUR + 70 + 2 * 20 - 1,
            True,
            id="still busy at the next attempt, and longer then",
        ),
        pytest.param(
            [5, *[20] * 9],
            [HOUR, *range(HOUR + 30, HOUR + 9030, 1000)],
            HOUR + 8030 + 16 * 20,
            False,
            id="busy now and then",
        ),
    ],
)
def test_one_thread_computes_where_a_team_sleeps_too_much(
    team, slept: list[int], times: list[int], now: int, is_high: bool
) -> None:
    def packed(values: list[int]) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * len(values))(*values)

    found = team.is_high(packed(slept), packed(times), len(slept), ctypes.c_int64(now))
    assert bool(found) == is_high
