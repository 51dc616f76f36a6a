"""Stages and traces: what is told and recorded of a request, and the request run again from it."""

import contextlib
import json
import math
import random

import pytest

from forethought import methods
from forethought.cli.main import main
from forethought.errors import ParameterError, UsageError
from forethought.methods.adaptive_compute import RESTART_PROMPT
from forethought.outputs import Logprob
from forethought.scaffolding import (
    AsCompleted,
    Branch,
    Budget,
    Controller,
    Delta,
    GenerationTask,
    NativeRewardController,
    Prices,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
    Stage,
    Trace,
    replay,
)


def says(prompt, index):
    rng = random.Random(index)
    text = f"so \\boxed{{{rng.choice([1, 2, 3])}}}"
    return Reply(text, delay=rng.random() * 0.01)


def run(controller, script=says, **options):
    worker = ScriptedWorker(script, score=lambda question, answer: float(answer[-2]))
    workers = dict.fromkeys(methods.worker_tags(controller), worker)
    with ScaffoldingLlm(controller, workers, trace=True) as llm:
        result = llm.generate_async("p", **options)
        with contextlib.suppress(Exception):  # it is in result.error
            result.result(60)
    return result


METHODS = {
    "plain": lambda: methods.create("plain"),
    "vote": lambda: methods.create("majority_vote", default_sample_num=4),
    "best": lambda: methods.create("best_of_n", reward_controller=NativeRewardController()),
    "dynasor": lambda: methods.create("dynasor", chunk_size=4, probe_length=3),
    "refine": lambda: methods.create("self_refine", num_refinements=1),
    "forcing": lambda: methods.create("budget_forcing", thinking_budget=4),
    "first_answer": lambda: methods.create("first_answer", line_end="{"),
}


NEVER = 10_000.0
"""Seconds before the first token of a sample that is cancelled before."""


def boxed(number):
    return f"so \\boxed{{{number}}}"


def first_agree(prompt, index):
    """Three samples at once; the others never come."""
    return Reply(boxed(2), delay=0.0 if index < 3 else NEVER)


def one_passes(prompt, index):
    return Reply(boxed(3 if index == 1 else 1), delay=0.0 if index < 2 else NEVER)


def unsure(prompt, index):
    """Two that set the threshold, one that falls below it, two that agree, and two too many."""
    confidence = (3.0, 3.0, 1.0, 3.5, 3.5, 3.5, 3.5)[index]
    text = "w" * 12 + boxed(1 if index == 0 else 2)
    scores = [{ord(c): Logprob(-confidence, 1)} for c in text]
    return Reply(text, logprobs=scores, delay=NEVER if index > 4 else 0.0)


def restarts(prompt, index):
    """Answers, and how probable it is that a new start is not better."""
    if not prompt.endswith(RESTART_PROMPT):
        return Reply("w" * 16 + boxed(index % 3), seconds_per_token=0.0)
    good = (len(prompt) * 7 + index) % 10 / 10
    pair = {1: Logprob(math.log(good + 1e-3), 1, "No"), 2: Logprob(math.log(1.1 - good), 1, "Yes")}
    return Reply("N", logprobs=[pair])


def slow_streams(prompt, index):
    """Chains that are never at their end, and answers of probes."""
    if "boxed" in prompt:
        return Reply("7}")
    return Reply("w" * 400, seconds_per_token=0.001 if index < 2 else NEVER)


CANCELLED = {
    "vote": (lambda: methods.create("majority_vote", default_sample_num=5), first_agree),
    "statistical stop": (
        lambda: methods.create(
            "majority_vote", default_sample_num=9, early_stop=False, statistical_stop=0.9
        ),
        first_agree,
    ),
    "verified": (
        lambda: methods.create(
            "repeated_sampling",
            default_sample_num=4,
            verifier=lambda question, text: "3" in text,
            concurrency=4,
        ),
        one_passes,
    ),
    "deepconf_online": (
        lambda: methods.create(
            "deepconf_online",
            default_sample_num=7,
            num_warmup=2,
            window=4,
            chunk_size=4,
            consensus=0.65,
        ),
        unsure,
    ),
    "adaptive_compute": (
        lambda: methods.create(
            "adaptive_compute", default_sample_num=6, round_size=3, prune_after=8
        ),
        restarts,
    ),
    "dynasor under a vote": (
        lambda: methods.create(
            "majority_vote",
            generation_controller={
                "method": "dynasor",
                "chunk_size": 4,
                "certainty_threshold": 2,
            },
            default_sample_num=3,
        ),
        slow_streams,
    ),
    "votes under best of n": (
        lambda: methods.create(
            "best_of_n",
            generation_controller={"method": "majority_vote", "default_sample_num": 2},
            reward_controller=NativeRewardController(),
            default_sample_num=2,
        ),
        lambda prompt, index: Reply(boxed(2)),
    ),
}
"""Methods that end samples before they are whole, and a script for each."""
WITHOUT_CANCELS = ("adaptive_compute", "votes under best of n")
"""What they end they end as a stream, or nothing."""


