"""Processes for formulas: they keep their time limit, and end with their owner."""

import os
import queue
import select
import signal
import subprocess
import sys
import threading

import pytest

from forethought.errors import EngineStopped, RequestCancelled
from forethought.methods import MajorityVoteController
from forethought.scaffolding import (
    MathEquivalence,
    NativeGenerationController,
    ScaffoldingLlm,
    ScriptedWorker,
    sympy_pool,
)
from forethought.scaffolding.sympy_pool import SympyPool

TOWER = "9^{9^{9^{9}}}"
"""Sympy would be at it for ever."""
LONG = 3000.0


@pytest.fixture
def pool():
    with SympyPool() as pool:
        yield pool


class Asked:
    """The processes that were asked for something, in that order."""

    def __init__(self):
        self.processes, self.news = [], queue.SimpleQueue()

    def wait(self):
        """The next one that is asked."""
        return self.news.get(timeout=200)


@pytest.fixture
def asked(monkeypatch):
    asked, ask = Asked(), sympy_pool._Process.ask

    def watched(self, request):
        asked.processes.append(self)
        asked.news.put(self)
        return ask(self, request)

    monkeypatch.setattr(sympy_pool._Process, "ask", watched)
    return asked


def ended(process):
    """Whether a process has come to its end, soon."""
    return process._popen.wait(200) is not None


def test_hostile_formulas_share_one_budget_and_leave_a_part_of_it_to_others(pool):
    towers = [f"{n}+{TOWER}" for n in range(5)]
    found = pool.forms([towers[0], "x+1", *towers[1:]], 3.0, 1.0).result(200)
    assert list(found.known) == ["x+1"]
    assert found.seconds < 20.0  # 3, and what a busy machine adds


def test_a_form_is_worked_out_once(pool, asked):
    first = pool.forms(["x+1"], LONG).result(200)
    assert pool.forms(["x+1"], LONG).result(200) == (first.known, 0.0)
    assert len(asked.processes) == 1


def test_a_formula_for_which_there_was_too_little_time_is_tried_again(pool):
    assert pool.forms(["x+1"], 0.0).result(200).known == {}
    assert pool.forms(["x+1"], LONG).result(200).known


def test_cancelling_ends_the_process_that_is_at_it_and_no_other(pool, asked):
    hostile = pool.forms([TOWER], LONG)
    at_it = asked.wait()
    assert pool.forms(["x+1"], LONG).result(200).known
    other = asked.wait()
    hostile.cancel()
    assert ended(at_it)
    assert other is not at_it
    assert other._popen.poll() is None
    assert pool.forms(["x+2"], LONG).result(200).known


def test_more_formulas_than_processes_wait_and_may_be_cancelled(asked):
    with SympyPool(1) as pool:
        hostile = pool.forms([TOWER], LONG)
        asked.wait()
        waiting, cancelled = pool.forms(["x+1"], LONG), pool.forms(["x+2"], LONG)
        cancelled.cancel()
        hostile.cancel()
        assert waiting.result(200).known
    assert len({id(process) for process in asked.processes}) == 2


def test_a_closed_pool_has_no_process_and_takes_no_work(asked):
    pool = SympyPool()
    assert pool.forms(["x+1"], LONG).result(200).known
    idle = asked.wait()
    hostile = pool.forms([TOWER], LONG)
    busy = asked.wait()
    waiting = pool.verify("x", "y", LONG)
    pool.close()
    for future in (hostile, waiting, pool.forms(["x"], LONG)):
        with pytest.raises(EngineStopped):
            future.result(200)
    assert ended(idle)
    assert ended(busy)


def test_it_works_from_many_threads_at_once(pool):
    futures = [pool.forms([f"x+{n}", f"{n}+x"], LONG) for n in range(12)]
    found = [set(future.result(200).known.values()) for future in futures]
    assert [len(forms) for forms in found] == [1] * 12
    assert len(set.union(*found)) == 12


def test_math_verify_compares_two_answers(pool):
    assert pool.verify("50", r"50\%", LONG).result(200)
    assert not pool.verify("51", r"50\%", LONG).result(200)
    assert not pool.verify(TOWER, "5x", 0.3).result(200)


# ---- in a request -----------------------------------------------------------------


