"""Repeated sampling: samples are drawn until a verifier accepts one."""

import threading

import pytest
from openai import AsyncOpenAI

from engines import expect_empty
from forethought import LLM
from forethought.errors import BudgetExceeded, ParameterError, TaskError, UnknownNameError
from forethought.methods import (
    DynasorGenerationController,
    MajorityVoteController,
    RepeatedSamplingController,
)
from forethought.methods.stack import stack
from forethought.scaffolding import (
    Budget,
    EngineWorker,
    GenerationTask,
    NativeGenerationController,
    OpenaiWorker,
    Reply,
    ScriptedWorker,
    sampling,
)
from openai_server import EngineServer, serving
from scripted import answer, chain
from tokens import speaking

BAD = Reply("", error=OSError("gone"))


def boxed(text):
    return rf"so \boxed{{{text}}}"


def draw(answers, right="!", count=None, **options):
    """The result of sampling from given answers, of which those with ``right`` in them are right.

    Returns:
        The result, and the worker.
    """
    worker = ScriptedWorker(list(answers))
    controller = RepeatedSamplingController(
        NativeGenerationController(),
        lambda question, text: right in text,
        count or len(answers),
        **options,
    )
    return answer(controller, worker), worker


def told(result):
    return result.output.meta["repeated_sampling"]


def test_sampling_ends_with_the_first_sample_that_is_accepted():
    result, worker = draw(["a", "b", "c!", "d!", "e"])
    assert result.output.text == "c!"
    assert result.output.token_ids == [ord("c"), ord("!")]
    assert len(worker.calls) == 3
    assert told(result) == {
        "accepted": True,
        "index": 2,
        "samples": 5,
        "verified": [False, False, True],
    }
    assert result.output.candidates == ["a", "b", "c!", None, None]


def test_the_verifier_decides_where_a_vote_would_choose_otherwise():
    answers = [boxed("1"), boxed("1"), boxed("1"), boxed("7!")]
    assert draw(answers)[0].output.text == boxed("7!")
    worker = ScriptedWorker(answers)
    vote = MajorityVoteController(NativeGenerationController(), 4)
    assert answer(vote, worker).output.text == boxed("1")


def test_it_reads_the_question_and_the_answer():
    seen = []
    verifier = lambda question, text: seen.append((question, text)) or len(seen) == 2  # noqa: E731
    controller = RepeatedSamplingController(NativeGenerationController(), verifier)
    answer(controller, ScriptedWorker(["a", "b", "c"]), "why?")
    answer(controller, ScriptedWorker(["c"] * 16), [1, 2], question="how?")
    assert seen[:3] == [("why?", "a"), ("why?", "b"), ("how?", "c")]


def test_prompts_without_text_and_answers_without_text_are_refused_before_anything_runs():
    worker = ScriptedWorker(["a"])
    controller = RepeatedSamplingController(NativeGenerationController(), lambda q, a: True)
    with pytest.raises(ParameterError, match=r"question as text.*question="):
        answer(controller, worker, [1, 2])
    with pytest.raises(ParameterError, match="skip_detokenizer"):
        next(controller.process([GenerationTask(input_str="p", skip_detokenizer=True)]))
    with pytest.raises(ParameterError, match="one task"):
        next(controller.process([GenerationTask(), GenerationTask()]))
    with pytest.raises(ParameterError, match="sample_num"):
        answer(controller, worker, sample_num=0)
    assert worker.calls == []


def begun(concurrency):
    """How many of six samples were begun by the time that each was verified."""
    seen, worker = [], ScriptedWorker(list("abcdef"))

    def verifier(question, text):
        seen.append(len(worker.calls))
        return False

    controller = RepeatedSamplingController(NativeGenerationController(), verifier, 6, concurrency)
    assert told(answer(controller, worker))["verified"] == [False] * 6
    return seen


def test_samples_are_drawn_one_after_the_other_or_doubled_or_so_many_at_once():
    assert begun(1) == [1, 2, 3, 4, 5, 6]
    assert begun("doubling") == [1, 2, 4, 4, 6, 6]
    assert begun(9) == [6] * 6
    three = begun(3)
    assert three[0] == 3
    assert all(count <= 3 + number for number, count in enumerate(three))


SLOW = Reply("slow!", delay=60)


