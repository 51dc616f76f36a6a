"""Methods on thinking budgets: budget forcing, NoThinking and the vote with a token budget.

Their decisions are worked out by hand for scripted answers; the same script behind an HTTP server
leads to the same ones; and on the engine they keep to their limits and prefill nothing twice.
"""

from __future__ import annotations

import random

import pytest
from openai import AsyncOpenAI

from engines import expect_empty
from forethought import LLM, methods
from forethought.errors import ParameterError, TaskError
from forethought.methods.no_thinking import FINISHED
from forethought.methods.stack import stack
from forethought.outputs import ThinkingOutput, ThoughtEnd
from forethought.scaffolding import (
    EngineWorker,
    NativeRewardController,
    OpenaiWorker,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
)
from openai_server import serving
from scripted import answer
from tokens import thinking

PROMPT = "p<think>"
THOUGHTS = {
    PROMPT: "3+4=8</think>",
    f"{PROMPT}3+4=8</think>": "8.",
    f"{PROMPT}3+4=8Wait": ", it is 7</think>",
    f"{PROMPT}3+4=8Wait, it is 7</think>": "7.",
    f"{PROMPT}3+4=8Wait, it is 7Wait": "!</think>",
    f"{PROMPT}3+4=8Wait, it is 7Wait!</think>": "still 7.",
}


def says(prompt: str, index: int = 0) -> str:
    """What the script goes on with, wherever a part of it ends."""
    for known, text in sorted(THOUGHTS.items(), key=lambda item: -len(item[0])):
        if prompt.startswith(known) and text.startswith(prompt[len(known) :]):
            return text[len(prompt) - len(known) :]
    assert "</think>" in prompt, prompt
    return "cut."


def force(worker=None, params=None, **settings):
    controller = methods.create("budget_forcing", **settings)
    return answer(controller, worker or ScriptedWorker(says), PROMPT, sampling_params=params)


# ---- budget forcing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text", "waits"),
    [
        ({"num_waits": 0}, "3+4=8</think>8.", 0),
        ({}, "3+4=8Wait, it is 7</think>7.", 1),
        ({"num_waits": 2}, "3+4=8Wait, it is 7Wait!</think>still 7.", 2),
        ({"num_waits": 0, "min_thinking_tokens": 6}, "3+4=8Wait, it is 7</think>7.", 1),
        ({"num_waits": 0, "min_thinking_tokens": 5}, "3+4=8</think>8.", 0),
    ],
)
def test_wait_takes_the_place_of_an_early_end_and_the_thought_goes_on(settings, text, waits):
    worker = ScriptedWorker(says)
    output = force(worker, **settings).output
    assert output.text == text
    assert output.token_ids == [*map(ord, text)]
    told = output.meta["budget_forcing"]
    assert (told["waits"], told["end"]) == (waits, ThoughtEnd.NATURAL)
    assert len(worker.calls) == waits + 2
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


@pytest.mark.parametrize(
    ("budget", "thought"),
    [(1, "3"), (4, "3+4="), (6, "3+4=8Wait,"), (9, "3+4=8Wait, it")],
)
def test_a_thought_is_ended_at_its_budget_over_all_its_parts(budget, thought):
    result = force(thinking_budget=budget, num_waits=2, answer_prefix="Final:")
    assert result.output.text == f"{thought}</think>Final:cut."
    assert result.output.thinking == ThinkingOutput(budget, ThoughtEnd.BUDGET)
    assert result.usage.completion_tokens == budget + len("cut.")


def test_the_answer_gets_what_the_thought_has_left_of_max_tokens():
    output = force(params={"max_tokens": 6}, num_waits=0).output
    assert (output.text, output.finish_reason) == ("3+4=8</think>8", "length")
    output = force(params={"max_tokens": 4}, num_waits=0).output
    assert (output.text, output.finish_reason) == ("3+4=", "length")
    output = force(params={"max_tokens": 5}, num_waits=3).output
    assert (output.text, output.finish_reason) == ("3+4=8", "length")
    output = force(params={"max_tokens": 4}, thinking_budget=4).output
    assert (output.text, output.thinking) == ("3+4=", ThinkingOutput(4, None))


def test_a_model_that_adds_nothing_is_not_asked_for_ever():
    worker = ScriptedWorker(lambda prompt, index: "</think>" if "</" not in prompt else "so")
    controller = methods.create("budget_forcing", num_waits=3, min_thinking_tokens=1000)
    output = answer(controller, worker, PROMPT).output
    assert output.text == "WaitWaitWait</think>so"


