"""Solving many problems at once: what is counted, and that nothing else decides."""

from dataclasses import replace

import pytest

from forethought.errors import ContextLengthError, TaskError
from forethought.evaluation.journal import Attempt
from forethought.evaluation.problems import Problem
from forethought.evaluation.recipe import Recipe, recipe
from forethought.evaluation.runner import EvaluationProgress, EvaluationRunner
from forethought.llm.async_llm import AsyncLLM
from forethought.scaffolding import (
    ComputeTask,
    Controller,
    NativeGenerationController,
    Reply,
    ScriptedWorker,
    StreamGenerationTask,
    Trace,
)
from forethought.scaffolding.budget import Budget
from tokens import speaking

PROBLEMS = [Problem(str(i), f"Hello world, how are {i}?", str(i)) for i in range(6)]
FIELDS = {"dtype": "float32", "kv_cache_config": {"max_tokens": 2048, "page_size": 4}}


def open_llm() -> AsyncLLM:
    return AsyncLLM(speaking("byte_level"), **FIELDS)


class Even:
    """Calls an answer right if the problem's number is even, whatever the text."""

    def grade(self, text: str, problem: Problem) -> bool:
        return int(problem.answer) % 2 == 0

    def close(self) -> None:
        pass


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


class Asked(NativeGenerationController):
    """Keeps the question and the kind of prompt of every task."""

    def __init__(self, seen: list[tuple[str | None, bool]]) -> None:
        super().__init__()
        self.seen = seen

    clone_shares = ("seen",)

    def process(self, tasks, **kwargs):
        self.seen += [(task.question_text, task.input_tokens is not None) for task in tasks]
        yield from super().process(tasks, **kwargs)


def test_methods_get_the_question_as_text_beside_the_rendered_prompt():
    seen: list[tuple[str | None, bool]] = []
    run(Recipe("asked", Asked(seen), GREEDY.sampling_params), instruction="Answer in a box.")
    assert sorted(seen) == [(problem.question, True) for problem in PROBLEMS]


def test_a_prompt_that_does_not_fit_ends_the_run_with_its_error():
    long = [*PROBLEMS, Problem("long", "Hello " * 400, "0")]
    with pytest.raises(ContextLengthError):
        EvaluationRunner(open_llm).run(GREEDY, long)


def test_attempts_that_are_known_are_not_made_again_and_change_no_other():
    runner = EvaluationRunner(open_llm, grader=Even())
    vote = recipe("majority_vote@3", max_tokens=6)
    whole, new = runner.attempts(vote, PROBLEMS), []
    resumed = runner.attempts(vote, PROBLEMS, new.append, finished=whole[1:4])
    assert sorted(attempt.number for attempt in new) == [0, 4, 5]
    assert [replace(one, elapsed=0.0) for one in resumed] == [
        replace(one, elapsed=0.0) for one in whole
    ]
    assert min(attempt.elapsed for attempt in new) > max(one.elapsed for one in whole[1:4])


def test_repeats_are_attempts_with_seeds_of_their_own():
    runner = EvaluationRunner(open_llm, grader=Even())
    once = runner.attempts(SAMPLED, PROBLEMS[:2])
    twice = runner.attempts(replace(SAMPLED, repeats=2), PROBLEMS[:2])
    assert [attempt.key for attempt in twice] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [attempt.text for attempt in twice[::2]] == [attempt.text for attempt in once]
    assert twice[0].text != twice[1].text


def scripted(script, **settings) -> EvaluationRunner:
    """A runner whose model answers from a script."""
    return EvaluationRunner(lambda: ScriptedWorker(script), grader=Even(), **settings)


def test_a_seed_belongs_to_the_problems_number():
    workers = []

    def open_worker():
        workers.append(ScriptedWorker(lambda prompt, index: "a"))
        return workers[-1]

    runner = EvaluationRunner(open_worker, grader=Even())
    runner.attempts(GREEDY, PROBLEMS)
    runner.attempts(GREEDY, {4: PROBLEMS[4], 2: PROBLEMS[2]})
    seeds = [{call.prompt: call.task.seed for call in worker.calls} for worker in workers]
    assert len(set(seeds[0].values())) == 6
    assert seeds[1] == {PROBLEMS[n].question: seeds[0][PROBLEMS[n].question] for n in (2, 4)}