@pytest.mark.parametrize(
    ("concurrency", "answers"),
    [(4, ["good!", SLOW, SLOW, SLOW]), ("doubling", ["x", "x", "good!", SLOW])],
)
def test_an_accepted_sample_ends_those_behind_it(concurrency, answers):
    result, worker = draw([*answers, SLOW, SLOW], concurrency=concurrency)
    assert result.output.text == "good!"
    ended = {"x": "done", "good!": "done", SLOW: "cancelled"}
    assert [call.ended for call in worker.calls] == [ended[text] for text in answers]
    expected = {"x": False, "good!": True, SLOW: None}
    assert told(result)["verified"] == [expected[text] for text in answers]


@pytest.mark.parametrize("slow", range(4))
def test_which_accepted_sample_is_returned_does_not_depend_on_how_fast_each_is(slow):
    answers = ["x", "first!", "second!", "third!", "never", "never"]
    replies = [Reply(text, delay=0.05 * (n == slow)) for n, text in enumerate(answers)]
    result, worker = draw(replies, concurrency=4)
    assert (result.output.text, told(result)["index"]) == ("first!", 1)
    assert len(worker.calls) <= 5


def test_a_slow_verifier_does_not_hold_up_the_other_samples():
    ready = threading.Event()

    def verifier(question, text):
        return text == "last" if text != "first" else not ready.wait(60)

    worker = ScriptedWorker(lambda prompt, index: ready.set() or "last" if index else "first")
    controller = RepeatedSamplingController(NativeGenerationController(), verifier, 2, 2)
    assert answer(controller, worker).output.text == "last"


def test_without_an_accepted_sample_the_others_vote_or_the_first_is_returned():
    answers = [boxed("3"), boxed("0.5"), "none", boxed("1/2")]
    result, _ = draw(answers)
    assert result.output.text == boxed("0.5")
    info = told(result)
    assert info.pop("vote")["num_voters"] == 3
    assert info == {"accepted": False, "index": 1, "samples": 4, "verified": [False] * 4}
    assert draw(answers, fallback="first")[0].output.text == boxed("3")
    assert draw(["none", "nothing"])[0].output.text == "none"


def test_formulas_vote_too():
    assert draw([boxed("7"), boxed("x+1"), boxed("1+x")])[0].output.text == boxed("x+1")


def test_without_early_stop_all_are_verified_and_the_lowest_accepted_is_returned():
    result, worker = draw(["a", "b!", "c!", "d"], early_stop=False, concurrency=2)
    assert result.output.text == "b!"
    assert len(worker.calls) == 4
    assert told(result)["verified"] == [False, True, True, False]
    assert result.output.candidates == ["a", "b!", "c!", "d"]


def test_a_sample_draws_as_the_same_sample_of_a_vote_does():
    seeds = []
    for controller in (
        RepeatedSamplingController(NativeGenerationController(), lambda q, a: False, 3),
        MajorityVoteController(NativeGenerationController(), 3, early_stop=False),
    ):
        worker = ScriptedWorker(["a", "b", "c"])
        answer(controller, worker, sampling_params={"seed": 7})
        seeds.append([call.task.seed for call in worker.calls])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_it_composes_with_other_methods():
    assert type(stack("dynasor+repeated_sampling", verifier="countdown")) is (
        RepeatedSamplingController
    )
    thinking = ScriptedWorker(chain("p", "one two three", lambda known: boxed(str(known))))
    dynasor = DynasorGenerationController(chunk_size=4, certainty_threshold=9)
    result = answer(
        RepeatedSamplingController(dynasor, lambda question, text: "three" in text, 2), thinking
    )
    assert result.output.text.startswith("one two three")
    assert "dynasor" in result.output.meta
    inner = RepeatedSamplingController(NativeGenerationController(), lambda q, a: "!" in a, 3)
    worker = ScriptedWorker([boxed(text) for text in ("1", "5!", "7!", "2", "5!")])
    result = answer(MajorityVoteController(inner, 3), worker)
    assert result.output.text == boxed("5!")
    assert told(result)["verified"] == [False, False, True]


def test_failing_samples_are_raised_or_count_as_rejected():
    with pytest.raises(TaskError, match="gone"):
        draw(["a", BAD, "b!"])
    result, _ = draw(["a", BAD, "b!"], on_failure="drop")
    assert (result.output.text, told(result)["verified"]) == ("b!", [False, False, True])
    with pytest.raises(TaskError, match="gone"):
        draw([BAD, BAD], on_failure="drop")
    assert draw(["a", BAD], on_failure="drop")[0].output.text == "a"


def test_a_verifier_that_fails_or_returns_no_bool_fails_the_request():
    def ask(verifier, **options):
        controller = RepeatedSamplingController(
            NativeGenerationController(), verifier, 2, **options
        )
        return answer(controller, ScriptedWorker(["a", "b"]))

    with pytest.raises(ZeroDivisionError):
        ask(lambda question, text: 1 / 0)
    with pytest.raises(ParameterError, match=r"result of the verifier.*0\.7"):
        ask(lambda question, text: 0.7)
    with pytest.raises(ZeroDivisionError):
        ask(lambda question, text: 1 / 0, on_failure="drop")