def test_a_stop_string_or_an_end_in_the_thought_ends_the_output():
    output = force(params={"stop": ["=8"]}).output
    assert (output.text, output.stop_reason) == ("3+4", "=8")
    output = answer(methods.create("budget_forcing"), ScriptedWorker(["no thought"]), "p").output
    assert (output.text, output.thinking) == ("no thought", ThinkingOutput(10, None))


def test_a_vote_over_forced_thoughts_draws_its_samples_apart():
    controller = stack("budget_forcing+majority_vote", default_sample_num=3, early_stop=False)
    worker = ScriptedWorker(says)
    result = answer(controller, worker, PROMPT, sampling_params={"seed": 1})
    assert result.output.text == "3+4=8Wait, it is 7</think>7."
    assert len({call.task.seed for call in worker.calls}) == 3


def test_the_inserted_words_are_streamed_in_their_places():
    controller = methods.create("budget_forcing", streaming=True)
    workers = dict.fromkeys(methods.worker_tags(controller), ScriptedWorker(says))
    with ScaffoldingLlm(controller, workers) as llm:
        result = llm.generate_async(PROMPT)
        pieces = [event.output.text for event in result.events()]
    assert "".join(pieces) == "3+4=8Wait, it is 7</think>7."


# ---- NoThinking ----------------------------------------------------------------------------------


def test_a_finished_thought_stands_in_the_place_of_the_thought():
    worker = ScriptedWorker(lambda prompt, index: "I think a lot.</think>so 5")
    output = answer(methods.create("no_thinking"), worker, PROMPT).output
    assert output.text == f"{FINISHED}so 5"
    assert output.thinking == ThinkingOutput(0, ThoughtEnd.BUDGET)
    plain = answer(methods.create("plain"), worker, PROMPT).output
    assert plain.text == "I think a lot.</think>so 5"


@pytest.mark.parametrize("spec", ["no_thinking+majority_vote", "majority_vote+no_thinking"])
def test_the_most_frequent_answer_without_a_thought_wins(spec):
    answers = ["1", "2", "2", "3", "2"]
    worker = ScriptedWorker(lambda p, index: rf"hmm</think>\boxed{{{answers[index]}}}")
    controller = stack(spec, default_sample_num=5, thinking_end="</think>")
    output = answer(controller, worker, PROMPT).output
    assert output.text == r"</think>\boxed{2}"
    assert all(call.task.thinking_budget == 0 for call in worker.calls)


def test_the_best_answer_without_a_thought_is_chosen_by_a_judge():
    worker = ScriptedWorker(
        lambda p, index: f"hmm</think>{index}", score=lambda question, said: float(said[-1] == "2")
    )
    controller = stack("no_thinking+best_of_n", reward_controller=NativeRewardController())
    assert answer(controller, worker, PROMPT).output.text == f"{FINISHED}2"


def test_a_limit_of_a_thought_that_is_not_to_be_is_refused():
    controller = methods.create("no_thinking")
    with pytest.raises(ParameterError, match="no_thinking cannot honour thinking_budget"):
        answer(controller, ScriptedWorker(says), PROMPT, sampling_params={"thinking_budget": 5})


# ---- the vote with a token budget ----------------------------------------------------------------


def budgeted(lengths, delays=None, **settings):
    """Votes among samples whose thoughts have these lengths and whose answers are their numbers
    modulo 3; returns the result and the worker."""

    def script(prompt, index):
        text = "x" * lengths[index] + rf"</think>\boxed{{{index % 3}}}"
        return Reply(text, delay=0.0 if delays is None else delays[index])

    worker = ScriptedWorker(script)
    fields = {"total_tokens": 200, "default_sample_num": 4, "answer_tokens": 20, **settings}
    return answer(methods.create("budget_vote", **fields), worker, PROMPT), worker


ANSWER = len(r"</think>\boxed{0}")  # 17 characters, each a token


def test_each_sample_has_an_equal_share_and_closes_its_thought_in_time_to_answer():
    result, worker = budgeted([100] * 4)
    for call in worker.calls:
        assert (call.task.max_tokens, call.task.thinking_budget) == (50, 30)
    assert result.usage.completion_tokens == 4 * (30 + ANSWER)
    assert result.output.text == "x" * 30 + r"</think>\boxed{0}"
    told = result.output.meta["budget_vote"]
    assert told.items() >= {"answer": "0", "samples": 4, "tokens": 188, "num_voters": 4}.items()


