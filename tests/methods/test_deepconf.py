"""DeepConf: votes by confidence, and samples that are cancelled where it is low."""

import pytest
from openai import AsyncOpenAI

from engines import expect_empty
from forethought import LLM, methods
from forethought.answers.answers import TextEquivalence
from forethought.errors import BudgetExceeded, ParameterError, TaskError
from forethought.methods.stack import stack
from forethought.outputs import Logprob
from forethought.scaffolding import (
    Budget,
    EngineWorker,
    NativeChatController,
    OpenaiWorker,
    Reply,
    ScriptedWorker,
)
from openai_server import EngineServer, serving
from scripted import TimeEnds, answer
from tokens import speaking


def sure(text, *values, **options):
    """A reply whose tokens have these confidences; the last one stands for all that follow."""
    rest = [values[-1]] * (len(text) - len(values))
    scores = [{ord(c): Logprob(-v, 1)} for c, v in zip(text, [*values, *rest], strict=True)]
    return Reply(text, logprobs=scores, **options)


def last(text):
    """The answer of a scripted sample: its last character, unless that is a dot."""
    return None if text.endswith(".") else text[-1]


def ask(replies, method="deepconf", **settings):
    budget = settings.pop("budget", None)
    controller = methods.create(
        method,
        default_sample_num=len(replies),
        extract_answer=last,
        equivalence=TextEquivalence(),
        **settings,
    )
    worker = (TimeEnds if budget is not None and budget.seconds else ScriptedWorker)(replies)
    return answer(controller, worker, budget=budget), worker


def told(result):
    return result.output.meta["deepconf"]


# ---- offline -------------------------------------------------------------------------------------

SAMPLES = [sure("a7", 2.0), sure("b7", 1.0), sure("c5", 4.0), sure("d7", 3.0), sure("e5", 2.5)]


@pytest.mark.parametrize("method", ["deepconf", "deepconf_online"])
def test_each_sample_has_a_seed_of_its_own(method):
    settings = {"consensus": None} if method == "deepconf_online" else {}
    controller = methods.create(method, default_sample_num=5, extract_answer=last, **settings)
    worker = ScriptedWorker(SAMPLES)
    answer(controller, worker, sampling_params={"seed": 3})
    assert len({call.task.seed for call in worker.calls}) == len(worker.calls) == 5


def test_the_most_confident_samples_vote_with_their_confidence():
    """The 40th percentile of 1.0 2.0 2.5 3.0 4.0 is 2.3: 5 has 4.0 + 2.5 of 9.5, 7 has 3.0."""
    result, worker = ask(SAMPLES, kept=0.6, aggregation="mean")
    assert result.output.text == "c5", "the most confident sample of the winning answer"
    assert told(result) == {
        "answer": "5",
        "answer_rule": None,
        "num_voters": 5,
        "num_uncompared": 0,
        "share": pytest.approx(6.5 / 9.5),
        "samples": 5,
        "confidences": [2.0, 1.0, 4.0, 3.0, 2.5],
        "voters": [2, 3, 4],
    }
    assert result.output.candidates == ["a7", "b7", "c5", "d7", "e5"]
    assert [call.task.confidence for call in worker.calls] == [20] * 5


def test_without_the_weights_or_without_the_filter_another_answer_wins():
    plain = methods.create(
        "majority_vote",
        default_sample_num=5,
        extract_answer=last,
        equivalence=TextEquivalence(),
        early_stop=False,
    )
    assert answer(plain, ScriptedWorker(SAMPLES)).output.text == "a7"
    weighted = ask([*SAMPLES, sure("f7", 1.0)], kept=1.0, aggregation="mean")[0]
    assert told(weighted)["answer"] == "7", "7 has 7.0 of 13.5"
    assert ask([*SAMPLES, sure("f7", 1.0)], kept=0.1, aggregation="mean")[0].output.text == "c5"


def test_windows_of_a_sample_are_its_confidence():
    """Groups of two: 3.0 3.5 3.0 and 5.5 1.0 5.5."""
    samples = [sure("aaa1", 4.0, 2.0, 5.0, 1.0), sure("bbb2", 10.0, 1.0, 1.0, 10.0)]
    result, _ = ask(samples, aggregation="lowest_group", window=2, kept=1.0)
    assert (told(result)["confidences"], result.output.text) == ([3.0, 1.0], "aaa1")
    result, _ = ask(samples, window=2, kept=1.0)  # the lowest tenth of the groups, at least one
    assert (told(result)["confidences"], result.output.text) == ([3.0, 1.0], "aaa1")
    result, _ = ask(samples, aggregation="tail_mean", window=2, kept=1.0)
    assert (told(result)["confidences"], result.output.text) == ([3.0, 5.5], "bbb2")