def test_verifiers_are_found_by_name_or_are_coroutine_functions():
    async def even(question, text):
        return text == "b"

    native = NativeGenerationController()
    result = answer(RepeatedSamplingController(native, even), ScriptedWorker(["a", "b", "c"]))
    assert result.output.text == "b"
    right, wrong = r"\boxed{(3+5)*5}", r"\boxed{8*5}"
    controller = RepeatedSamplingController(native, "countdown")
    result = answer(controller, ScriptedWorker([wrong, right]), "Use 3, 5, 5 and 2 to make 40.")
    assert result.output.text == right
    with pytest.raises(UnknownNameError, match="countdown"):
        RepeatedSamplingController(native, "countdwon")


def test_when_the_budget_ends_what_has_ended_is_chosen_from():
    worker = ScriptedWorker(["abcd", "efgh", "ijkl"])
    controller = RepeatedSamplingController(NativeGenerationController(), lambda q, a: False)
    result = answer(controller, worker, budget=Budget(calls=2))
    assert (result.output.text, told(result)["verified"]) == ("abcd", [False, False, None])
    with pytest.raises(BudgetExceeded):
        answer(controller, ScriptedWorker([Reply("x", delay=60)]), budget=Budget(seconds=0.1))


FIELDS = {
    "dtype": "float32",
    "kv_cache_config": {"max_tokens": 8192, "page_size": 4},
}
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "seed": 3, "max_tokens": 12}


def fussy(question, text):
    """A result that is a function of the text, and rare."""
    return sum(map(ord, text)) % 5 == 0


@pytest.mark.parametrize("concurrency", [1, "doubling"])
def test_engine_server_and_script_decide_the_same_on_the_same_samples(concurrency):
    def ask(worker, verifier=fussy):
        controller = RepeatedSamplingController(
            NativeGenerationController(), verifier, 16, concurrency
        )
        result = answer(controller, worker, "Hello world", sampling_params=SAMPLED)
        return result.output.text, told(result)

    llm = LLM(speaking(), **FIELDS)
    texts = []
    with EngineWorker(llm) as worker:
        ask(worker, lambda question, text: bool(texts.append(text)))
        here = ask(worker)
        with serving(EngineServer(worker.llm)) as server:
            client = AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)
            there = ask(OpenaiWorker(client, "m"))
    expect_empty(llm._frontend.engine)
    assert here[1]["accepted"]
    assert here[1]["index"] > 0
    if concurrency == 1:
        assert here == there == ask(ScriptedWorker(texts))
    else:
        assert here[0] == there[0]


def test_on_the_engine_the_prompt_is_prefilled_once_and_cancelled_samples_leave_no_page():
    llm = LLM(speaking(), **FIELDS)
    long = {**SAMPLED, "max_tokens": 400, "ignore_eos": True}
    prompt = "Hello world, how are you today? " * 4
    with EngineWorker(llm) as worker:
        num_prompt = len(worker.tokenizer(prompt).input_ids)
        controller = RepeatedSamplingController(
            NativeGenerationController(), lambda question, text: False, 8
        )
        before = worker.llm.stats
        answer(controller, worker, prompt, sampling_params=SAMPLED)
        prefilled = worker.llm.stats.prefilled - before.prefilled
        assert prefilled <= num_prompt + 7 * 4  # at most one page of each further sample
        short = RepeatedSamplingController(Shorter(), lambda question, text: len(text) < 60, 8, 8)
        before = worker.llm.stats
        result = answer(short, worker, prompt, sampling_params=long)
        assert told(result)["verified"].count(True) == 1
        assert worker.llm.stats.decoded - before.decoded < 8 * 400
    expect_empty(llm._frontend.engine)


class Shorter(NativeGenerationController):
    """Sample 5 is short, so that it ends while the others are under way."""

    def process(self, tasks, **kwargs):
        if tasks[0].seed == sampling.derived_seed(SAMPLED["seed"], 5):
            tasks[0].max_tokens = 3
        yield from super().process(tasks, **kwargs)


def test_the_output_holds_the_texts_of_the_samples_and_none_for_those_not_finished():
    result, _ = draw(["a", "b!", "c"], early_stop=False)
    assert result.output.candidates == ["a", "b!", "c"]
    result, _ = draw(["a", "b!", "c"])
    assert result.output.candidates == ["a", "b!", None]