def test_a_trace_is_written_of_each_attempt_a_failed_one_included(tmp_path):
    runner = scripted(lambda prompt, index: "a", in_flight=1)
    runner.trace_dir = tmp_path
    made = replace(GREEDY, name="a+b@2 in tokens/5")
    runner.attempts(made, {1: PROBLEMS[1], 4: PROBLEMS[4]})
    names = ["a+b@2_in_tokens_5,1.json", "a+b@2_in_tokens_5,4.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert Trace.load(tmp_path / names[1]).prompt == PROBLEMS[4].question
    failing = scripted(lambda prompt, index: Reply("", error=RuntimeError("gone")))
    failing.trace_dir = tmp_path
    with pytest.raises(TaskError):
        failing.attempts(GREEDY, PROBLEMS[:1])
    assert "gone" in Trace.load(tmp_path / "plain,0.json").error["what"]


def test_enough_ends_the_rest():
    made = []
    runner = scripted(lambda prompt, index: "a", in_flight=1)
    attempts = runner.attempts(GREEDY, PROBLEMS, made.append, enough=lambda: len(made) >= 2)
    assert attempts == made
    assert len(made) == 2
    assert runner.attempts(GREEDY, PROBLEMS, made.append, enough=lambda: True) == []


def test_a_budget_spent_before_any_text_is_an_attempt_without_an_answer():
    runner = scripted(lambda prompt, index: "")
    revised = replace(recipe("self_refine"), budget=Budget(calls=1))
    [first, *_] = runner.attempts(revised, PROBLEMS)
    assert (first.text, first.error) == ("", "")
    runner = scripted(lambda prompt, index: "abc")
    vote = replace(recipe("majority_vote@3"), budget=Budget(calls=2))
    [first, *_] = runner.attempts(vote, PROBLEMS)
    assert (first.text, first.error) == ("abc", "")
    [first, *_] = runner.attempts(replace(GREEDY, budget=Budget(tokens=2)), PROBLEMS)
    assert (first.text, first.error) == ("ab", "")


class Says(Even):
    def grade(self, text: str, problem: Problem) -> bool:
        return text == "yes"


def test_an_attempt_says_which_rule_found_its_answer_and_whether_it_was_cut():
    """A model that does not box is graded by the last number, unless its text was cut."""
    texts = {
        "0": Reply("So, the farmer has 36 trees."),
        "1": Reply("The answer is 36."),
        "2": Reply("We have 30 + 36", finish_reason="length"),
        "3": Reply("I cannot say."),
    }
    problems = [Problem(name, name, "36") for name in texts]
    worker = ScriptedWorker(lambda prompt, index: texts[prompt])
    runner = EvaluationRunner(lambda: worker)
    attempts: list[Attempt] = []
    row = runner.run(recipe("plain"), problems, attempts.append)
    made = {one.problem.name: (one.correct, one.answer_rule, one.is_cut) for one in attempts}
    assert made == {
        "0": (True, "number", False),
        "1": (True, "phrase", False),
        "2": (False, "", True),
        "3": (False, "", False),
    }
    assert (row.num_without_answer, row.num_cut) == (2, 1)
    restored = Attempt.from_dict(attempts[0].to_dict(), problems)
    assert restored.answer_rule == attempts[0].answer_rule


def test_attempts_and_samples_that_were_cut_are_graded_by_the_answer_that_votes_extract():
    """It is not the number that the limit of tokens has torn."""
    torn = "The answer is 12.\nWait, no. So the answer is 4"
    cut, whole, number = (
        Reply(torn, finish_reason="length"),
        Reply("It is 4"),
        Reply("4", finish_reason="length"),
    )
    problems = [Problem(answer, "?", answer) for answer in ("12", "4")]
    runner = EvaluationRunner(lambda: ScriptedWorker(lambda prompt, index: cut))
    assert [one.correct for one in runner.attempts(recipe("plain"), problems)] == [True, False]
    for problem, grades in zip(problems, [(True, False, False), (False, True, False)], strict=True):
        runner = EvaluationRunner(lambda: ScriptedWorker([cut, whole, number]))
        vote = recipe("majority_vote@3", settings={"early_stop": False})
        assert runner.attempts(vote, [problem])[0].candidates == grades


def test_every_sample_of_a_method_is_graded_if_all_were_finished():
    answers = ["yes", "no", "yes", "no", "no"]
    runner = EvaluationRunner(
        lambda: ScriptedWorker(lambda prompt, index: answers[index]), grader=Says()
    )
    whole = recipe("majority_vote@5", settings={"early_stop": False})
    assert runner.attempts(whole, PROBLEMS[:1])[0].candidates == (True, False, True, False, False)
    worker = ScriptedWorker(["\\boxed{1}"] * 2 + [Reply("late", delay=60.0)])
    runner = EvaluationRunner(lambda: worker, grader=Says())
    assert runner.attempts(recipe("majority_vote@3"), PROBLEMS[:1])[0].candidates == (None,) * 3
    assert runner.attempts(GREEDY, []) == []


def test_a_failure_ends_the_run_and_what_was_finished_has_been_told():
    made = []
    replies = ["a", "b", Reply("", error=OSError("gone"))]
    runner = scripted(replies, in_flight=1)
    with pytest.raises(TaskError, match="gone"):
        runner.attempts(GREEDY, PROBLEMS, made.append)
    assert [attempt.text for attempt in made] == ["a", "b"]


def test_the_progress_bar_shows_the_accuracy_so_far(capsys):
    with EvaluationProgress(8) as bar:
        bar.begin("plain")
        scripted(lambda prompt, index: "a").attempts(GREEDY, PROBLEMS, bar)
        bar.leave_out(2)
    shown = capsys.readouterr().err
    assert "6/6" in shown
    assert "3/6 right, 50%" in shown
