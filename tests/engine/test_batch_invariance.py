"""In bf16 on a CPU a small model's tokens depend neither on the rest of the batch nor on drafts."""

from __future__ import annotations

import pytest
import torch

from forethought import LLM
from forethought.assets import drafter_dir
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.evaluation.problems import shipped

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU multiplies no bf16"
)
PARAMS = [
    SamplingParams(temperature=0.8 * (seed % 3 > 0), seed=seed, max_tokens=96) for seed in range(8)
]


def prompts(llm: LLM) -> list[list[int]]:
    questions = [problem.question for problem in shipped()[: len(PARAMS)]]
    return [llm.chat_prompt([{"role": "user", "content": each}]) for each in questions]


def together(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts(llm), PARAMS)]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    with LLM(dtype="bfloat16") as llm:
        pairs = zip(prompts(llm), PARAMS, strict=True)
        return [llm.generate(prompt, params).outputs[0].token_ids for prompt, params in pairs]


def test_a_seeded_request_samples_the_same_tokens_alone_in_a_batch_and_again(
    alone: list[list[int]],
) -> None:
    with LLM(dtype="bfloat16") as llm:
        assert together(llm) == alone
        assert together(llm) == alone  # with its prompt found in the prefix index
    with LLM(dtype="bfloat16", max_num_tokens=50) as llm:
        assert together(llm) == alone  # with its prompt in chunks


@pytest.mark.parametrize(
    "config",
    [
        NGramDecodingConfig(max_draft_len=8, max_matching_ngram_size=3),
        SuffixDecodingConfig(max_draft_len=5, max_total_draft_tokens=12, max_spec_factor=4.0),
        DraftTargetDecodingConfig(max_draft_len=8, speculative_model=drafter_dir()),
    ],
    ids=["ngram", "suffix tree", "draft model"],
)
def test_drafts_change_no_token(config: DecodingBaseConfig, alone: list[list[int]]) -> None:
    with LLM(dtype="bfloat16", speculative_config=config) as llm:
        assert together(llm) == alone
        assert llm.stats.accepted > 0
