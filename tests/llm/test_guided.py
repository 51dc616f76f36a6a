"""Structured output: every output has the shape that was asked for, in any batch."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from contextlib import contextmanager

import pytest

from engines import expect_empty
from forethought.config.engine import GuidedDecodingConfig
from forethought.config.guided import GuidedDecodingParams
from forethought.config.sampling import SamplingParams
from forethought.errors import (
    EngineStopped,
    ParameterError,
    RequestError,
    RequestTimeout,
    UsageError,
)
from forethought.llm.async_llm import AsyncLLM
from forethought.llm.grammar import MAX_COMPILER_THREADS, MAX_COMPILERS, GrammarCompiler
from forethought.llm.llm import LLM
from forethought.llm.tokenizer import Tokenizer
from forethought.outputs import GRAMMAR_COMPLETE, FinishReason
from tokens import byte_level, speaking

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "tags", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PROMPTS = ["Hello world", "How are you?", "你好"]
SETTINGS = {"dtype": "float32", "kv_cache_config": {"max_tokens": 2048, "page_size": 4}}


FREE = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def params(shape: dict, **fields) -> SamplingParams:
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 120, **fields}
    return SamplingParams(guided_decoding=GuidedDecodingParams(**shape), **settings)


@pytest.fixture(scope="module")
def shared() -> LLM:
    return LLM(speaking("byte_level"), **SETTINGS)


@pytest.fixture
def llm(shared):
    yield shared
    shared._frontend.step()
    expect_empty(shared._frontend.engine)


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "tags", "ok"]
        and len(value["name"]) <= 8
        and all(tag in ("a", "b", 3) for tag in value["tags"])
        and isinstance(value["ok"], bool)
    )


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_a_random_model_under_a_schema_says_what_fits_it(llm, temperature):
    asked = params({"json": SCHEMA}, temperature=temperature, n=1 if temperature == 0.0 else 8)
    for completion in llm.generate(PROMPTS[0], asked).outputs:
        assert is_person(completion.text)
        assert completion.finish_reason is FinishReason.STOP
        assert completion.stop_reason == GRAMMAR_COMPLETE
        assert llm.tokenizer.decode(completion.token_ids) == completion.text


def test_any_object_is_valid_json_or_cut_by_the_length(llm):
    ended = 0
    for completion in llm.generate(PROMPTS[0], params({"json_object": True}, n=16)).outputs:
        if completion.finish_reason is FinishReason.STOP:
            assert isinstance(json.loads(completion.text), dict)
            ended += 1
        else:
            assert completion.finish_reason is FinishReason.LENGTH
            assert len(completion.token_ids) == 120
    assert ended >= 4


@pytest.mark.parametrize(
    ("shape", "pattern"),
    [
        ({"regex": r"[a-c]{3}-(yes|no)( [0-9]+)?"}, r"[a-c]{3}-(yes|no)( [0-9]+)?"),
        ({"choice": ["yes", "yesterday", "no"]}, r"yes|yesterday|no"),
        ({"grammar": 'start: item ("," item)~0..3\nitem: /[0-9]/ | "x"'}, r"([0-9x],){0,3}[0-9x]"),
        ({"grammar": 'root ::= "he" ("l" | "lo") "!"?'}, r"he(l|lo)!?"),
    ],
)
def test_a_random_model_says_what_the_pattern_matches(llm, shape, pattern):
    texts = [
        completion.text
        for completion in llm.generate(PROMPTS[1], params(shape, n=12)).outputs
        if completion.finish_reason is FinishReason.STOP
    ]
    assert len(set(texts)) > 1
    assert all(re.fullmatch(pattern, text) for text in texts)


def test_without_a_shape_the_same_model_says_something_else(llm):
    free = SamplingParams(temperature=1.0, seed=5, max_tokens=30)
    text = llm.generate(PROMPTS[0], free).outputs[0].text
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_the_distribution_within_the_shape_is_the_models_own_renormalised(llm):
    """Statistic: share of 'b' against 'a' in 600 draws; threshold: 4 standard deviations."""
    first = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, temperature=0.0, logprobs=64))
    raw = first.outputs[0].logprobs[0]
    likely = [t for t in raw if re.fullmatch(r"[!-~]", llm.tokenizer.decode([t]))][:2]
    texts = [llm.tokenizer.decode([token]) for token in likely]
    weights = [2.718281828 ** raw[token].logprob for token in likely]
    expected = weights[1] / sum(weights)
    draws = llm.generate(PROMPTS[0], params({"choice": texts}, n=600)).outputs
    share = sum(draw.text == texts[1] for draw in draws) / 600
    assert abs(share - expected) < 4 * (expected * (1 - expected) / 600) ** 0.5
    assert abs(share - (1 - expected)) > 4 * (expected * (1 - expected) / 600) ** 0.5


# --- where it ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_complete_shape_ends_the_generation_with_its_last_token_in_the_text(llm, ignore_eos):
    asked = params({"choice": ["hello!", "helps"]}, ignore_eos=ignore_eos)
    completion = llm.generate(PROMPTS[0], asked).outputs[0]
    assert completion.text in ("hello!", "helps")
    assert llm.tokenizer.decode(completion.token_ids) == completion.text
    assert (completion.finish_reason, completion.stop_reason) == ("stop", GRAMMAR_COMPLETE)


def test_a_model_without_end_of_sequence_ends_where_the_shape_does():
    with LLM(speaking("byte_level", eos_token_id=None), **SETTINGS) as endless:
        assert not endless._frontend.engine.runner.lm.eos_token_ids
        completion = endless.generate(PROMPTS[0], params({"json": SCHEMA})).outputs[0]
        assert is_person(completion.text)
        assert completion.finish_reason is FinishReason.STOP


def test_end_of_sequence_ends_it_where_the_shape_may_end(llm):
    asked = params({"regex": "a+"}, n=40)
    ends = [c for c in llm.generate(PROMPTS[0], asked).outputs if c.finish_reason == "stop"]
    assert ends
    for completion in ends:
        assert completion.stop_reason is None
        assert completion.token_ids[-1] == llm.tokenizer.eos_token_id
        assert re.fullmatch("a+", completion.text)


def test_ignore_eos_goes_on_as_long_as_the_shape_allows(llm):
    asked = params({"regex": "a{4,70}"}, ignore_eos=True, n=3)
    texts = [completion.text for completion in llm.generate(PROMPTS[0], asked).outputs]
    assert texts == ["a" * 70] * 3


def test_min_tokens_keeps_it_going_only_where_the_shape_can_go_on(llm):
    longer = llm.generate(PROMPTS[0], params({"regex": "a+"}, min_tokens=30, n=4)).outputs
    assert all(len(completion.token_ids) >= 30 for completion in longer)
    whole = llm.generate(PROMPTS[0], params({"choice": ["ab"]}, min_tokens=30)).outputs[0]
    assert (whole.text, whole.finish_reason) == ("ab", "stop")


def test_stop_strings_and_stop_tokens_still_end_it(llm):
    stop = llm.tokenizer.encode("b")[0]
    by_string = llm.generate(PROMPTS[0], params({"regex": "ab{50}"}, stop=["bbb"])).outputs[0]
    assert (by_string.text, by_string.stop_reason) == ("a", "bbb")
    by_token = llm.generate(PROMPTS[0], params({"regex": "ab{50}"}, stop_token_ids=[stop]))
    assert (by_token.outputs[0].text, by_token.outputs[0].stop_reason) == ("a", stop)


# --- batches -------------------------------------------------------------------------------------


def test_guided_and_free_requests_share_batches_and_do_not_notice(llm):
    asked = [
        params({"json": SCHEMA}),
        SamplingParams(temperature=1.0, seed=6, max_tokens=40, ignore_eos=True),
        params({"regex": "[a-z ]{10,30}"}, temperature=0.0, repetition_penalty=1.3),
        params({"choice": ["yes", "no"]}, n=2, logprobs=2),
    ]
    prompts = [*PROMPTS, PROMPTS[0]]
    alone = [llm.generate(p, a) for p, a in zip(prompts, asked, strict=True)]
    together = llm.generate(prompts, asked)
    for one, other in zip(alone, together, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        assert [c.text for c in one.outputs] == [c.text for c in other.outputs]


def test_preemption_does_not_change_what_is_said():
    asked = [params({"json": SCHEMA}, seed=seed) for seed in range(6)]
    roomy = LLM(speaking("byte_level"), **SETTINGS)
    expected = [roomy.generate(PROMPTS[0], each).outputs[0].token_ids for each in asked]
    tight = {**SETTINGS, "kv_cache_config": {"max_tokens": 120, "page_size": 4}}
    with LLM(speaking("byte_level"), **tight) as llm:
        found = llm.generate([PROMPTS[0]] * 6, asked)
        assert llm.stats.preemptions > 0
    shown = [output.outputs[0].token_ids for output in found]
    assert [s[: len(e)] for s, e in zip(shown, expected, strict=True)] == [
        e[: len(s)] for s, e in zip(shown, expected, strict=True)
    ]


# --- every way in --------------------------------------------------------------------------------


def test_streams_and_chats_keep_to_the_shape(llm):
    asked = params({"json": SCHEMA})
    *_, last = llm.stream(PROMPTS[0], asked)
    assert is_person(last.outputs[0].text)
    assert last.outputs[0] == llm.generate(PROMPTS[0], asked).outputs[0]
    chat = llm.chat([{"role": "user", "content": "Who?"}], asked)
    assert is_person(chat.outputs[0].text)


def test_a_session_keeps_to_the_shape_of_each_generation_and_its_forks_to_theirs(llm):
    with llm.start("The answer: ") as session:
        first = session.generate(params({"choice": ["yes!", "no!"]}))
        assert first.text in ("yes!", "no!")
        assert session.text.endswith(first.text)
        session.extend(" because ")
        with session.fork() as fork:
            assert re.fullmatch("[a-f]{5}", fork.generate(params({"regex": "[a-f]{5}"})).text)
        assert is_person(session.generate(params({"json": SCHEMA})).text)
        session.rewind(session.prompt_length)
        assert session.generate(SamplingParams(max_tokens=4, ignore_eos=True)).stop_reason is None


def test_a_fork_taken_in_mid_shape_begins_its_own(llm):
    with llm.start("x") as session:
        stream = session.stream(params({"json": SCHEMA}))
        for _ in range(4):
            next(stream)
        with session.fork() as fork:
            assert fork.generate(params({"choice": ["a", "b"]})).text in ("a", "b")
        *_, last = stream
        assert is_person(last.text)


def test_many_clients_keep_to_their_shapes():
    async def main() -> list[str]:
        async with AsyncLLM(speaking("byte_level"), **SETTINGS) as llm:
            session = llm.start("Who? ")
            outputs = await asyncio.gather(
                *[llm.generate(p, params({"json": SCHEMA}, seed=s)) for s, p in enumerate(PROMPTS)]
            )
            said = await session.generate(params({"json": SCHEMA}))
            with pytest.raises(ParameterError, match="Invalid type"):
                await anext(session.stream(params({"json": {"type": "persn"}})))
            await session.close()
            return [output.outputs[0].text for output in outputs] + [said.text]

    texts = asyncio.run(main())
    assert len(texts) == 4
    assert all(map(is_person, texts))


# --- what is refused -----------------------------------------------------------------------------


def test_a_bad_schema_is_refused_before_anything_runs(llm):
    bad, steps = params({"json": {"type": "objct"}}), llm.stats.steps
    for call in (llm.generate, llm.stream):
        with pytest.raises(ParameterError, match="Invalid type: objct"):
            call(PROMPTS[0], bad)
    with pytest.raises(ParameterError, match="prompt 1: invalid json"):
        llm.generate(PROMPTS[:2], [params({"choice": ["a"]}), bad])
    with llm.start("x") as session:
        for call in (session.generate, session.stream):
            with pytest.raises(ParameterError, match="Invalid type: objct"):
                call(bad)
    assert llm.stats.steps == steps


def test_the_engine_takes_a_shape_only_with_what_keeps_to_it(llm):
    with pytest.raises(ParameterError, match="belong together"):
        llm._frontend.engine.add([5, 6], params({"regex": "a"}))


def test_an_output_that_cannot_go_on_fails_alone(monkeypatch):
    import llguidance

    limits = llguidance.LLParserLimits
    with LLM(speaking("byte_level"), **SETTINGS) as llm:
        good = llm._frontend.submit(*llm._read(PROMPTS[0], params({"regex": "[ab]{60}"})))
        monkeypatch.setattr(
            llguidance, "LLParserLimits", lambda **kwargs: limits(step_lexer_fuel=200, **kwargs)
        )
        with pytest.raises(RequestError, match="cannot be kept to its grammar: lexer error"):
            llm.generate(PROMPTS[0], params({"json_object": True}))
        while not good.finished:
            llm._frontend.step()
        assert re.fullmatch("[ab]{60}", good.output().outputs[0].text)
        expect_empty(llm._frontend.engine)


# --- grammars that take long to compile ----------------------------------------------------------


class Slow:
    """A compiler that waits at each grammar until the test lets it go on."""

    def __init__(self, compiler, monkeypatch):
        self.entered, self.leave, self.compiled = threading.Semaphore(0), threading.Event(), []
        compile_ = compiler._compile

        def slow(shape, ignore_eos):
            self.compiled.append(shape)
            self.entered.release()
            assert self.leave.wait(60)
            return compile_(shape, ignore_eos)

        monkeypatch.setattr(compiler, "_compile", slow)


@contextmanager
def clients(monkeypatch, **limits):
    """An AsyncLLM with a compiler that stands still; it must leave nothing behind."""
    config = {"guided_decoding_config": limits} if limits else {}
    llm = LLM(speaking("byte_level"), **SETTINGS, **config)
    clients = AsyncLLM.over(llm)
    slow = Slow(llm._frontend.grammars, monkeypatch)
    try:
        yield clients, slow
    finally:
        slow.leave.set()
        clients.shutdown()
    expect_empty(llm._frontend.engine)
    llm.shutdown()


WORD = {"regex": "[a-z]{3} !"}


def test_an_event_loop_and_other_requests_go_on_while_a_grammar_is_compiled(monkeypatch):
    async def main(llm, slow):
        guided = asyncio.create_task(llm.generate(PROMPTS[0], params(WORD)))
        await asyncio.to_thread(slow.entered.acquire)
        assert (await llm.generate(PROMPTS[1], FREE)).finished
        assert not guided.done()
        slow.leave.set()
        assert re.fullmatch(WORD["regex"], (await guided).outputs[0].text)

    with clients(monkeypatch) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_a_shared_grammar_is_compiled_once_despite_cancelled_requests(
    monkeypatch,
):
    async def main(llm, slow):
        tasks = [asyncio.create_task(llm.generate(p, params(WORD))) for p in PROMPTS]
        await asyncio.to_thread(slow.entered.acquire)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        slow.leave.set()
        for output in await asyncio.gather(*tasks[1:]):
            assert re.fullmatch(WORD["regex"], output.outputs[0].text)
        assert len(slow.compiled) == 1

    with clients(monkeypatch) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_a_grammar_that_no_request_waits_for_any_more_is_not_compiled(monkeypatch):
    async def main(llm, slow):
        shapes = [{"regex": f"[a-z]{{{size}}}"} for size in range(2, 6)]
        tasks = [asyncio.create_task(llm.generate(PROMPTS[0], params(s))) for s in shapes]
        for _ in range(MAX_COMPILERS):
            await asyncio.to_thread(slow.entered.acquire)
        for task in tasks[MAX_COMPILERS:]:
            task.cancel()
        await asyncio.wait(tasks[MAX_COMPILERS:])
        slow.leave.set()
        await asyncio.gather(*tasks[:MAX_COMPILERS])
        assert len(slow.compiled) == MAX_COMPILERS

    with clients(monkeypatch) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_a_grammar_over_the_time_limit_serves_later_requests(monkeypatch):
    async def main(llm, slow):
        for _ in range(2):
            with pytest.raises(RequestTimeout, match=r"the regex .* was not compiled in time"):
                await llm.generate(PROMPTS[0], params(WORD))
        async with llm.start("Who?") as session:
            with pytest.raises(RequestTimeout, match=r"compile_timeout is 0\.05 seconds"):
                await session.generate(params(WORD))
            assert (await session.generate(FREE)).token_ids
        slow.leave.set()
        for thread in list(llm._frontend.grammars._compilers):
            await asyncio.to_thread(thread.join)
        output = await llm.generate(PROMPTS[0], params(WORD))
        assert re.fullmatch(WORD["regex"], output.outputs[0].text)
        assert len(slow.compiled) == 1

    with clients(monkeypatch, compile_timeout=0.05) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_compilers_that_are_over_their_time_leave_capacity_for_others_up_to_a_limit(monkeypatch):
    async def main(llm, slow):
        compiler, never = llm._frontend.grammars, [{"regex": f"{n}"} for n in range(20)]
        for shape in never[: MAX_COMPILER_THREADS - 1]:
            with pytest.raises(RequestTimeout):
                await llm.generate(PROMPTS[0], params(shape))
        assert len(compiler._compilers) == MAX_COMPILER_THREADS - 1
        stuck = asyncio.create_task(llm.generate(PROMPTS[0], params(never[-1])))
        await asyncio.to_thread(slow.entered.acquire)
        monkeypatch.setattr(compiler, "_config", GuidedDecodingConfig(compile_timeout=20))
        late = asyncio.create_task(llm.generate(PROMPTS[0], params(WORD)))
        with pytest.raises(RequestTimeout):
            await stuck
        assert len(compiler._compilers) == MAX_COMPILER_THREADS
        slow.leave.set()
        assert re.fullmatch(WORD["regex"], (await late).outputs[0].text)

    with clients(monkeypatch, compile_timeout=0.05) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_a_waiting_grammar_is_compiled_once_a_compiler_is_given_up(monkeypatch):
    async def main(llm, slow):
        shapes = [{"regex": f"[a-z]{{{size}}}"} for size in range(2, 2 + MAX_COMPILERS)]
        stuck = [asyncio.create_task(llm.generate(PROMPTS[0], params(s))) for s in shapes]
        for _ in shapes:
            await asyncio.to_thread(slow.entered.acquire)
        waiting = asyncio.create_task(llm.generate(PROMPTS[0], params(WORD)))
        while not llm._frontend.grammars._queue:
            await asyncio.sleep(0)
        assert len(slow.compiled) == MAX_COMPILERS
        stuck[0].cancel()
        await asyncio.to_thread(slow.entered.acquire)
        slow.leave.set()
        assert re.fullmatch(WORD["regex"], (await waiting).outputs[0].text)
        await asyncio.gather(*stuck[1:])

    with clients(monkeypatch) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_the_time_limit_holds_for_callers_that_wait_too(monkeypatch):
    limit = {"guided_decoding_config": {"compile_timeout": 0.05}}
    with LLM(speaking("byte_level"), **SETTINGS, **limit) as llm:
        slow = Slow(llm._frontend.grammars, monkeypatch)
        with llm.start("Who?") as session:
            for call in (llm.generate, llm.stream):
                with pytest.raises(RequestTimeout, match="not compiled in time"):
                    call(PROMPTS[0], params(WORD))
            with pytest.raises(RequestTimeout, match="not compiled in time"):
                session.generate(params(WORD))
        slow.leave.set()
        assert llm.generate(PROMPTS[0], FREE).finished
        expect_empty(llm._frontend.engine)


def test_a_session_whose_grammar_is_compiling_is_read_only(
    monkeypatch,
):
    async def main(llm, slow):
        session = llm.start("Who?")
        stream = session.stream(params(WORD))
        await asyncio.to_thread(slow.entered.acquire)
        assert (await stream.peek()).token_ids == []
        for change in (session.extend("x"), session.rewind(1), session.generate(FREE)):
            with pytest.raises(UsageError, match="a generation is in progress"):
                await change
        async with await session.fork() as fork:
            assert (await fork.generate(FREE)).token_ids
        await session.abort()
        assert (await stream.finish()).finish_reason is FinishReason.ABORT
        waiting = asyncio.create_task(session.generate(params(WORD)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await session.generate(FREE)).token_ids
        late = session.stream(params(WORD))
        await asyncio.sleep(0)
        await session.close()
        assert (await late.finish()).finish_reason is FinishReason.ABORT
        slow.leave.set()
        async with llm.start("Who?") as other:
            assert re.fullmatch(WORD["regex"], (await other.generate(params(WORD))).text)

    with clients(monkeypatch) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_a_loop_that_ends_while_a_grammar_is_compiled_leaves_the_session_usable(monkeypatch):
    with clients(monkeypatch) as (llm, slow):
        sessions = []

        async def ask():
            sessions.append(llm.start("Who?"))
            sessions[0].stream(params(WORD))
            await asyncio.to_thread(slow.entered.acquire)

        async def again():
            assert (await sessions[0].generate(FREE)).token_ids
            await sessions[0].close()

        asyncio.run(ask())
        asyncio.run(again())


def test_leaving_a_stream_whose_grammar_is_compiled_ends_it_and_frees_the_session(monkeypatch):
    async def main(llm, slow):
        async with asyncio.timeout(60), llm.start("Who?") as session:
            at_once = session.stream(params(WORD))
            at_once.leave()  # before its task has begun
            assert (await at_once.finish()).finish_reason is FinishReason.ABORT
            later = session.stream(params(WORD))
            await asyncio.to_thread(slow.entered.acquire)
            waiting = asyncio.create_task(later.finish())
            await asyncio.sleep(0)
            later.leave()
            assert (await waiting).finish_reason is FinishReason.ABORT
            later.leave()  # leaving twice is fine
            await session.extend("x")
            await session.rewind(2)
            assert (await session.generate(FREE)).token_ids

    with clients(monkeypatch) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_a_stream_that_is_left_when_the_engine_has_ended_says_so(monkeypatch):
    async def main(llm, slow):
        stream = llm.start("Who?").stream(params(WORD))
        await asyncio.to_thread(slow.entered.acquire)
        llm.shutdown()
        stream.leave()
        with pytest.raises(EngineStopped, match="shut down"):
            await asyncio.wait_for(stream.finish(), 60)

    with clients(monkeypatch) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_a_small_grammar_does_not_wait_for_all_large_ones_before_it(monkeypatch):
    large = [{"regex": f"[a-z]{{3}} !|{n}" + "x" * 500} for n in range(6)]

    async def main(llm, slow):
        tasks = [asyncio.create_task(llm.generate(PROMPTS[0], params(s))) for s in large]
        for _ in range(MAX_COMPILERS):
            await asyncio.to_thread(slow.entered.acquire)
        tasks.append(asyncio.create_task(llm.generate(PROMPTS[0], params(WORD))))
        while len(llm._frontend.grammars._queue) < 5:
            await asyncio.sleep(0)
        slow.leave.set()
        await asyncio.gather(*tasks)
        order = [shape.regex for shape in slow.compiled]
        assert order.index(WORD["regex"]) <= MAX_COMPILERS + 1
        assert order.index(large[2]["regex"]) <= MAX_COMPILERS + 1, "the oldest comes by turns"

    with clients(monkeypatch) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_a_tenant_with_many_grammars_does_not_hold_up_another(monkeypatch):
    own = [{"regex": f"[a-z]{{3}} !|{n}"} for n in range(6)]
    other = params({"regex": "[a-z]{3} !|" + "y" * 900}, cache_salt="other")

    async def main(llm, slow):
        tasks = [asyncio.create_task(llm.generate(PROMPTS[0], params(s))) for s in own]
        for _ in range(MAX_COMPILERS):
            await asyncio.to_thread(slow.entered.acquire)
        tasks.append(asyncio.create_task(llm.generate(PROMPTS[0], other)))
        while len(llm._frontend.grammars._queue) < 5:
            await asyncio.sleep(0)
        slow.leave.set()
        await asyncio.gather(*tasks)
        order = [shape.regex for shape in slow.compiled]
        assert order.index(other.guided_decoding.regex) <= MAX_COMPILERS

    with clients(monkeypatch) as (llm, slow):
        asyncio.run(main(llm, slow))


def test_large_grammars_push_out_older_ones_from_the_cache(monkeypatch):
    monkeypatch.setattr("forethought.llm.grammar.COMPILED_BYTES", 1000)
    with LLM(speaking("byte_level"), **SETTINGS) as llm:
        for letter in "abc":
            shape = params({"regex": f"{letter}{{3}} !|" + letter * 600})
            assert llm.generate(PROMPTS[0], shape).finished
            assert llm._frontend.grammars.find(shape) is not None
        assert len(llm._frontend.grammars._compilations) == 1


def test_masks_over_a_large_vocabulary_may_look_at_more():
    tokenizer = Tokenizer(byte_level())
    compilers = [GrammarCompiler(tokenizer, size, frozenset()) for size in (300, 1 << 17)]
    assert [compiler._max_step_items for compiler in compilers] == [10_000, 50_000]


@pytest.mark.parametrize("num_parts", [1_500, 3_000, 6_000])
def test_a_grammar_whose_masks_would_take_long_is_refused(num_parts):
    parts = " ".join(['("a"|"b")*'] * num_parts)
    with (
        LLM(speaking("byte_level"), **SETTINGS) as llm,
        pytest.raises(ParameterError, match=r"item|processor time"),
    ):
        llm.generate(PROMPTS[0], params({"grammar": f"start: {parts}"}))