def test_samples_without_an_answer_do_not_vote():
    result, _ = ask([sure("a.", 9.0), sure("b1", 1.0)], kept=0.1)
    assert (result.output.text, told(result)["voters"]) == ("b1", [1])
    result, _ = ask([sure("a.", 1.0), sure("b.", 9.0)])
    assert (result.output.text, told(result)["answer"]) == ("a.", None)


def test_failing_samples_are_raised_or_left_out():
    bad = Reply("", error=OSError("gone"))
    with pytest.raises(TaskError, match="gone"):
        ask([sure("a1", 1.0), bad])
    result, _ = ask([bad, sure("a1", 1.0)], on_failure="drop")
    assert (result.output.text, told(result)["confidences"]) == ("a1", [None, 1.0])
    with pytest.raises(TaskError, match="gone"):
        ask([bad, bad], on_failure="drop")


def test_samples_whose_confidence_is_unknown_are_refused():
    with pytest.raises(ParameterError, match="no confidences"):
        ask(["a1", "b2"])


@pytest.mark.parametrize("method", ["deepconf", "deepconf_online"])
def test_when_the_budget_ends_those_vote_that_have_ended(method):
    slow = sure("slow2", 9.0, delay=60)
    result, _ = ask([sure("a1", 1.0), slow], method, budget=Budget(seconds=600))
    assert (result.output.text, result.output.candidates) == ("a1", ["a1", None])
    with pytest.raises(BudgetExceeded):
        ask([slow, slow], method, budget=Budget(seconds=600))


@pytest.mark.parametrize(
    "field", [{"kept": 0.0}, {"kept": 1.5}, {"window": 0}, {"aggregation": "sum"}]
)
def test_settings_out_of_range_are_refused(field):
    with pytest.raises(ParameterError, match=next(iter(field))):
        methods.create("deepconf", **field)


def test_it_votes_among_samples_of_another_method():
    controller = stack("budget_forcing+deepconf", default_sample_num=2, aggregation="mean")
    assert type(controller.generation_controller).__name__ == "BudgetForcingController"


# ---- online --------------------------------------------------------------------------------------