def test_the_most_frequent_answer_within_the_budget_wins():
    thoughts = ["x" * length for length in (3, 5, 4, 60)]
    says = [rf"{said}</think>\boxed{{{n}}}" for said, n in zip(thoughts, (8, 7, 7, 8), strict=True)]
    fields = {"total_tokens": 200, "default_sample_num": 4, "answer_tokens": None}
    controller = methods.create("budget_vote", max_sample_num=4, **fields)
    output = answer(controller, ScriptedWorker(says), PROMPT).output
    # the share is 50, so the fourth sample has no answer, and it is 2 against 1
    assert output.text == r"xxxxx</think>\boxed{7}"
    assert output.meta["budget_vote"]["answer"] == "7"


def test_what_samples_leave_of_their_shares_pays_for_more_of_them():
    """Four samples of 10 + 17 tokens leave 92 of 200: two more of 27 leave 38, no whole share."""
    result, worker = budgeted([10] * 9)
    assert len(worker.calls) == 6
    told = result.output.meta["budget_vote"]
    assert (told["samples"], told["tokens"]) == (6, 6 * 27)
    assert told["answer"] == "0"


def test_no_thought_is_closed_without_tokens_kept_for_the_answer():
    result, worker = budgeted([100] * 4, answer_tokens=None)
    assert worker.calls[0].task.thinking_budget is None
    told = result.output.meta["budget_vote"]
    assert told.items() >= {"answer": None, "samples": 4, "tokens": 200, "num_voters": 0}.items()
    assert "no sample has an answer" in told["warning"]
    assert (result.output.text, result.output.finish_reason) == ("x" * 50, "length")


def test_samples_do_not_depend_on_the_order_in_which_they_end():
    generator = random.Random(4)
    lengths = [generator.randrange(60) for _ in range(70)]
    expected = None
    for seed in range(6):
        delays = [generator.random() / 40 for _ in lengths] if seed else None
        result, worker = budgeted(lengths, delays, total_tokens=400, default_sample_num=8)
        told = result.output.meta["budget_vote"]
        assert told["tokens"] == result.usage.completion_tokens <= 400
        used = [min(length, 30) + ANSWER for length in lengths]
        first = next(k for k in range(70) if 400 - sum(used[:k]) < 50)
        assert told["samples"] == len(worker.calls) == first
        expected = expected or (result.output.text, told)
        assert (result.output.text, told) == expected


def test_more_samples_than_allowed_are_not_drawn():
    result, _ = budgeted([0] * 9, max_sample_num=5)
    assert result.output.meta["budget_vote"]["samples"] == 5


@pytest.mark.parametrize(
    ("settings", "params", "says"),
    [
        ({"total_tokens": 80}, {}, "nothing to think with"),
        ({}, {"max_tokens": 9}, "cannot honour max_tokens"),
        ({}, {"thinking_budget": 9}, "cannot honour thinking_budget"),
    ],
)
def test_a_share_or_a_limit_that_cannot_be_is_refused(settings, params, says):
    fields = {"total_tokens": 200, "default_sample_num": 4, "answer_tokens": 20, **settings}
    controller = methods.create("budget_vote", **fields)
    with pytest.raises(ParameterError, match=says):
        answer(controller, ScriptedWorker(["x"] * 9), PROMPT, sampling_params=params)


def test_a_sample_that_fails_fails_the_vote_and_leaves_nothing_under_way():
    def script(prompt, index):
        return Reply("x" * 40, error=OSError("gone") if index == 2 else None, delay=index / 100)

    worker = ScriptedWorker(script)
    controller = methods.create("budget_vote", total_tokens=400, default_sample_num=4)
    with pytest.raises(TaskError, match="gone"):
        answer(controller, worker, PROMPT)
    assert all(call.ended is not None for call in worker.calls)


# ---- the same on a server, and on the engine -----------------------------------------------------


class Client(OpenaiWorker):
    """A worker for the server, with a client that it closes."""

    def __init__(self, server):
        super().__init__(AsyncOpenAI(base_url=server.url, api_key="none", timeout=60), "tiny")

    async def async_shutdown(self):
        await super().async_shutdown()
        await self.async_client.close()


def on_server(script, controller, **options):
    """The result over HTTP: a piece per character, up to the first stop string."""
    with serving() as server:

        def pieces(body):
            text = script(body["prompt"])
            server.extra_choice = {"stop_reason": None}
            for stop in body.get("stop") or ():
                if stop in text[: body.get("max_tokens", 10**9) + len(stop)]:
                    server.extra_choice = {"stop_reason": stop}
                    return [*text.partition(stop)[0]]
            return [*text]

        server.says = pieces
        worker = Client(server)
        result = answer(controller, worker, PROMPT, **options)
        return result, server.requests


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_waits": 2}, {"thinking_budget": 4}, {"thinking_budget": 9, "num_waits": 2}],
)
def test_budget_forcing_decides_the_same_on_a_server(settings):
    controller = methods.create("budget_forcing", **settings)
    expected = force(**settings).output
    result, requests = on_server(says, controller)
    assert result.output.text == expected.text
    assert result.output.meta == expected.meta
    assert result.output.thinking == expected.thinking
    assert len(requests) == 2 + expected.meta["budget_forcing"]["waits"]


