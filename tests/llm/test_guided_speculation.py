"""Structured output under speculation: the tokens, or the distribution, of plain decoding."""

from __future__ import annotations

import functools
import json
from collections import Counter
from typing import Any

import pytest
from scipy import stats

import drafters
from engines import expect_empty
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    SuffixDecodingConfig,
    UserProvidedDecodingConfig,
)
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.llm.llm import LLM
from forethought.outputs import GRAMMAR_COMPLETE, CompletionOutput
from tokens import speaking
from turns import by_turns

MODEL = speaking("byte_level")
PROMPTS = ["Hello world", "How are you?", "你好", "ok"]
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["he", "hell", 12]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
SHAPES: list[dict[str, Any]] = [
    {"json": RECORD},
    {"regex": r"[a-d ]{5,40}(yes|no)"},
    {"choice": ["hello, how are you?", "hello world", "how are the others?"]},
    {"grammar": 'start: "(" start ")" | "x" | start "," start'},
]
DRAFTERS = ["oracle", "adversary", "tree", "ngram", "suffix", "draft model", "draft tree"]


def build(*configs: DecodingBaseConfig) -> LLM:
    cache = {"max_tokens": 2048, "page_size": 4}
    return LLM(MODEL, dtype="float32", kv_cache_config=cache, speculative_config=list(configs))


def asked(temperature: float, ignore_eos: bool) -> list[SamplingParams]:
    return [
        SamplingParams(
            guided_decoding=shape,
            temperature=temperature,
            seed=7,
            max_tokens=60,
            frequency_penalty=0.3,
            ignore_eos=ignore_eos,
        )
        for shape in SHAPES
    ]


def completions(llm: LLM, params: list[SamplingParams]) -> list[CompletionOutput]:
    found = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    for completion in found:
        completion.metrics, completion.drafted_steps = None, []  # which tell of drafts
    return found


def drafting(name: str, plain: list[CompletionOutput]) -> DecodingBaseConfig:
    llm = build()
    prompts = [tuple(llm.tokenizer(prompt).input_ids) for prompt in PROMPTS]
    answers = {p: [*c.token_ids, *[4] * 60] for p, c in zip(prompts, plain, strict=True)}
    provided = {"oracle": drafters.oracle, "adversary": drafters.adversary, "tree": drafters.bush}
    if name in provided:
        drafter = provided[name](answers)
        return UserProvidedDecodingConfig(
            max_draft_len=4, max_total_draft_tokens=8, drafter=drafter
        )
    model: dict[str, Any] = {"speculative_model": MODEL}
    return {
        "ngram": lambda: NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=2),
        "suffix": lambda: SuffixDecodingConfig(max_draft_len=4),
        "draft model": lambda: DraftTargetDecodingConfig(max_draft_len=3, **model),
        "draft tree": lambda: DraftTargetDecodingConfig(
            draft_choices=[[0], [1], [0, 0], [0, 1], [1, 0]], **model
        ),
    }[name]()


@functools.cache
def undrafted(temperature: float, ignore_eos: bool) -> list[CompletionOutput]:
    return completions(build(), asked(temperature, ignore_eos))


@pytest.mark.parametrize(
    ("name", "temperature", "ignore_eos"), by_turns([*DRAFTERS], [0.0, 1.0], [False, True])
)
def test_guided_output_is_the_same_with_drafts_token_for_token(name, temperature, ignore_eos):
    params, plain = asked(temperature, ignore_eos), undrafted(temperature, ignore_eos)
    assert sum(completion.stop_reason == GRAMMAR_COMPLETE for completion in plain) >= 2
    with build(drafting(name, plain)) as llm:
        assert completions(llm, params) == plain
        if name == "oracle":
            assert llm.stats.accepted > 40
        expect_empty(llm._frontend.engine)


CHOICES = ["a", "b", "ab", "ba", "aab", "bb"]


def tally(llm: LLM, count: int, temperature: float, seed: int) -> Counter[str]:
    params = SamplingParams(
        guided_decoding={"choice": CHOICES}, temperature=temperature, seed=seed, n=count
    )
    return Counter(completion.text for completion in llm.generate(PROMPTS[0], params).outputs)


def p_value(first: Counter[str], second: Counter[str]) -> float:
    table = [[counts[text] + 1 for text in CHOICES] for counts in (first, second)]
    return float(stats.chi2_contingency(table).pvalue)


@functools.cache
def undrafted_tally() -> Counter[str]:
    return tally(build(), 800, 4.0, seed=1)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_drafts_sampled_without_the_shape_leave_the_distribution_within_it(tree):
    """Statistic: chi-squared between 800 draws with and 800 without drafts; p above 1e-4.

    Negative control: the same draws at half the temperature.
    """
    choices = [[0], [1], [0, 0], [0, 1]] if tree else None
    config = DraftTargetDecodingConfig(
        speculative_model=MODEL, max_draft_len=2, draft_sampling="sampled", draft_choices=choices
    )
    plain = undrafted_tally()
    with build(config) as llm:
        found = tally(llm, 800, 4.0, seed=2)
        assert p_value(plain, found) > 1e-4
        assert p_value(plain, tally(llm, 800, 2.0, seed=3)) < 1e-4


def test_every_sampled_draft_ends_in_the_shape():
    config = DraftTargetDecodingConfig(
        speculative_model=MODEL, max_draft_len=3, draft_sampling="sampled"
    )
    params = SamplingParams(guided_decoding={"json": RECORD}, seed=3, max_tokens=100, n=12)
    with build(config) as llm:
        for completion in llm.generate(PROMPTS[0], params).outputs:
            if completion.finish_reason == "stop":
                assert set(json.loads(completion.text)) == {"name", "tags"}
        assert llm.stats.accepted > 0
