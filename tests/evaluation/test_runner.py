"""Solving many problems at once: what is counted, and that nothing else decides."""

import io
import json

import pytest

from forethought.errors import ContextLengthError
from forethought.evaluation.problems import Grader, Problem
from forethought.evaluation.recipe import Recipe, recipe
from forethought.evaluation.report import Proportion, ReportRow
from forethought.evaluation.runner import Attempt, EvaluationRunner, Race, _notes, _Raced, compare
from forethought.llm.async_llm import AsyncLLM
from forethought.scaffolding import (
    ComputeTask,
    Controller,
    NativeGenerationController,
    StreamGenerationTask,
)
from tokens import speaking

PROBLEMS = [Problem(str(i), f"Hello world, how are {i}?", str(i)) for i in range(6)]
FIELDS = {"dtype": "float32", "kv_cache_config": {"max_tokens": 2048, "page_size": 4}}


def open_llm() -> AsyncLLM:
    return AsyncLLM(speaking("byte_level"), **FIELDS)


class Even:
    """Calls an answer right if the problem's number is even, whatever the text."""

    def grade(self, text: str, reference: str) -> bool:
        return int(reference) % 2 == 0


def run(made: Recipe, **settings) -> tuple[object, dict[str, str]]:
    attempts: list[Attempt] = []
    row = EvaluationRunner(open_llm, grader=Even(), **settings).run(made, PROBLEMS, attempts.append)
    return row, {attempt.problem.name: attempt.text for attempt in attempts}


GREEDY = recipe("plain", max_tokens=9)
SAMPLED = Recipe("sampled", NativeGenerationController(), {"temperature": 1.0, "max_tokens": 9})


def test_every_problem_is_attempted_once_and_the_right_ones_are_counted():
    row, texts = run(GREEDY)
    assert texts.keys() == {problem.name for problem in PROBLEMS}
    assert (row.method, row.correct.successes, row.correct.trials) == ("plain", 3, 6)
    assert row.seconds > 0


def test_the_tokens_are_those_that_went_through_the_engine():
    ignoring = {**GREEDY.sampling_params, "ignore_eos": True}
    row, _ = run(Recipe("plain", GREEDY.controller, ignoring))
    llm = open_llm()
    prompts = [
        llm.chat_prompt([{"role": "user", "content": problem.question}]) for problem in PROBLEMS
    ]
    llm.shutdown()
    assert row.tokens_generated == 9 * len(PROBLEMS)
    # Problems share the beginning of their prompts, which an engine may find in its prefix index.
    assert max(map(len, prompts)) <= row.tokens_prefilled <= sum(map(len, prompts))


def test_a_second_run_pays_for_its_prompts_again():
    runner = EvaluationRunner(open_llm, grader=Even(), in_flight=1)
    first, second = runner.run(GREEDY, PROBLEMS), runner.run(GREEDY, PROBLEMS)
    assert first.tokens_prefilled == second.tokens_prefilled > 0


