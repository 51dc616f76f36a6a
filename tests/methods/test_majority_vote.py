"""Majority vote: the most frequent answer wins, and samples that cannot change it are cancelled."""

import asyncio
import contextlib
import math
import random
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought import methods
from forethought.answers.answers import (
    MathEquivalence,
    TextEquivalence,
    lead_probability,
)
from forethought.errors import BudgetExceeded, ParameterError, TaskError
from forethought.methods import MajorityVoteController
from forethought.scaffolding import (
    Budget,
    Controller,
    GenerationTask,
    NativeGenerationController,
    Reply,
    ScriptedWorker,
    Stage,
)
from forethought.scaffolding.execution_scope import current_scope
from scripted import answer


def boxed(text):
    return rf"so \boxed{{{text}}}"


def vote(answers, **options):
    """The result of voting over given answers; a pair is (answer, seconds until it comes)."""

    def script(prompt, index):
        given = answers[index]
        if isinstance(given, Reply):
            return given
        text, delay = given if isinstance(given, tuple) else (given, 0.0)
        return Reply(text if text is None or text.startswith("no") else boxed(text), delay=delay)

    worker = ScriptedWorker(script)
    controller = MajorityVoteController(NativeGenerationController(), len(answers), **options)
    return answer(controller, worker), worker


def test_the_most_frequent_answer_wins_with_its_text_and_tokens():
    result, _ = vote(["1", "2", "2"], early_stop=False)
    assert result.output.text == boxed("2")
    assert result.output.token_ids == [ord(c) for c in boxed("2")]
    assert result.output.finish_reason == "stop"
    told = result.output.meta["majority_vote"]
    counts = {"samples": 3, "finished": 3, "num_voters": 3, "num_uncompared": 0}
    assert told == {"answer": "2", "answer_rule": "boxed"} | counts


def test_answers_pool_by_what_they_mean():
    result, _ = vote(["0.5", "3", r"\frac{1}{2}", "3", "1/2"])
    assert result.output.text == boxed("0.5")


def test_answers_outside_of_boxes_vote_and_the_rule_that_found_them_is_told():
    texts = ["So, the farmer has 36 trees.", "Hence 35.", "The answer is 36.", r"It is \boxed{36}."]
    controller = methods.create("majority_vote", default_sample_num=4, early_stop=False)
    output = answer(controller, ScriptedWorker(texts)).output
    assert output.text == texts[0]
    told = output.meta["majority_vote"]
    assert (told["answer"], told["answer_rule"], told["num_voters"]) == ("36", "number", 4)
    controller = methods.create("majority_vote", default_sample_num=4, answer="boxed")
    assert answer(controller, ScriptedWorker(texts)).output.text == texts[3]


def test_a_sample_that_was_cut_does_not_vote_with_the_number_at_its_end():
    texts = [Reply("we add 3", finish_reason="length"), Reply("1 + 3", finish_reason="length"), "4"]
    controller = methods.create("majority_vote", default_sample_num=3, early_stop=False)
    output = answer(controller, ScriptedWorker(texts)).output
    assert (output.text, output.meta["majority_vote"]["num_voters"]) == ("4", 1)


def test_a_vote_without_voters_warns(caplog):
    controller = methods.create("majority_vote", default_sample_num=2, answer="boxed")
    told = answer(controller, ScriptedWorker(["5", "5"])).output.meta["majority_vote"]
    assert (told["answer"], told["num_voters"]) == (None, 0)
    assert told["warning"] in caplog.text


CLOCK = [r"\ln 8", r"\sin(2x)", r"3\ln 2", r"2\sin x\cos x", r"\ln(2^3)", "5", "5"]
"""Three of seven mean the same, and it takes sympy to know."""


def test_plain_arithmetic_is_compared_without_a_time_limit():
    says = ["5", "(8*6)-(18-11)", "(11*(18/6))+8", "5", "6*7-1"]
    for time_limit in (600.0, 1e-3, 1e-6):
        result, _ = vote(says, early_stop=False, equivalence=MathEquivalence(time_limit))
        assert result.output.text == boxed("(8*6)-(18-11)")