def hostile_vote():
    controller = MajorityVoteController(
        NativeGenerationController(), 3, equivalence=MathEquivalence(LONG)
    )
    worker = ScriptedWorker(lambda prompt, index: rf"\boxed{{{index}+{TOWER}}}")
    return ScaffoldingLlm(controller, {"generation": worker})


def test_a_request_that_ends_takes_its_hostile_vote_with_it(asked):
    with hostile_vote() as llm:
        result = llm.generate_async("p")
        process = asked.wait()
        result.abort()
        with pytest.raises(RequestCancelled):
            result.result(200)
        assert ended(process)


def test_shutting_down_ends_the_processes(asked):
    with hostile_vote() as llm:
        result = llm.generate_async("p")
        process = asked.wait()
    with pytest.raises(EngineStopped):
        result.result(200)
    assert ended(process)
    assert not [t for t in threading.enumerate() if t.name == "forethought-sympy" and joined(t)]


def joined(thread):
    thread.join(60)
    return thread.is_alive()


class Overridden(MajorityVoteController):
    def majority_vote(self, candidates_tasks, **kwargs):
        return super().majority_vote(candidates_tasks)


@pytest.mark.parametrize("kind", [MajorityVoteController, Overridden])
def test_requests_share_the_processes_of_their_llm(kind, asked):
    controller = kind(NativeGenerationController(), 2, early_stop=False)
    worker = ScriptedWorker(lambda prompt, index: rf"\boxed{{{prompt}+{index % 2}x}}")
    with ScaffoldingLlm(controller, {"generation": worker}, 1) as llm:
        for prompt in "yz":
            llm.generate(prompt)
    assert len(asked.processes) == 4
    assert len(set(map(id, asked.processes))) == 1
    assert ended(asked.processes[0])


# ---- as a process -----------------------------------------------------------------

PARENT = """
import sys, threading
from forethought.scaffolding import sympy_pool
pool = sympy_pool.SympyPool()
pool.forms(["x+1"], 60.0).result()
print(pool._idle[0]._popen.pid, flush=True)
if sys.argv[1] != "idle":
    pool.forms([sys.argv[1]], 5.0)
    while not pool._busy:
        pass
    print("busy", flush=True)
{end}
"""


def run(code, *args, **options):
    return [sys.executable, "-c", code, *args], {"stdout": subprocess.PIPE, "text": True, **options}


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("work", ["idle", TOWER, r"\sum_{k=1}^{10^{9}} \sin(k^k)"])
def test_a_process_ends_when_its_parent_is_killed(work):
    command, options = run(PARENT.format(end="threading.Event().wait()"), work)
    with subprocess.Popen(command, **options) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        if work != "idle":
            assert parent.stdout.readline() == "busy\n"
        parent.send_signal(signal.SIGKILL)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    gone = poll.poll(30_000)
    os.close(child)
    assert gone


def test_a_hostile_formula_does_not_hold_up_the_end_of_the_interpreter():
    command, options = run(PARENT.format(end="").replace("5.0", "3000.0"), TOWER)
    assert subprocess.run(command, timeout=200, check=True, **options).stdout.endswith("busy\n")


@pytest.mark.parametrize("path", [None, ".", "", "absolute"])
def test_what_lies_in_the_working_directory_is_not_executed(path, tmp_path):
    for module in ("math_verify", "sympy", "latex2sympy2_extended"):
        (tmp_path / f"{module}.py").write_text("open('executed', 'w')\n")
    found = {"absolute": str(tmp_path)}.get(path, path)
    added = [] if found is None else [found]
    code = (
        "from forethought.scaffolding import MathEquivalence\n"
        "assert MathEquivalence(600.0)('x+1', '1+x')\n"
    )
    paths = [*added, *[p for p in sys.path if os.path.isabs(p)]]
    command, options = run(
        code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    )
    subprocess.run(command, timeout=200, check=True, **options)
    assert not (tmp_path / "executed").exists()


def test_the_working_directory_is_not_searched_whatever_it_is_called(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    here = [str(tmp_path), str(tmp_path / "link"), f"{tmp_path}/x/.."]
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", *here, str(tmp_path / "x")])
    assert sympy_pool._search_path() == [str(tmp_path / "x")]