def told(trace):
    """The stages; when cancelled branches are gone is no decision."""
    return [
        (stage["branch"], stage["name"], stage["why"], stage["fields"])
        for stage in trace.stages
        if stage["why"] != "cancelled"
    ]


@pytest.mark.parametrize("name", CANCELLED)
def test_a_request_with_cancelled_branches_runs_again_to_the_same_result(name, tmp_path):
    make, script = CANCELLED[name]
    result = run(make(), script, sampling_params={"seed": 3, "max_tokens": 60})
    assert result.error is None
    result.trace.save(tmp_path / "trace.json")
    trace = Trace.load(tmp_path / "trace.json")
    outcomes = [span.outcome for span in trace.spans]
    assert ("cancelled" in outcomes) is (name not in WITHOUT_CANCELS)
    again = replay(trace, make(), timeout=60)
    assert again.outputs == result.outputs
    assert again.output.meta == result.output.meta
    assert again.usage == result.usage
    assert told(again.trace) == told(trace)


class Looks(Controller):
    """Returns how many of its branches had ended when it heard of the first."""

    def process(self, tasks, **kwargs):
        class Ends:
            ended = False

            def process(self, tasks):
                yield tasks
                self.ended = True

        branches = [
            Branch(Ends(), [GenerationTask(input_str="q", worker_tag="generation")])
            for _ in range(4)
        ]
        with AsCompleted(branches) as running:
            yield running
            tasks[0].output_str = str(sum(branch.controller.ended for branch in branches))


@pytest.mark.parametrize("num_together", [1, 2, 4])
def test_what_a_controller_sees_of_its_branches_when_it_goes_on_is_seen_again(num_together):
    script = [Reply("x", delay=0.0 if n < num_together else NEVER) for n in range(4)]
    worker = ScriptedWorker(script)
    with ScaffoldingLlm(Looks(), {"generation": worker}, trace=True) as llm:
        result = llm.generate("p")
    assert replay(result.trace, Looks(), timeout=60).output == result.output


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_trace_runs_again_without_a_model_to_the_same_result(name, tmp_path):
    result = run(METHODS[name]())
    result.trace.save(tmp_path / "trace.json")
    trace = Trace.load(tmp_path / "trace.json")
    again = replay(trace, METHODS[name](), timeout=60)
    assert again.outputs == result.outputs == trace.scaffolding_outputs
    assert again.usage == result.usage
    assert again.outputs


def test_a_controller_that_asks_for_something_else_is_found_out():
    trace = run(METHODS["vote"]()).trace
    with pytest.raises(UsageError, match="something else than the recorded one"):
        replay(trace, methods.create("majority_vote", default_sample_num=5), timeout=60)


def test_a_failed_task_fails_again_with_the_same_words():
    result = run(METHODS["plain"](), lambda p, i: Reply("", error=RuntimeError("no weights")))
    again = replay(result.trace, METHODS["plain"](), timeout=60)
    assert str(again.error) == str(result.error)
    assert "no weights" in str(again.error)


def test_a_spent_budget_ends_a_replay_where_it_ended_the_request():
    result = run(METHODS["vote"](), lambda p, i: "x" * 30, budget=Budget(tokens=20))
    again = replay(result.trace, METHODS["vote"](), timeout=60)
    assert again.output == result.output
    assert (again.usage, again.spent_budget) == (result.usage, "tokens")


def test_branches_and_scores_are_told_as_stages_apart_from_the_text():
    result = run(METHODS["best"]())
    stages = [e.output for e in result.events(stages=True) if isinstance(e.output, Stage)]
    names = [stage.name for stage in stages]
    assert names == ["spawned"] * 4 + ["ended"] * 4 + ["scored"] * 8 + ["selected"]
    assert {stage.branch for stage in stages[:4]} == {"0", "1", "2", "3"}
    assert {stage.why for stage in stages[4:8]} == {"done"}
    assert list(result.events()) == []