@pytest.mark.parametrize("num_busy", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_the_winner_is_the_same_with_busy_processes_beside(num_busy):
    command = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as ending:
        for _ in range(num_busy):
            busy = ending.enter_context(subprocess.Popen(command))
            ending.callback(busy.kill)
        result, _ = vote(CLOCK, early_stop=False)
    assert result.output.text == boxed(CLOCK[0])
    told = result.output.meta["majority_vote"]
    assert (told["num_voters"], told["num_uncompared"]) == (7, 0)


def test_formulas_that_are_compared_as_text_are_counted():
    result, _ = vote(CLOCK, early_stop=False, equivalence=MathEquivalence(1e-6))
    assert result.output.text == boxed("5")
    told = result.output.meta["majority_vote"]
    assert told["num_uncompared"] == 5
    assert "compared as text" in told["warning"]


def test_formulas_pool_too():
    result, _ = vote(["x+1", "7", "1+x"], early_stop=False)
    assert result.output.text == boxed("x+1")


def test_ties_go_to_the_sample_with_the_lowest_number_however_late_it_comes():
    result, _ = vote([("1", 0.2), "2", "2", ("1", 0.1)])
    assert result.output.text == boxed("1")


def test_samples_without_an_answer_do_not_vote():
    result, _ = vote(["nothing", "nothing", "3"])
    assert result.output.text == boxed("3")


def test_if_nobody_answers_the_first_sample_is_returned():
    result, _ = vote(["no one", "no two"])
    assert result.output.text == "no one"
    assert result.output.meta["majority_vote"]["answer"] is None


def test_sampling_stops_when_no_sample_can_change_the_winner():
    result, worker = vote(["4", "4", "4", ("5", 60), ("5", 60)])
    assert result.output.text == boxed("4")
    assert [call.ended for call in worker.calls] == ["done"] * 3 + ["cancelled"] * 2
    assert result.output.meta["majority_vote"]["finished"] == 3


def test_without_early_stop_it_waits_for_all():
    result, worker = vote(["4", "4", "4", ("5", 0.1)], early_stop=False)
    assert [call.ended for call in worker.calls] == ["done"] * 4
    assert result.output.meta["majority_vote"]["finished"] == 4


def test_a_slow_sample_is_waited_for_if_the_output_may_be_its_own():
    result, worker = vote([("4", 0.1), "4", "4", ("5", 60)])
    assert result.output.meta["majority_vote"]["finished"] == 3
    assert [call.ended for call in worker.calls] == ["done"] * 3 + ["cancelled"]


def test_the_output_holds_the_samples_by_their_numbers_and_none_for_those_ended_early():
    result, _ = vote(["1", "no one", "2"], early_stop=False)
    assert result.output.candidates == [boxed("1"), "no one", boxed("2")]
    result, _ = vote(["4", "4", "4", ("5", 60)])
    assert result.output.candidates[:2] == [boxed("4")] * 2
    assert result.output.candidates[3] is None


def test_the_samples_of_a_vote_of_votes_are_the_outer_ones():
    inner = MajorityVoteController(NativeGenerationController(), 2, early_stop=False)
    worker = ScriptedWorker([boxed("1"), boxed("2")] * 3)
    output = answer(MajorityVoteController(inner, 3, early_stop=False), worker).output
    assert len(output.candidates) == 3


class Meaning:
    """Texts such as ``1`` and ``1.0`` mean the same, and say apart who wrote them."""

    def canonical_form(self, answer):
        return answer.partition(".")[0]


class Job:
    """A sample in flight, as far as a race asks for it."""

    def cancel(self):
        pass

    def result(self):
        pass


def cast(answers, order, early_stop, equivalence=None, write="{}.{}".format):
    """What a vote returns if its samples finish in a given order, without a loop or a worker.

    Returns:
        The task, and how many samples ended.
    """
    controller = MajorityVoteController(
        NativeGenerationController(),
        len(answers),
        early_stop,
        equivalence=Meaning() if equivalence is None else equivalence,
    )
    task = GenerationTask(input_str="p")
    process = controller.process([task])
    race = wanted = next(process)
    branches = race.new
    for branch in branches:
        race.started(branch, Job())
    ended = 0
    try:
        while True:
            if isinstance(wanted, Stage):
                wanted = process.send(None)
                continue
            if isinstance(wanted, list):  # something to compute
                (compute,) = wanted
                compute.result = compute.function(*compute.args, **compute.kwargs)
                wanted = process.send(None)
                continue
            number = next(n for n in order if branches[n] in race.pending)
            sample = branches[number].tasks[0]
            said = answers[number]
            sample.output_str = "none" if said is None else boxed(write(said, number))
            race.finished(branches[number])
            race.take()
            ended += 1
            wanted = process.send(branches[number])
    except StopIteration:
        return task, ended


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_stopping_early_returns_the_same_sample_in_any_order_of_arrival(data):
    answers = data.draw(st.lists(st.sampled_from([None, "1", "2", "3"]), min_size=1, max_size=9))
    orders = st.permutations(range(len(answers)))
    full, _ = cast(answers, data.draw(orders), early_stop=False)
    early, ended = cast(answers, data.draw(orders), early_stop=True)
    assert early.output_str == full.output_str
    told, known = (t.customized_result_fields["majority_vote"] for t in (early, full))
    assert told["answer"] == known["answer"]
    assert told["finished"] == ended <= known["finished"] == len(answers)


WRITTEN = (
    *("7", "7.0", "x=7", "y = 7", r"\frac{14}{2}", "7 cm", r"7\text{ m}", r"700\%", r"\{7\}"),
    *("50", r"50\%", "50%", ".5", "1/2", "x=50", r"x = 50\%", r"50^\circ", "50 cm"),
    *("1, 2", r"\{2, 1\}", "x=1,2", "(1,2)", "x=1, y=2", "1 < x < 2", "yes", "Yes", "(A)", "A"),
)


def as_written(said, number):
    return said


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_stopping_early_changes_nothing_however_answers_are_written(data):
    few = data.draw(st.lists(st.sampled_from(WRITTEN), min_size=1, max_size=4))
    answers = data.draw(st.lists(st.sampled_from([None, *few]), min_size=1, max_size=9))
    agree(answers, data, MathEquivalence(), as_written)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_stopping_early_changes_nothing_whatever_function_compares_answers(data):
    """The functions are any: neither symmetric nor transitive, nor is an answer its own equal."""
    answers = data.draw(st.lists(st.sampled_from([None, *"12345"]), min_size=1, max_size=9))
    equal = data.draw(st.sets(st.tuples(st.sampled_from("12345"), st.sampled_from("12345"))))
    agree(answers, data, lambda one, other: (one, other) in equal, as_written)


def agree(answers, data, equivalence, write):
    orders = st.permutations(range(len(answers)))
    full, _ = cast(answers, data.draw(orders), False, equivalence, write)
    early, ended = cast(answers, data.draw(orders), True, equivalence, write)
    assert early.output_str == full.output_str
    told, known = (t.customized_result_fields["majority_vote"] for t in (early, full))
    assert told["answer"] == known["answer"]
    assert told["finished"] == ended <= len(answers)


def test_what_a_percentage_means_does_not_depend_on_when_it_comes():
    answers = ["7", r"50\%", "7", ".5", "50", "50", "7"]
    for early_stop in (True, False):
        task, _ = cast(answers, range(7), early_stop, MathEquivalence(), as_written)
        assert task.output_str == boxed("7")


def test_a_user_may_compare_answers_with_any_function():
    result, _ = vote(["red", "blue", "RED"], equivalence=lambda a, b: a.lower() == b.lower())
    assert result.output.text == boxed("red")
    assert result.output.meta["majority_vote"]["answer"] == "red"


def test_votes_that_wait_for_earlier_ones_count_when_the_budget_ends():
    controller = MajorityVoteController(
        NativeGenerationController(), 4, equivalence=lambda one, other: one == other
    )
    task = GenerationTask(input_str="p")
    process = controller.process([task])
    race = next(process)
    branches = race.new
    for branch in branches:
        race.started(branch, Job())
    for number, said in ((1, "1"), (2, "2"), (3, "2")):
        branches[number].tasks[0].output_str = boxed(said)
        race.finished(branches[number])
        race.take()
        process.send(branches[number])
    race.finished(branches[0])
    race.take()
    (finding,) = process.throw(BudgetExceeded("spent"))
    finding.function(*finding.args)
    assert {wanted.name for wanted in process} == {"voted"}
    assert task.output_str == boxed("2")


def test_what_a_users_function_raises_is_raised_by_the_vote():
    with pytest.raises(ZeroDivisionError):
        vote(["1", "2"], early_stop=False, equivalence=lambda one, other: 1 / 0)


def test_an_answer_that_a_users_function_finds_is_text():
    with pytest.raises(ParameterError, match="extract_answer returned 5"):
        vote(["1", "2"], extract_answer=lambda text: 5)


def test_formulas_pool_the_same_with_and_without_stopping_early():
    answers = [r"\sqrt{8}", "3", r"2\sqrt{2}", "x = 3", r"\frac{4}{\sqrt{2}}", "3 cm"]
    for early_stop in (True, False):
        result, _ = vote(answers, early_stop=early_stop)
        assert result.output.text == boxed(r"\sqrt{8}")


def test_stopping_early_saves_samples_that_cannot_change_the_winner():
    """8 samples, 3 in 4 right, 200 random orders: for the answer alone 5.8 on average."""
    source, ended = random.Random(7), 0
    for _ in range(200):
        answers = [source.choice("1112") for _ in range(8)]
        ended += cast(answers, source.sample(range(8), 8), early_stop=True)[1]
    assert ended / 200 < 6.4


def test_another_vote_can_be_put_in_its_place_and_sees_all_samples():
    seen = {}

    class Longest(MajorityVoteController):
        def majority_vote(self, candidates_tasks, mark="", **kwargs):
            seen["thread"], seen["mark"] = threading.current_thread().name, mark
            texts = [tasks[0].output_str for tasks in candidates_tasks]
            index = max(range(len(texts)), key=lambda i: len(texts[i]))
            return index, texts[index]

    longest = boxed("4") + " so it is"
    worker = ScriptedWorker([boxed("4"), boxed("4"), Reply(longest, delay=0.1)])
    controller = Longest(NativeGenerationController(), 3)
    result = answer(controller, worker, majority_vote_kwargs={"mark": "x"})
    assert result.output.text == longest
    assert seen["mark"] == "x"
    assert seen["thread"].startswith("forethought-compute")  # it may be slow
    assert all(call.ended == "done" for call in worker.calls)


def test_the_number_of_samples_is_what_the_caller_says():
    for count, options in ((3, {}), (1, {"sample_num": 1}), (5, {"sample_num": 5})):
        worker = ScriptedWorker(lambda p, i: f"{i}")
        controller = MajorityVoteController(NativeGenerationController(), 3, early_stop=False)
        answer(controller, worker, **options)
        assert len(worker.calls) == count
    with pytest.raises(ParameterError, match="sample_num"):
        answer(controller, worker, sample_num=0)
    with pytest.raises(ParameterError, match="sample_num"):
        MajorityVoteController(NativeGenerationController(), 0)


def drawn_seeds(controller, **options):
    """The seeds of all samples of a vote, in the order in which they are asked for."""
    worker = ScriptedWorker(lambda p, i: "x")
    answer(controller, worker, **options)
    return [call.task.seed for call in worker.calls]


def test_a_seeded_vote_derives_a_reproducible_seed_per_sample():
    controller = MajorityVoteController(NativeGenerationController(), 3, early_stop=False)
    seeds = drawn_seeds(controller, sampling_params={"seed": 10})
    assert len({10, *seeds}) == 4
    assert seeds == drawn_seeds(controller, sampling_params={"seed": 10})
    assert not set(seeds) & set(drawn_seeds(controller, sampling_params={"seed": 11}))


def test_a_seed_means_the_same_wherever_it_is_set():
    inner = NativeGenerationController({"seed": 10})
    asked = drawn_seeds(
        MajorityVoteController(NativeGenerationController(), 3, early_stop=False),
        sampling_params={"seed": 10},
    )
    assert drawn_seeds(MajorityVoteController(inner, 3, early_stop=False)) == asked


@pytest.mark.parametrize("where", ["request", "controller"])
def test_a_vote_in_a_vote_repeats_no_seed(where):
    """With sums of numbers, sample 0 of sample 1 would draw what sample 1 of sample 0 draws."""
    native = NativeGenerationController({"seed": 10} if where == "controller" else None)
    inner = MajorityVoteController(native, 4, early_stop=False)
    middle = MajorityVoteController(inner, 3, early_stop=False)
    outer = MajorityVoteController(middle, 2, early_stop=False)
    options = {"sampling_params": {"seed": 10}} if where == "request" else {}
    seeds = drawn_seeds(outer, **options)
    assert len(set(seeds)) == len(seeds) == 24


def test_arguments_go_to_the_samples():
    class Repeater(NativeGenerationController):
        def process(self, tasks, times=1, **kwargs):
            tasks[0].input_str *= times
            yield from super().process(tasks, **kwargs)

    worker = ScriptedWorker(lambda p, i: "x")
    controller = MajorityVoteController(Repeater(), 2, early_stop=False)
    answer(controller, worker, "ab", generation_kwargs={"times": 2})
    answer(controller, worker, "ab", times=3)
    assert worker.prompts == ["abab"] * 2 + ["ababab"] * 2


def test_votes_nest():
    inner = MajorityVoteController(NativeGenerationController(), 3)
    worker = ScriptedWorker(lambda p, i: boxed(str(i % 2)))
    assert answer(MajorityVoteController(inner, 3), worker).output.text == boxed("0")


BAD = Reply("", error=OSError("gone"))


def test_a_failing_sample_fails_the_vote():
    with pytest.raises(TaskError, match="gone"):
        vote(["1", BAD, ("1", 60)])


def test_failing_samples_can_be_dropped():
    result, _ = vote(["1", BAD, "2", "2"], on_failure="drop")
    assert result.output.text == boxed("2")
    with pytest.raises(TaskError, match="gone"):
        vote([BAD, BAD], on_failure="drop")


def test_answers_can_be_found_and_compared_differently():
    worker = ScriptedWorker(["A: x", "A: 1/2", "A: 0.5", "A: x"])
    controller = MajorityVoteController(
        NativeGenerationController(),
        4,
        extract_answer=lambda text: text.removeprefix("A: "),
        equivalence=TextEquivalence(),
    )
    assert answer(controller, worker).output.text == "A: x"


def test_the_task_that_was_given_is_not_sampled_itself():
    task = GenerationTask(input_str="p")
    process = MajorityVoteController(NativeGenerationController(), 2).process([task])
    branches = process.send(None).pending
    process.close()
    assert all(branch.tasks[0] is not task for branch in branches)
    assert len(branches) == 2


def test_every_task_of_a_vote_gets_the_winners_results():
    tasks = [GenerationTask(input_str=prompt) for prompt in ("first", "second")]

    class Two(Controller):
        def process(self, given, **kwargs):
            yield from MajorityVoteController(NativeGenerationController(), 2).process(tasks)

    answer(Two(), ScriptedWorker(lambda prompt, index: f"{prompt} \\boxed{{5}}"))
    assert [task.output_str for task in tasks] == ["first \\boxed{5}", "second \\boxed{5}"]


def test_what_a_vote_cannot_use_is_refused_before_anything_runs():
    worker = ScriptedWorker(["x"])
    with pytest.raises(ParameterError, match="no argument 'weights'"):
        answer(pair(), worker, majority_vote_kwargs={"weights": [1, 2]})
    with pytest.raises(ParameterError, match="takes a task"):
        next(pair().process([]))
    with pytest.raises(ParameterError, match=r"invalid generation_controller.*'dynasor'"):
        MajorityVoteController("dynasor")
    assert worker.calls == []


def pair():
    return MajorityVoteController(NativeGenerationController(), 2)


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
def test_a_vote_with_fewer_calls_than_samples_counts_those_that_it_could_draw(on_failure):
    texts, spent = [boxed(text) for text in "1222"], Budget(calls=4)
    inner = NativeGenerationController()
    controller = MajorityVoteController(inner, 5, False, on_failure=on_failure)
    result = answer(controller, ScriptedWorker(texts), budget=spent)
    told = result.output.meta["majority_vote"]
    assert told.items() >= {"answer": "2", "samples": 5, "finished": 4, "num_voters": 4}.items()


def test_a_vote_counts_the_answers_that_could_be_compared_in_time():
    """Comparing the third answer takes longer than the budget allows."""

    def equal(one, other):
        if "slow" not in (one, other):
            return True
        loop, account = running[0]
        loop.call_soon_threadsafe(account.expire)  # now its seconds are over
        return not done.wait(60)

    def script(prompt, index):
        running.append((asyncio.get_running_loop(), current_scope().account))
        return [r"\boxed{1}", r"\boxed{1}", r"\boxed{slow}"][index]

    done, running = threading.Event(), []
    controller = MajorityVoteController(NativeGenerationController(), 3, False, equivalence=equal)
    result = answer(controller, ScriptedWorker(script), budget=Budget(seconds=600), timeout=50)
    done.set()
    assert result.output.text == r"\boxed{1}"


# ---- the statistical stop, and how samples begin -------------------------------------------------


def test_the_probability_of_a_lead_is_that_of_the_beta_posterior():
    """Beta(5, 1): 1 - (1/2)^5. Beta(4, 1): 15/16. Beta(7, 2): 1 - 9/256. Beta(n, n): 1/2."""
    assert lead_probability(4, 0) == 31 / 32
    assert lead_probability(3, 0) == 15 / 16
    assert lead_probability(6, 1) == 1 - 9 / 256
    assert lead_probability(5, 1) == 1 - 8 / 128
    assert [lead_probability(n, n) for n in (0, 1, 7)] == [0.5] * 3
    steps, posterior = 20000, 0.0  # by the midpoint rule: Beta(9, 5) above 1/2
    for step in range(steps):
        p = 0.5 + (step + 0.5) / (2 * steps)
        posterior += p**8 * (1 - p) ** 4 / (2 * steps) * 13 * math.comb(12, 4)
    assert lead_probability(8, 4) == pytest.approx(posterior, abs=1e-6)


ONE_BY_ONE = {"statistical_stop": 0.95, "concurrency": 1}


@pytest.mark.parametrize(
    ("answers", "drawn", "probability"),
    [
        (["4"] * 9, 4, 31 / 32),
        (["5", "4", "4", "4", "4", "4", "4", "4"], 7, 1 - 9 / 256),
        (["5", "4", "6", "4", "4", "4", "4", "4"], 8, 1 - 9 / 256),
        (["1", "2", "1", "2"], 4, 0.5),
        (["no", "4", "4", "4", "4", "4"], 5, 31 / 32),
    ],
)
def test_sampling_stops_when_the_posterior_of_the_lead_is_sure_enough(answers, drawn, probability):
    result, worker = vote(answers, early_stop=False, **ONE_BY_ONE)
    assert len(worker.calls) == drawn
    told = result.output.meta["majority_vote"]
    assert told["probability"] == pytest.approx(probability)
    assert told["finished"] == drawn


def test_the_statistical_stop_cancels_what_is_under_way_and_the_exact_one_would_not():
    answers = ["4", "4", "4", "4", *[("5", 60)] * 6]
    result, worker = vote(answers, early_stop=False, statistical_stop=0.95)
    assert result.output.text == boxed("4")
    assert [call.ended for call in worker.calls] == ["done"] * 4 + ["cancelled"] * 6
    assert "probability" not in vote(["4"])[0].output.meta["majority_vote"]


def test_doubling_draws_two_then_as_many_again():
    begun, worker = [], None

    def script(prompt, index):
        begun.append(sum(call.ended is not None for call in worker.calls))
        return boxed(str(index))

    worker = ScriptedWorker(script)
    controller = MajorityVoteController(NativeGenerationController(), 11, concurrency="doubling")
    answer(controller, worker)
    assert begun[:8] == [0, 0, 2, 2, 4, 4, 4, 4]
    assert begun[8:] == [8, 8, 8]
    _, worker = vote(["4"] * 8, concurrency="doubling", statistical_stop=0.9, early_stop=False)
    assert len(worker.calls) == 4
    _, worker = vote(["4"] * 8, concurrency="doubling")
    assert len(worker.calls) == 4, "half of them decide it: a tie goes to the lowest number"


def test_exactly_stopped_samples_that_have_not_begun_never_do():
    _, worker = vote(["4"] * 9, concurrency=1)
    assert len(worker.calls) == 5
    _, worker = vote(["5", *["4"] * 8], concurrency=1)
    assert len(worker.calls) == 6


@pytest.mark.parametrize(
    "field",
    [{"statistical_stop": 0.5}, {"statistical_stop": 1.0}, {"concurrency": "halving"}],
)
def test_settings_of_the_stop_out_of_range_are_refused(field):
    with pytest.raises(ParameterError, match=next(iter(field))):
        MajorityVoteController(NativeGenerationController(), 2, **field)