@pytest.mark.parametrize("made", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_how_many_are_in_flight_changes_no_answer(made):
    assert run(made, in_flight=1)[1] == run(made, in_flight=6)[1]


def test_the_seed_decides_what_is_drawn():
    assert run(SAMPLED, seed=1)[1] == run(SAMPLED, seed=1)[1] != run(SAMPLED, seed=2)[1]


def spin(turns: int) -> None:
    """Keep a thread busy."""
    for _ in range(turns):
        pass


class Hesitant(Controller):
    """Ends its stream after four tokens, once it has made up its mind, in a thread and outside."""

    WorkerTag = NativeGenerationController.WorkerTag

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    def process(self, tasks, **kwargs):
        (task,) = tasks
        stream = StreamGenerationTask.create_from_generation_task(task, 4)
        stream.worker_tag = self.WorkerTag.GENERATION
        yield [stream]
        yield [ComputeTask(spin, self.turns)]
        spin(self.turns)
        stream.cancel_flag = True
        yield [stream]
        task.result = stream.result


@pytest.mark.parametrize("in_flight", [1, 4])
def test_the_engine_waits_for_the_methods_so_that_token_counts_repeat(in_flight):
    params = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
    rows = [
        run(Recipe("hesitant", Hesitant(turns), params), in_flight=in_flight)[0]
        for turns in (0, 300_000)
    ]
    assert rows[0].tokens_generated == rows[1].tokens_generated < 6 * 12
    assert rows[0].tokens_prefilled == rows[1].tokens_prefilled


def test_the_instruction_is_part_of_every_prompt():
    assert run(GREEDY, instruction="Answer in a box.")[1] != run(GREEDY)[1]


def test_a_prompt_that_does_not_fit_ends_the_run_with_its_error():
    long = [*PROBLEMS, Problem("long", "Hello " * 400, "0")]
    with pytest.raises(ContextLengthError):
        EvaluationRunner(open_llm).run(GREEDY, long)


def test_grading_looks_into_the_last_box_and_knows_mathematics():
    grade = Grader().grade
    assert grade("first \\boxed{3}, then \\boxed{1/2}", "\\frac{1}{2}")
    assert not grade("first \\boxed{1/2}, then \\boxed{3}", "\\frac{1}{2}")
    assert not grade("the answer is 3", "3")
    assert not grade(None, "3")


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (r"50\%", "50", True),
        (r"50\%", "0.5", True),
        ("x = 5", "5", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\sqrt{8}", r"2\sqrt{3}", False),
        ("", "5", False),
    ],
)
def test_grading_is_as_lenient_as_math_verify(answer, reference, right, grader):
    assert grader.grade(rf"\boxed{{{answer}}}", reference) is right


@pytest.fixture(scope="module")
def grader():
    grader = Grader(time_limit=60.0)
    yield grader
    grader.close()


def test_grading_plain_answers_takes_no_process():
    grader = Grader()
    assert grader.grade(r"\boxed{x = 0.50}", "1/2")
    assert not grader.grade(r"\boxed{0.51}", "1/2")
    assert not grader.grade(r"\boxed{no}", "yes")
    assert grader._sympy is None
    assert Grader(equivalence=lambda one, other: True).grade(r"\boxed{1}", "2")


def test_a_comparison_reports_a_table_a_plot_and_one_json_line_last(tmp_path, capsys):
    out = io.StringIO()
    runner = EvaluationRunner(open_llm, grader=Even())
    vote = recipe("majority_vote", samples=2, max_tokens=5)
    compare([GREEDY, vote], PROBLEMS, runner, tmp_path, out)
    *above, last = out.getvalue().splitlines()
    rows = json.loads(last)["rows"]
    assert [row["method"] for row in rows] == ["plain", "majority_vote"]
    assert rows[0]["accuracy"] == 0.5
    assert above[0] == "6 problems, many at once:"
    assert "generated" in above[2]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "comparison.json").read_text() == last + "\n"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "12/12" in captured.err


def race(drafts: str, texts: dict[str, str], tokens: int) -> _Raced:
    return _Raced(drafts, ReportRow("plain", Proportion(1, 2), tokens, 8, 1.0), texts)


@pytest.mark.parametrize(
    ("texts", "tokens", "said"),
    [
        ({"1": "a", "2": "b"}, 50, "the same answers with ngram drafts, character for character"),
        ({"1": "a", "2": "b"}, 60, "60 tokens generated for them instead of 50"),
        ({"1": "a", "2": "c"}, 50, "ngram drafts changed 1 of 2 answers"),
    ],
)
def test_a_race_tells_what_drafts_have_changed_beside_the_time(texts, tokens, said):
    [note] = _notes([race("", {"1": "a", "2": "b"}, 50), race("ngram", texts, tokens)])
    assert note.startswith("plain: ")
    assert said in note


def test_a_comparison_shows_its_race_first(tmp_path):
    out = io.StringIO()
    runner = EvaluationRunner(open_llm, grader=Even())
    races = [Race(GREEDY, "", runner)]
    compare([GREEDY], PROBLEMS[:1], runner, tmp_path, out, races)
    shown = out.getvalue()
    assert shown.startswith("1 problem, one at a time:\n")
    assert shown.index("one at a time") < shown.index("1 problem, many at once")
