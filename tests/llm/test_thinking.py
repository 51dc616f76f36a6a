"""Thinking budgets: where a thought is closed, and that nothing else changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engines import expect_empty
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.llm.async_llm import AsyncLLM
from forethought.llm.llm import LLM
from forethought.llm.thinking import BOUNDARY, ThinkingConstraint, ThinkingRule
from forethought.model.sampling.distribution import unpack
from forethought.outputs import GRAMMAR_COMPLETE, FinishReason, ThinkingOutput, ThoughtEnd
from tokens import speaking, thinking
from turns import by_turns

SETTINGS = {"dtype": "float32", "kv_cache_config": {"max_tokens": 4096, "page_size": 4}}
QUESTION = [{"role": "user", "content": "Hello world"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module", params=[True, False], ids=["one token", "several tokens"])
def shared(request):
    with LLM(thinking(request.param), **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    yield shared
    shared._frontend.step()
    expect_empty(shared._frontend.engine)


@pytest.fixture(scope="module")
def single():
    with LLM(thinking(), **SETTINGS) as llm:
        yield llm


def closing(llm: LLM, text: str = "</think>\n\n") -> list[int]:
    return llm._frontend.tokenizer.encode_more(text)


def quiet(llm: LLM, params: SamplingParams) -> SamplingParams:
    """Markers are improbable, so that a thought goes on as long as it may."""
    marks = {ids[0] for text in ("<think>", "</think>", "<", "</") if (ids := closing(llm, text))}
    return params.replace(logit_bias=dict.fromkeys(marks, -100.0))


# ---- the cap -------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [0, 1, 2, 7, 30])
def test_a_thought_is_unchanged_until_it_is_closed_at_its_cap(llm, params, budget):
    params, prompt, end = quiet(llm, params), llm.chat_prompt(QUESTION), closing(llm)
    free = llm.generate(prompt, params).outputs[0]
    output = llm.generate(prompt, params.replace(thinking_budget=budget)).outputs[0]
    assert output.token_ids[:budget] == free.token_ids[:budget]
    assert output.token_ids[budget : budget + len(end)] == end
    assert output.thinking == ThinkingOutput(budget, ThoughtEnd.BUDGET)
    assert len(output.token_ids) == params.max_tokens
    # What follows is drawn as behind a prompt that ends with the closing text.
    if params.greedy:
        written = [*prompt, *output.token_ids[: budget + len(end)]]
        rest = llm.generate(written, params).outputs[0].token_ids
        assert output.token_ids[budget + len(end) :] == rest[: 60 - budget - len(end)]


def test_a_budget_that_is_not_reached_changes_no_token(llm):
    params, prompt = quiet(llm, SAMPLED), llm.chat_prompt(QUESTION)
    free = llm.generate(prompt, params).outputs[0]
    output = llm.generate(prompt, params.replace(thinking_budget=61)).outputs[0]
    assert output.token_ids == free.token_ids
    assert output.thinking == ThinkingOutput(60, None)
    assert free.thinking is None


def test_a_thought_that_the_model_closes_itself_goes_on_as_without_a_budget(llm):
    prompt = [*llm.chat_prompt(QUESTION), *closing(llm, "Well.")]
    begun = len(closing(llm, "Well."))
    marker = closing(llm, "</think>")
    bias = dict.fromkeys(marker, 20.0)
    params = SAMPLED.replace(logit_bias=bias, frequency_penalty=20.0)
    free = llm.generate(prompt, params).outputs[0]
    if len(marker) == 1:
        at = free.token_ids.index(marker[0])
        output = llm.generate(prompt, params.replace(thinking_budget=50)).outputs[0]
        assert output.token_ids == free.token_ids
        assert output.thinking == ThinkingOutput(begun + at, ThoughtEnd.NATURAL)


def test_the_closing_text_is_the_one_that_was_asked_for(llm):
    text = "\n\nI must answer now.\n</think>\n"
    for end in (text, closing(llm, text)):
        params = GREEDY.replace(thinking_budget=4, thinking_end=end)
        output = llm.generate(llm.chat_prompt(QUESTION), params).outputs[0]
        assert output.token_ids[4 : 4 + len(closing(llm, text))] == closing(llm, text)
        assert text in output.text


def test_no_penalty_bias_or_stop_condition_keeps_the_closing_text_from_being_written(llm):
    end = closing(llm)
    against = GREEDY.replace(
        thinking_budget=3,
        logit_bias=dict.fromkeys(end, -100.0),
        frequency_penalty=100.0,
        repetition_penalty=50.0,
        top_k=1,
        min_tokens=50,
    )
    output = llm.generate(llm.chat_prompt(QUESTION), against).outputs[0]
    assert output.token_ids[3 : 3 + len(end)] == end


def test_a_stop_string_in_the_closing_text_ends_the_generation_there(llm):
    params = GREEDY.replace(thinking_budget=5, stop=("</think>",))
    output = llm.generate(llm.chat_prompt(QUESTION), params).outputs[0]
    assert output.stop_reason == "</think>"
    assert "</think>" not in output.text
    assert output.thinking == ThinkingOutput(5, ThoughtEnd.BUDGET)


def test_forced_tokens_have_the_models_log_probabilities_and_count_as_generated(llm):
    prompt, end = llm.chat_prompt(QUESTION), closing(llm)
    params = GREEDY.replace(thinking_budget=5, logprobs=0, max_tokens=5 + len(end))
    result = llm.generate(prompt, params)
    output = result.outputs[0]
    assert result.usage.completion_tokens == result.usage.decoded == 5 + len(end)
    scored = llm.generate([*prompt, *output.token_ids], GREEDY.replace(prompt_logprobs=0))
    for entries, there in zip(output.logprobs, scored.prompt_logprobs[len(prompt) :], strict=True):
        [(token, entry)] = entries.items()
        assert entry.logprob == pytest.approx(there[token].logprob, abs=1e-4)


# ---- where a thought begins ----------------------------------------------------------------------


def test_a_thought_that_the_model_opens_itself_has_the_same_cap(single):
    start = closing(single, "<think>")
    for written in ([*start], [*start, *closing(single, "\n")]):
        prompt = closing(single, "Hello world")
        follow = closing(single, "\n") if len(written) > 1 else []
        # Bias alone would open thought after thought: the second has no budget left.
        params = GREEDY.replace(thinking_budget=6, logit_bias={start[0]: 100.0})
        output = single.generate(prompt, params).outputs[0]
        assert output.token_ids[0] == start[0]
        assert output.token_ids[7 : 7 + len(closing(single))] == closing(single)
        assert output.thinking.num_tokens == 6
        inside = single.generate([*prompt, *start, *follow], GREEDY.replace(thinking_budget=6))
        assert inside.outputs[0].token_ids[6 : 6 + len(closing(single))] == closing(single)
    again = single.generate(closing(single, "Hello"), params).outputs[0]
    assert again.token_ids.count(start[0]) > 1
    assert again.thinking.num_tokens == 6


@pytest.mark.parametrize(
    ("thought", "behind"),
    [("\n\n", ""), ("\n\n", "\n\n"), ("\n\n", "\n\nThe answer"), ("I see it all.", "The answer")],
)
def test_a_prompt_with_a_closed_thought_has_no_budget_to_enforce(llm, thought, behind):
    """Be it longer than the budget, and be it closed otherwise than a budget closes it."""
    text = f"Hello<think>{thought}</think>{behind}"
    params = quiet(llm, GREEDY)
    free = llm.generate(text, params).outputs[0].token_ids
    output = llm.generate(text, params.replace(thinking_budget=2)).outputs[0]
    assert output.token_ids == free
    assert output.thinking == ThinkingOutput(0, None)


def test_an_end_of_sequence_in_the_prompt_closes_the_thought_of_an_earlier_turn(single):
    prompt = closing(single, "<think>Hello</s>world")
    free = single.generate(prompt, GREEDY).outputs[0].token_ids
    assert single.generate(prompt, GREEDY.replace(thinking_budget=2)).outputs[0].token_ids == free


def test_tokens_of_thought_in_the_prompt_count(llm):
    prompt = [*llm.chat_prompt(QUESTION), *closing(llm, "I see.")]
    written = len(closing(llm, "I see."))
    for budget in (0, 1, written, written + 4):
        output = llm.generate(prompt, GREEDY.replace(thinking_budget=budget)).outputs[0]
        left = max(0, budget - written)
        assert output.token_ids[left : left + len(closing(llm))] == closing(llm)
        assert output.thinking.num_tokens == max(budget, written)


# ---- the soft limit ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "closes"),
    [
        ("so be it.", True),
        ("so be it. ", True),
        ('he said "no."', True),
        ("(it was so.)", True),
        ("really?", True),
        ("好。", True),
        ("so\n", True),
        ("7\n", True),
        ("x = 3.", False),
        ("1.", False),
        ("so", False),
        ("so be it. An", False),
        ("", False),
    ],
)
def test_lines_and_sentences_are_natural_boundaries_and_decimal_points_are_not(text, closes):
    assert bool(BOUNDARY.search(text)) == closes


def test_a_soft_limit_closes_the_thought_at_the_next_boundary_and_not_before(single):
    prompt, newline = single.chat_prompt(QUESTION), closing(single, "\n")
    params = SAMPLED.replace(logit_bias={newline[0]: 4.0}, max_tokens=100)
    free = single.generate(prompt, params).outputs[0].token_ids
    tokenizer = single._frontend.tokenizer
    for soft in (1, 5, 12):
        output = single.generate(prompt, params.replace(thinking_soft=soft)).outputs[0]
        ends = (
            size
            for size in range(soft, 100)
            if BOUNDARY.search("".join(map(tokenizer.piece, [*newline, *free[:size]])))
        )
        size = next(ends)
        assert output.token_ids[:size] == free[:size]
        assert output.token_ids[size : size + len(closing(single))] == closing(single)
        assert output.thinking == ThinkingOutput(size, ThoughtEnd.SOFT)


def test_the_cap_holds_where_no_boundary_comes(single):
    newline = closing(single, "\n")[0]
    never = {newline: -100.0} | {closing(single, mark)[0]: -100.0 for mark in ".!?"}
    params = GREEDY.replace(thinking_soft=4, thinking_budget=9, logit_bias=never)
    output = single.generate(single.chat_prompt(QUESTION), params).outputs[0]
    assert output.thinking == ThinkingOutput(9, ThoughtEnd.BUDGET)


# ---- the state is a function of the tokens -------------------------------------------------------

PIECES = ["a", ".", "\n", " ", "<think>", "</think>", "now", "</", "think", ">", "<", "", "</s>"]
EOS = 12


def rule(budget: int | None, soft: int | None, end: Sequence[int] = (6, 5, 2)) -> ThinkingRule:
    return ThinkingRule(
        "<think>",
        "</think>",
        tuple(end),
        budget,
        soft,
        PIECES.__getitem__,
        None,
        frozenset({EOS}),
        len(PIECES),
    )


def allowed(constraint: ThinkingConstraint, output: Sequence[int]) -> list[int]:
    mask = constraint.mask(output)
    return [*range(len(PIECES))] if mask is None else [*np.flatnonzero(unpack(mask, len(PIECES)))]


ids = st.integers(0, len(PIECES) - 1)


@given(
    st.lists(ids, max_size=8),
    st.lists(st.tuples(st.lists(ids, max_size=40), st.integers(0, 40)), min_size=1, max_size=6),
    st.none() | st.integers(0, 6),
    st.none() | st.integers(0, 4),
)
@hypothesis_settings(max_examples=300, deadline=None)
def test_progress_depends_on_the_tokens_alone_wherever_the_prompt_ends(
    prompt, queries, budget, soft
):
    """Also on no earlier query, in any order."""
    asked = rule(budget, soft)
    [constraint] = asked.samples([4, *prompt], [None])
    for tokens, size in queries:
        output = tokens[:size]
        [fresh] = asked.samples([4, *prompt], [None])
        assert constraint.progress(output) == fresh.progress(output)
        written = "".join(map(asked.piece, (*prompt, *output)))
        if asked.start in written or not {4, 5, EOS}.isdisjoint((*prompt, *output)):
            continue  # of a prompt, only the thought that its last marker opens is known
        [moved] = asked.samples([4, *prompt, *output], [None])
        if fresh.progress(output).thinking:
            assert moved.progress([]) == fresh.progress(output)


@given(st.integers(0, 6), st.none() | st.integers(0, 4), st.data())
@hypothesis_settings(max_examples=200, deadline=None)
def test_whatever_is_drawn_the_thoughts_of_one_output_keep_to_the_cap(budget, soft, data):
    [constraint] = rule(budget, None if soft is None else min(soft, budget)).samples([0, 4], [None])
    output: list[int] = []
    for _ in range(30):
        choices = allowed(constraint, output)
        output.append(data.draw(st.sampled_from(choices)))
        assert constraint.output(output).num_tokens <= budget


def test_states_far_back_are_found_again():
    [constraint] = rule(5000, None).samples([4], [None])
    output = [0] * 4000
    assert constraint.progress(output).num_tokens == 4000
    assert constraint.progress(output[:10]).num_tokens == 10
    assert constraint.progress(output).num_tokens == 4000


# ---- sessions and streams ------------------------------------------------------------------------


def test_a_forked_and_rewound_thought_equals_that_of_one_generation(llm):
    params = quiet(llm, GREEDY.replace(thinking_budget=20))
    whole = llm.generate(llm.chat_prompt(QUESTION), params).outputs[0]
    with llm.start(llm.chat_prompt(QUESTION)) as session:
        parts, size = [], 0
        while size < 60:  # 7 does not divide the cap, and ends within a closing text of several
            parts.append(session.generate(params.replace(max_tokens=min(7, 60 - size))))
            size += len(parts[-1].token_ids)
        assert [t for part in parts for t in part.token_ids] == whole.token_ids
        assert max(part.thinking.num_tokens for part in parts) == 20
        begin = len(session.tokens) - 60
        for length in (1, 19, 20, 21, 25):
            with session.fork(begin + length) as fork:
                rest = fork.generate(params.replace(max_tokens=60 - length))
                assert rest.token_ids == whole.token_ids[length:]
        session.rewind(begin + 12)
        assert session.generate(params.replace(max_tokens=48)).token_ids == whole.token_ids[12:]
        session.rewind(begin + 12)
        session.extend(" you are")
        told = session.generate(params)
        assert told.thinking == ThinkingOutput(20, ThoughtEnd.BUDGET)


def test_streams_tell_how_far_the_thought_is(llm):
    params = quiet(llm, GREEDY.replace(thinking_budget=10))
    whole = llm.generate(llm.chat_prompt(QUESTION), params).outputs[0]
    seen = [each.outputs[0] for each in llm.stream(llm.chat_prompt(QUESTION), params)]
    assert seen[-1] == whole
    for output in seen:
        assert output.thinking.num_tokens == min(10, len(output.token_ids))


def test_every_sample_has_a_budget_of_its_own(llm):
    params, before = quiet(llm, SAMPLED.replace(n=4, thinking_budget=9)), llm.stats.thoughts_closed
    samples = llm.generate(llm.chat_prompt(QUESTION), params).outputs
    assert len({tuple(sample.token_ids[:9]) for sample in samples}) == 4
    for sample in samples:
        assert sample.token_ids[9 : 9 + len(closing(llm))] == closing(llm)
        assert sample.thinking.num_tokens == 9
    assert llm.stats.thoughts_closed - before == 4


def test_requests_with_and_without_a_budget_share_a_batch(llm):
    prompt = llm.chat_prompt(QUESTION)
    asked = [SAMPLED, SAMPLED.replace(thinking_budget=8), SAMPLED, GREEDY]
    alone = [llm.generate(prompt, params).outputs[0].token_ids for params in asked]
    together = llm.generate([prompt] * 4, asked)
    assert [output.outputs[0].token_ids for output in together] == alone


def test_the_async_engine_and_its_sessions_keep_to_the_budget(single):
    params = GREEDY.replace(thinking_budget=10)
    prompt = single.chat_prompt(QUESTION)
    whole = single.generate(prompt, params).outputs[0]

    async def run():
        async with AsyncLLM(thinking(), **SETTINGS) as llm:
            assert (await llm.generate(prompt, params)).outputs[0] == whole
            async with llm.start(prompt) as session:
                assert (await session.generate(params)).thinking == whole.thinking
            shaped = params.replace(guided_decoding={"choice": ["yes", "no"]})
            async with llm.start(prompt) as session:
                output = await session.generate(shaped)
                assert output.text.endswith(("yes", "no"))

    asyncio.run(run())


# ---- grammars ------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("budget", [0, 1, 12])
def test_a_grammar_begins_behind_the_thought(llm, budget):
    free = quiet(llm, GREEDY)
    params = free.replace(thinking_budget=budget, guided_decoding={"json": SCHEMA})
    output = llm.generate(llm.chat_prompt(QUESTION), params).outputs[0]
    answer = output.text.partition("</think>\n\n")[2]
    assert set(json.loads(answer)) == {"ok"}
    assert output.stop_reason == GRAMMAR_COMPLETE
    assert output.thinking == ThinkingOutput(budget, ThoughtEnd.BUDGET)
    plain = llm.generate(llm.chat_prompt(QUESTION), free.replace(max_tokens=budget or 1))
    assert budget == 0 or output.token_ids[:budget] == plain.outputs[0].token_ids


def test_a_thought_before_a_grammar_does_not_end_the_output(single):
    """Without the grammar, an end-of-sequence in the thought ends it; under it there is none."""
    eos = single._frontend.engine.runner.lm.eos_token_ids
    params = SAMPLED.replace(
        thinking_budget=12, ignore_eos=False, logit_bias=dict.fromkeys(eos, 100.0)
    )
    prompt = single.chat_prompt(QUESTION)
    assert len(single.generate(prompt, params).outputs[0].token_ids) == 1
    shaped = single.generate(prompt, params.replace(guided_decoding={"json": SCHEMA}))
    assert shaped.outputs[0].thinking == ThinkingOutput(12, ThoughtEnd.BUDGET)


@pytest.mark.parametrize(
    ("name", "temperature"),
    by_turns(["ngram", "suffix", "draft model", "draft tree"], [0.0, 1.0]),
)
def test_a_thought_and_a_grammar_are_the_same_with_drafts_token_for_token(
    single, name, temperature
):
    model: dict[str, Any] = {"speculative_model": thinking()}
    paths = [[0], [1], [0, 0], [0, 1], [1, 0]]
    config = {
        "ngram": lambda: NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=1),
        "suffix": lambda: SuffixDecodingConfig(max_draft_len=4),
        "draft model": lambda: DraftTargetDecodingConfig(max_draft_len=3, **model),
        "draft tree": lambda: DraftTargetDecodingConfig(draft_choices=paths, **model),
    }[name]()
    prompts = [single.chat_prompt(QUESTION), closing(single, "Hello<think>"), "How are you?"]
    shaped = {"guided_decoding": {"json": SCHEMA}, "temperature": temperature}
    params = [
        quiet(single, SAMPLED.replace(thinking_budget=budget, n=2, **shaped))
        for budget in (0, 9, 21)
    ]

    def tokens(llm: LLM) -> list[Any]:
        found = [llm.generate(prompts, [each] * 3) for each in params]
        return [
            (sample.token_ids, sample.thinking, sample.stop_reason)
            for results in found
            for result in results
            for sample in result.outputs
        ]

    with LLM(thinking(), **SETTINGS, speculative_config=[config]) as llm:
        assert tokens(llm) == tokens(single)
        assert llm.stats.drafted > 0
        expect_empty(llm._frontend.engine)


@pytest.mark.parametrize("budget", [0, 6])
def test_a_grammar_allows_a_thought_first_within_the_thinking_budget(llm, budget):
    start = closing(llm, "<think>")
    params = GREEDY.replace(
        thinking_budget=budget,
        guided_decoding={"choice": ["yes", "no"]},
        logit_bias={start[0]: 100.0},
    )
    output = llm.generate("Hello world", params).outputs[0]
    assert output.text.endswith(("yes", "no"))
    opened = output.token_ids[: len(start)] == start
    assert opened == (budget > 0)
    assert output.thinking.num_tokens == (budget if opened else 0)
    closed = llm.generate("Hello<think>\n</think>\n\n", params).outputs[0]
    assert closed.text in ("yes", "no")


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"thinking_budget": 1.5}, "thinking_budget"),
        ({"thinking_budget": True}, "thinking_budget"),
        ({"thinking_soft": -1}, "thinking_soft"),
        ({"thinking_budget": 4, "thinking_soft": 5}, "thinking_soft"),
        ({"thinking_end": "</think>"}, "thinking_end"),
        ({"thinking_budget": 4, "thinking_end": ""}, "thinking_end"),
        ({"thinking_budget": 4, "thinking_end": [-1]}, "thinking_end"),
        ({"thinking_budget": 4, "thinking_end": ["a"]}, "thinking_end"),
    ],
)
def test_an_impossible_limit_is_refused(fields, says):
    with pytest.raises(ParameterError, match=says):
        SamplingParams(**fields)


def test_a_closing_text_without_the_marker_is_refused(llm):
    with pytest.raises(ParameterError, match=r"thinking_end does not end the thought.*</think>"):
        llm.generate("Hello", GREEDY.replace(thinking_budget=4, thinking_end="Stop."))


def test_a_closing_token_outside_of_the_vocabulary_is_refused(single):
    end = [9999, *closing(single)]
    with pytest.raises(ParameterError, match=r"thinking_end cannot be written"):
        single.generate("Hello", GREEDY.replace(thinking_budget=4, thinking_end=end))


def test_a_model_without_markers_refuses_a_budget_before_anything_runs():
    with LLM(speaking("byte_level"), **SETTINGS) as llm:
        with pytest.raises(ParameterError, match="this model has no thoughts to limit"):
            llm.generate("Hello", GREEDY.replace(thinking_budget=4))
        assert llm.stats.steps == 0


def test_the_embedded_model_keeps_to_every_budget():
    question = [{"role": "user", "content": "Sam has 110 nuts. He uses 84. How many nuts has Sam?"}]
    with LLM(dtype="float32") as llm:
        prompt = llm.chat_prompt(question)
        budgets = [0, 1, 5, 16, 40, 10_000]
        asked = [
            GREEDY.replace(thinking_budget=b, max_tokens=200, ignore_eos=False) for b in budgets
        ]
        for budget, result in zip(budgets, llm.generate([prompt] * 6, asked), strict=True):
            output = result.outputs[0]
            assert output.thinking.num_tokens <= budget
            assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            if output.thinking.end is ThoughtEnd.BUDGET:
                assert output.thinking.num_tokens == budget
                assert llm.tokenizer.decode(output.token_ids[budget:]).startswith("</think>")
