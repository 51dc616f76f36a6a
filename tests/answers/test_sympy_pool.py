"""Processes for formulas: they keep their limits, and end with their owner."""

import os
import queue
import select
import signal
import subprocess
import sys
import threading

import pytest

from forethought.answers import sympy_pool
from forethought.answers.sympy_pool import SympyPool
from forethought.errors import EngineStopped, RequestCancelled
from forethought.methods import MajorityVoteController
from forethought.scaffolding import (
    MathEquivalence,
    NativeGenerationController,
    ScaffoldingLlm,
    ScriptedWorker,
)

HARD = r"\sum_{k=1}^{10^{9}} \sin(k^k)"
"""Sympy would be at it for ever."""
STEPS = 10**6
LONG = 10**10


@pytest.fixture
def pool():
    with SympyPool() as pool:
        yield pool


@pytest.fixture(scope="module")
def shared():
    """A pool for tests that look at results only: a process takes a second to begin."""
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


def test_a_hostile_formula_is_given_up_and_others_are_not(shared):
    hostile = [HARD, r"\sin(9^{9^{9^{9}}})", r"\Gamma(10^{8}!)", r"\binom{x}{10^{9}}+\sin x"]
    forms = shared.forms(["x+1", *hostile, "x+2"], STEPS).result(200)
    assert forms.by_formula.keys() == {"x+1", "x+2"}
    assert {HARD, hostile[1]} <= forms.uncompared


@pytest.mark.parametrize(
    "steps",
    [
        30_000,
        STEPS,
        *[pytest.param(steps, marks=pytest.mark.slow) for steps in (0, 10_000, 200_000)],
    ],
)
def test_whether_a_formula_is_given_up_depends_on_it_alone(shared, steps):
    """In whatever process, after whatever else, on a machine however busy."""
    formulas = [r"\frac{x^2-1}{x-1}", r"\int_0^1 x^2 dx", r"\sum_{k=1}^{20}\frac{1}{k^2}"]
    with SympyPool(1) as other:
        alone = [other.forms([text], steps).result(200).uncompared for text in formulas]
    together = shared.forms([r"\cos(\frac{\pi}{7})", *reversed(formulas)], steps).result(200)
    assert frozenset().union(*alone) == together.uncompared & {*formulas}
    assert bool(together.uncompared) == (steps < STEPS)


def test_a_form_is_worked_out_once(pool, asked):
    first = pool.forms(["x+1", HARD], STEPS).result(200)
    assert pool.forms(["x+1", HARD], STEPS).result(200) == first
    assert len(asked.processes) == 2
    assert len(set(map(id, asked.processes))) == 1


def test_a_formula_that_was_given_up_is_tried_again_with_more_steps(shared):
    assert shared.forms(["x+9"], 10).result(200).uncompared == {"x+9"}
    assert shared.forms(["x+9"], STEPS).result(200).by_formula


def test_cancelling_ends_the_process_that_is_at_it_and_no_other(pool, asked):
    hostile = pool.forms([HARD], LONG)
    at_it = asked.wait()
    assert pool.forms(["x+1"], LONG).result(200).by_formula
    other = asked.wait()
    hostile.cancel()
    assert ended(at_it)
    assert other is not at_it
    assert other._popen.poll() is None
    assert pool.forms(["x+2"], LONG).result(200).by_formula


def test_more_formulas_than_processes_wait_and_may_be_cancelled(asked):
    with SympyPool(1) as pool:
        hostile = pool.forms([HARD], LONG)
        asked.wait()
        waiting, cancelled = pool.forms(["x+1"], LONG), pool.forms(["x+2"], LONG)
        cancelled.cancel()
        hostile.cancel()
        assert waiting.result(200).by_formula
    assert len({id(process) for process in asked.processes}) == 2


def test_a_closed_pool_has_no_process_and_takes_no_work(asked):
    pool = SympyPool()
    assert pool.forms(["x+1"], LONG).result(200).by_formula
    idle = asked.wait()
    hostile = pool.forms([HARD], LONG)
    busy = asked.wait()
    waiting = pool.forms([r"\sin 1"], LONG)
    pool.close()
    for future in (hostile, waiting, pool.forms(["x"], LONG)):
        with pytest.raises(EngineStopped):
            future.result(200)
    assert ended(idle)
    assert ended(busy)


def test_it_works_from_many_threads_at_once(shared):
    futures = [shared.forms([f"x+{n}", f"{n}+x"], LONG) for n in range(12)]
    found = [set(future.result(200).by_formula.values()) for future in futures]
    assert [len(forms) for forms in found] == [1] * 12
    assert len(set.union(*found)) == 12


# ---- in a request -----------------------------------------------------------------


def hostile_vote():
    controller = MajorityVoteController(
        NativeGenerationController(), 3, equivalence=MathEquivalence(LONG / STEPS)
    )
    worker = ScriptedWorker(lambda prompt, index: rf"\boxed{{{index}+{HARD}}}")
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


@pytest.mark.parametrize(
    "kind", [MajorityVoteController, pytest.param(Overridden, marks=pytest.mark.slow)]
)
def test_requests_share_the_processes_of_their_llm(kind, asked):
    controller = kind(NativeGenerationController(), 2, early_stop=False)
    worker = ScriptedWorker(lambda prompt, index: rf"\boxed{{\sin {prompt}+{index % 2}}}")
    with ScaffoldingLlm(controller, {"generation": worker}, 1) as llm:
        for prompt in "yz":
            llm.generate(prompt)
    assert len(asked.processes) == 4
    assert len(set(map(id, asked.processes))) == 1
    assert ended(asked.processes[0])


# ---- as a process -----------------------------------------------------------------

PARENT = """
import sys, threading
from forethought.answers import sympy_pool
pool = sympy_pool.SympyPool()
pool.forms(["x+1"], 10**6).result()
print(pool._idle[0]._popen.pid, flush=True)
if sys.argv[1] != "idle":
    pool.forms([sys.argv[1]], 10**10)
    while not pool._busy:
        pass
    print("busy", flush=True)
{end}
"""


def run(code, *args, **options):
    return [sys.executable, "-c", code, *args], {"stdout": subprocess.PIPE, "text": True, **options}


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("work", ["idle", HARD])
def test_a_process_ends_when_its_parent_is_killed(work):
    command, options = run(PARENT.format(end="threading.Event().wait()"), work)
    with subprocess.Popen(command, **options) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        if work != "idle":
            assert parent.stdout.readline() == "busy\n"
        parent.send_signal(signal.SIGKILL)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    gone = poll.poll(60_000)
    os.close(child)
    assert gone


def test_a_hostile_formula_does_not_hold_up_the_end_of_the_interpreter():
    command, options = run(PARENT.format(end=""), HARD)
    assert subprocess.run(command, timeout=200, check=True, **options).stdout.endswith("busy\n")


@pytest.mark.parametrize(
    "path", ["", "absolute", *[pytest.param(path, marks=pytest.mark.slow) for path in (None, ".")]]
)
def test_what_lies_in_the_working_directory_is_not_executed(path, tmp_path):
    for module in ("math_verify", "sympy", "latex2sympy2_extended"):
        (tmp_path / f"{module}.py").write_text("open('executed', 'w')\n")
    found = {"absolute": str(tmp_path)}.get(path, path)
    added = [] if found is None else [found]
    code = (
        "from forethought.scaffolding import MathEquivalence\n"
        "assert MathEquivalence()(r'\\ln 8', r'3\\ln 2')\n"
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