class Told(Controller):
    def generate(self, prompt, **kwargs):
        yield Delta("a")
        yield Stage("pruned", "its score is lowest", "1", {"score": 0.5})
        yield Delta("b")


def test_a_controller_tells_stages_in_their_place_between_its_text():
    with ScaffoldingLlm(Told(), {}, trace=True) as llm:
        result = llm.generate("p")
        outputs = [event.output for event in result.events(stages=True)]
        assert outputs[1] == Stage("pruned", "its score is lowest", "1", {"score": 0.5})
        texts = [partial.cur_output and partial.cur_output.text for partial in result]
        assert texts == ["a", "ab", None]
    assert result.trace.stages[0]["name"] == "pruned"
    assert "* pruned: its score is lowest: score 0.5" in Trace.text(told_at_root(result.trace))


def told_at_root(trace):
    trace.stages[0]["branch"] = ""
    return trace


def test_the_tree_shows_branches_forks_and_the_answer():
    text = run(METHODS["dynasor"]()).trace.text()
    assert "StreamGenerationTask" in text
    assert "fork of" in text
    assert text.splitlines()[-1].startswith("answer: ")


def test_the_command_prints_the_tree_of_a_file(tmp_path, capsys):
    trace = run(METHODS["plain"]()).trace
    trace.save(tmp_path / "trace.json")
    assert main(["trace", "show", str(tmp_path / "trace.json")]) == 0
    assert capsys.readouterr().out.strip() == trace.text()
    assert main(["trace", "show", str(tmp_path / "none.json")]) == 2


def test_costs_are_those_of_prompts_of_cached_tokens_and_of_all_that_was_generated():
    usage = {"prompt_tokens": 1000, "cached": 400, "completion_tokens": 50, "decoded": 200}
    assert Prices(2.0, 10.0).cost(usage) == pytest.approx((1000 * 2 + 200 * 10) / 1e6)
    discounted = Prices(2.0, 10.0, cached=0.5).cost(usage)
    assert discounted == pytest.approx((600 * 2 + 400 * 0.5 + 200 * 10) / 1e6)
    for wrong in ((-1.0, 1.0), (1.0, float("nan")), (1.0, 1.0, -0.1), (None, 1.0)):
        with pytest.raises(ParameterError, match=r"input|output|cached"):
            Prices(*wrong)


def test_the_tree_and_the_timeline_show_costs_where_there_are_prices(tmp_path, capsys):
    trace, prices = run(METHODS["plain"]()).trace, Prices(1000.0, 2000.0)
    file = tmp_path / "trace.json"
    trace.save(file)
    cost = f"cost {trace.cost(prices):.6f}"
    assert trace.cost(prices) > 0
    assert cost in trace.text(prices=prices).splitlines()[0]
    assert "cost" not in trace.text()
    given = ["--price-in", "1000", "--price-out", "2000"]
    assert main(["trace", "show", str(file), *given]) == 0
    assert capsys.readouterr().out.strip() == trace.text(prices=prices)
    assert main(["trace", "show", str(file), *given, "--html"]) == 0
    assert cost in (tmp_path / "trace.html").read_text()
    assert main(["trace", "show", str(file), *given[:2]]) == 2
    assert "Give --price-in and --price-out" in capsys.readouterr().err


def test_a_timeline_is_written_beside_its_trace_and_never_over_it(tmp_path, capsys):
    trace = run(METHODS["plain"]()).trace
    for name in ("trace.json", "trace.html"):
        trace.save(tmp_path / name)
    assert main(["trace", "show", str(tmp_path / "trace.html"), "--html"]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert main(["trace", "show", str(tmp_path / "trace.json"), "--html"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "trace.html")
    assert (tmp_path / "trace.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("resumed", [[["0"]], [["0", "1"]], [[0, 1]], [["0", 1, 2]], "x"])
def test_a_trace_whose_record_of_resumptions_is_damaged_is_refused(resumed, tmp_path):
    path = tmp_path / "t.json"
    run(methods.create("plain")).trace.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resumed": resumed}))
    with pytest.raises(UsageError, match="cannot read the trace"):
        Trace.load(path)
