"""The tables of the methods that instruct a model: their rows, their problems, and how a context
is thought about once."""

import re

import pytest

from forethought import methods
from forethought.bench.instruct_methods import (
    CHAT_FORMAT,
    ContextBench,
    FactsBench,
    InstructBench,
    SleepTimeByContext,
    bench_of,
)
from forethought.bench.method_tasks import (
    CONTEXT_END,
    TASKS,
    held_out_problems,
    measured_world,
    method_task,
)
from forethought.bench.methods import LEFT_OUT, MethodBench
from forethought.errors import ParameterError
from forethought.evaluation.generated.countdown import Problem, is_held_out
from forethought.evaluation.runner import EvaluationRunner
from forethought.methods.stack import split
from forethought.scaffolding import ScriptedWorker
from forethought.training.chat_tokenizer import prompt_text


def test_every_method_that_the_other_tables_leave_out_has_a_row():
    made = InstructBench(method_task("instruct"), 500).recipes()
    named = {part.name for one in made for part in split(one.name.partition(",")[0])}
    rewards = {one.name.partition(", ")[2].partition(",")[0] for one in made}
    left_out = {name for name, why in LEFT_OUT.items() if "--task instruct" in why}
    assert left_out <= named | rewards
    retrieving = FactsBench(method_task("facts"), 20).recipes()
    assert {"drag", "iterdrag"} <= {one.name.partition(",")[0] for one in retrieving}
    thinking = ContextBench(method_task("context"), 20).recipes()
    assert [one.name for one in thinking] == ["plain", "sleep_time"]
    assert {bench_of(name) for name in ("countdown", "arithmetic")} == {MethodBench}
    for task in TASKS:
        made = bench_of(task)(method_task(task), 500).recipes()
        assert len({one.name for one in made}) == len(made)
    assert set(LEFT_OUT) <= set(methods.names())


def test_problems_of_facts_are_answered_by_the_facts_of_one_world():
    world = measured_world()
    found = held_out_problems("facts", 60)
    assert len({problem.question for problem in found}) == 60
    groups = {method_task("facts").group_of(problem) for problem in found}
    assert groups == {"one fact", "two facts", "a neighbour"}
    for problem in found:
        if method_task("facts").group_of(problem) == "one fact":
            words = problem.question.removesuffix("?").split()
            assert world.counts[words[5], words[2]] == int(problem.answer)
    assert found == held_out_problems("facts", 60)


def test_more_problems_than_a_world_has_are_refused():
    assert len(held_out_problems("facts", 700)) == 700
    with pytest.raises(ParameterError, match="no 800 problems of facts"):
        held_out_problems("facts", 800)


def test_problems_of_contexts_come_ten_by_ten():
    found = held_out_problems("context", 30)
    contexts = [problem.question.partition(CONTEXT_END)[0] for problem in found]
    assert [contexts.count(each) for each in dict.fromkeys(contexts)] == [10, 10, 10]


def test_problems_that_methods_are_instructed_on_are_not_trained_on():
    for problem in held_out_problems("instruct", 302):
        *given, target = map(int, re.findall(r"\d+", problem.question))
        assert is_held_out(Problem(tuple(given), target))


class Grader:
    def grade(self, text, problem):
        return text == problem.answer

    def close(self):
        pass


def test_a_context_is_thought_about_once_for_all_of_its_questions():
    problems = held_out_problems("context", 20)
    answers = {problem.question.partition(CONTEXT_END)[2]: problem.answer for problem in problems}

    def says(prompt, index):
        if prompt.endswith("Inferences: "):
            return "all sums"
        return answers[prompt.partition(CONTEXT_END)[2].removesuffix("\n\nAnswer: ")]

    worker = ScriptedWorker(says)
    runner = EvaluationRunner(lambda: worker, grader=Grader())
    [_, sleeping] = ContextBench(method_task("context"), 20).recipes()
    assert isinstance(sleeping.controller, SleepTimeByContext)
    assert runner.run(sleeping, problems).correct.value == 1.0
    thoughts = [prompt for prompt in worker.prompts if prompt.endswith("Inferences: ")]
    assert len(thoughts) == 2
    assert len(worker.prompts) == 22
    asked = [prompt for prompt in worker.prompts if prompt not in thoughts]
    assert all("Inferences: all sums\n\nQuestion: " in prompt for prompt in asked)


def test_a_recipe_has_prompts_of_its_own_format():
    worker = ScriptedWorker(lambda prompt, index: "nothing is left.")
    runner = EvaluationRunner(lambda: worker, grader=Grader())
    made = InstructBench(method_task("instruct"), 500).recipes()
    [working] = [one for one in made if one.name == "hogwild_turns"]
    assert working.prompt_format == CHAT_FORMAT
    [problem] = held_out_problems("instruct", 1)
    runner.run(working, [problem])
    assert all(prompt.startswith(prompt_text(problem.question)) for prompt in worker.prompts)