WARMUP = [sure("aaaa1", 3.0), sure("bbbb2", 2.0), sure("cccc1", 4.0)]
ONLINE = {"window": 3, "num_warmup": 3, "kept": 0.5, "consensus": None}


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 64])
def test_a_sample_is_stopped_at_the_first_whole_group_below_the_threshold(chunk_size):
    """The median of 3.0 2.0 4.0 is 3.0. The groups of sample 3 are 4.0 3.0 2.67, the last with its
    fifth token; sample 4 has none below 3.0, and sample 5 ends before it has a whole one."""
    others = [
        sure("d" * 60 + "2", 4.0, 4.0, 4.0, 1.0, 3.0, 5.0),
        sure("eeee2", 9.0, 0.0, 0.0, 9.0, 9.0),
        sure("f2", 8.0),
    ]
    result, worker = ask([*WARMUP, *others], "deepconf_online", chunk_size=chunk_size, **ONLINE)
    found = told(result)
    assert found["threshold"] == 3.0
    assert found["stopped"] == [3]
    assert found["confidences"] == [3.0, 2.0, 4.0, None, 3.0, 8.0]
    assert found["voters"] == [0, 2, 4, 5], "sample 1 would have been stopped"
    assert (found["answer"], found["share"]) == ("2", pytest.approx(11 / 18))
    assert result.output.text == "f2"
    stopped = worker.calls[3]
    assert stopped.steps == -(-5 // chunk_size) + (chunk_size < 61), "and one to cancel it"
    assert stopped.ended == ("cancelled" if chunk_size < 61 else "done")
    assert result.output.candidates[3] is None


def test_low_and_high_keep_the_tenth_and_the_ninety_percent_of_the_warm_up():
    warmup = [sure(f"{n}aa1", float(n)) for n in range(1, 10)] + [sure("xaa1", 10.0)]
    for kept, threshold in ((0.1, 9.1), (0.9, 1.9)):
        result, _ = ask(warmup, "deepconf_online", **{**ONLINE, "num_warmup": 10, "kept": kept})
        assert told(result)["threshold"] == pytest.approx(threshold)


def test_a_consensus_ends_the_sampling_and_cancels_what_is_under_way():
    """After the warm-up 1 has 7 of 9; with 3.0 more 10 of 12, which is more than 0.8."""
    more = [sure("dddd1", 3.0), sure("slow2", 9.0, delay=60), sure("slow2", 9.0, delay=60)]
    settings = {**ONLINE, "kept": 1.0, "consensus": 0.8}
    result, worker = ask([*WARMUP, *more], "deepconf_online", **settings)
    assert [call.ended for call in worker.calls] == ["done"] * 4 + ["cancelled"] * 2
    assert (told(result)["answer"], told(result)["share"]) == ("1", pytest.approx(10 / 12))
    result, worker = ask([*WARMUP, *more], "deepconf_online", **{**settings, "consensus": 0.7})
    assert len(worker.calls) == 3, "the warm-up agrees already"
    more = [sure("dddd1", 3.0), sure("eeee2", 9.0)]
    result, worker = ask([*WARMUP, *more], "deepconf_online", **settings, concurrency=1)
    assert len(worker.calls) == 4


def test_if_no_answer_reaches_the_threshold_all_vote():
    warmup = [sure("aaa.", 9.0), sure("bbb1", 1.0)]
    result, _ = ask(warmup, "deepconf_online", num_warmup=2, window=2, kept=0.1)
    assert (result.output.text, told(result)["threshold"]) == ("bbb1", pytest.approx(8.2))


def test_what_cannot_be_stopped_is_refused():
    for inner in ("majority_vote", NativeChatController()):
        with pytest.raises(ParameterError, match="cannot stop the samples of another method"):
            methods.create("deepconf_online", generation_controller=inner)


# ---- on the engine and on a server ---------------------------------------------------------------

FIELDS = {"dtype": "float32", "kv_cache_config": {"max_tokens": 8192, "page_size": 4}}
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "seed": 3, "max_tokens": 40}


def decisions(worker, method, **settings):
    controller = methods.create(
        method, top_k=5, extract_answer=last, equivalence=TextEquivalence(), **settings
    )
    result = answer(controller, worker, "Hello world", sampling_params=SAMPLED)
    return result.output.text, told(result)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("deepconf", {"default_sample_num": 6, "kept": 0.5, "window": 4}),
        (
            "deepconf_online",
            {"default_sample_num": 12, "window": 4, "num_warmup": 5, "kept": 0.4, "consensus": None}
            | {"chunk_size": 3},
        ),
    ],
)
def test_engine_server_and_script_decide_the_same_on_the_same_samples(method, settings):
    llm = LLM(speaking(), **FIELDS)
    with EngineWorker(llm) as worker:
        here = decisions(worker, method, **settings)
        with serving(EngineServer(worker.llm)) as server:
            client = AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)
            there = decisions(OpenaiWorker(client, "m"), method, **settings)
    expect_empty(llm._frontend.engine)
    if method == "deepconf_online":
        assert 0 < len(here[1]["stopped"]) < 7
    assert here[0] == there[0]
    for name, value in here[1].items():
        if name == "confidences":
            value = [each and pytest.approx(each, abs=1e-4) for each in value]
        elif isinstance(value, float):
            value = pytest.approx(value, abs=1e-4)
        assert there[1][name] == value, name


def test_stopped_samples_save_their_tokens_on_the_engine():
    """A sample is cancelled soon after its group of 4 tokens, far from its 400 tokens."""
    llm = LLM(speaking(), **FIELDS)
    fields = {**SAMPLED, "max_tokens": 400, "ignore_eos": True}
    with EngineWorker(llm) as worker:
        controller = methods.create(
            "deepconf_online",
            default_sample_num=9,
            num_warmup=3,
            kept=0.01,
            window=4,
            chunk_size=4,
            consensus=None,
            concurrency=1,
            extract_answer=last,
        )
        before = worker.llm.stats
        result = answer(controller, worker, "Hello world", sampling_params=fields)
        decoded = worker.llm.stats.decoded - before.decoded
    stopped = told(result)["stopped"]
    assert stopped
    assert decoded < 400 * 9
    expect_empty(llm._frontend.engine)