def test_no_thinking_is_a_closed_prompt_on_a_server():
    result, requests = on_server(lambda prompt: "so 5", methods.create("no_thinking"))
    assert [request["prompt"] for request in requests] == [PROMPT + FINISHED]
    assert result.output.text == f"{FINISHED}so 5"


def test_a_budget_vote_keeps_to_its_total_on_a_server():
    def script(prompt):
        return r"so \boxed{5}" if "</think>" in prompt else "x" * 100

    controller = methods.create(
        "budget_vote", total_tokens=200, default_sample_num=4, answer_tokens=20
    )
    result, requests = on_server(script, controller)
    assert result.output.meta["budget_vote"]["answer"] == "5"
    assert result.usage.completion_tokens <= 200
    assert requests[0]["max_tokens"] == 30


@pytest.fixture(scope="module")
def engine_worker():
    fields = {"kv_cache_config": {"max_tokens": 4096, "page_size": 4}, "dtype": "float32"}
    llm = LLM(thinking(), **fields)
    with EngineWorker(llm) as worker:
        yield worker
        expect_empty(llm._frontend.engine)


SAMPLED = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 80}


def test_budget_forcing_continues_its_sequence_on_the_engine(engine_worker):
    tokenizer = engine_worker.tokenizer
    end = tokenizer.convert_tokens_to_ids("</think>")
    params = {**SAMPLED, "logit_bias": {end: 100.0}}  # it ends every part at once
    controller = methods.create("budget_forcing", num_waits=2, thinking_budget=40)
    before = engine_worker.llm.stats.prefilled
    output = answer(controller, engine_worker, PROMPT, sampling_params=params).output
    prefilled = engine_worker.llm.stats.prefilled - before
    told = output.meta["budget_forcing"]
    assert told["waits"] == 2
    assert output.text.count("Wait") == 2
    assert output.text.startswith("WaitWait</think>")
    assert told["thinking_tokens"] == 3
    inserted = 2 * len(tokenizer("Wait").input_ids) + 1
    assert prefilled <= len(tokenizer(PROMPT).input_ids) + inserted + 2 * 3  # and last tokens
    cut = methods.create("budget_forcing", num_waits=5, thinking_budget=7)
    quiet = {**SAMPLED, "logit_bias": {end: -100.0}}
    forced = answer(cut, engine_worker, PROMPT, sampling_params=quiet).output
    assert forced.token_ids[7] == end
    assert forced.thinking == ThinkingOutput(7, ThoughtEnd.BUDGET)


def test_no_thinking_and_a_vote_prefill_the_prompt_once_on_the_engine(engine_worker):
    controller = stack("no_thinking+majority_vote", default_sample_num=4, early_stop=False)
    before = engine_worker.llm.stats
    output = answer(controller, engine_worker, PROMPT, sampling_params=SAMPLED).output
    after = engine_worker.llm.stats
    assert output.text.startswith(FINISHED)
    assert output.thinking == ThinkingOutput(0, ThoughtEnd.BUDGET)
    prompt = len(engine_worker.tokenizer(PROMPT).input_ids)
    assert after.prefilled - before.prefilled <= prompt + 3  # the last token once more per fork
    assert after.decoded - before.decoded == 4 * SAMPLED["max_tokens"]


def test_a_budget_vote_never_takes_more_than_its_total_on_the_engine(engine_worker):
    params = {name: SAMPLED[name] for name in ("temperature", "seed", "ignore_eos")}
    end = engine_worker.tokenizer.convert_tokens_to_ids("</think>")
    controller = methods.create(
        "budget_vote", total_tokens=300, default_sample_num=6, answer_tokens=20
    )
    before = engine_worker.llm.stats.decoded
    output = answer(
        controller,
        engine_worker,
        PROMPT,
        sampling_params={**params, "stop": ["</think>"], "logit_bias": {end: 1.0}},
    ).output
    decoded = engine_worker.llm.stats.decoded - before
    assert output.meta["budget_vote"]["tokens"] == decoded <= 300
    assert output.meta["budget_vote"]["samples"] > 6
    assert output.thinking.num_tokens <= 30
