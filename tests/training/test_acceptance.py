"""Acceptance as the engine counts it: a reference implementation drafts token by token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forethought.assets import drafter_dir, problems, reasoner_dir
from forethought.config.drafters import DraftTargetDecodingConfig, EagleDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.training.acceptance import AcceptanceEvaluation, with_draft_len
from forethought.training.chat_tokenizer import prompt_text
from forethought.training.teacher import Teacher
from models import greedy

MAX_TOKENS = 40


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher.load(reasoner_dir(), "float32")


@pytest.fixture(scope="module")
def prompts(teacher: Teacher) -> list[list[int]]:
    questions = [problem["question"] for problem in problems()[:2]]
    return [teacher.tokenizer.encode_more(prompt_text(question)) for question in questions]


def speculate(prompt: list[int], answer: list[int], draft_len: int) -> Iterator[int]:
    """Draft token by token and compare with the target's answer: accepted tokens of each step."""
    num_known = 1
    while num_known < len(answer):
        num_drafted = min(draft_len, len(answer) - num_known - 1)
        draft = greedy(drafter_dir(), [prompt + answer[:num_known]], max(1, num_drafted))[0]
        num_accepted = 0
        while num_accepted < num_drafted and draft[num_accepted] == answer[num_known]:
            num_known, num_accepted = num_known + 1, num_accepted + 1
        num_known += 1
        yield num_accepted


@pytest.mark.parametrize("draft_len", [1, 3, 5])
def test_the_engine_accepts_what_drafting_token_by_token_accepts(
    teacher: Teacher, prompts: list[list[int]], draft_len: int
) -> None:
    answers = teacher.generate(
        prompts, [SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)] * len(prompts)
    )
    assert answers.token_ids == greedy(reasoner_dir(), prompts, MAX_TOKENS)
    accepted = [
        num
        for prompt, answer in zip(prompts, answers.token_ids, strict=True)
        for num in speculate(prompt, answer, draft_len)
    ]
    config = DraftTargetDecodingConfig(speculative_model=drafter_dir(), max_draft_len=draft_len)
    found = AcceptanceEvaluation(teacher, prompts, MAX_TOKENS)(config)
    assert found["acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted))
    for position in range(1, draft_len + 1):
        share = sum(num >= position for num in accepted) / len(accepted)
        assert found[f"accepted_{position}"] == pytest.approx(share)
    assert 0 < sum(accepted) < draft_len * len(accepted)  # some drafts are accepted, others not


def test_a_drafter_is_measured_at_another_draft_length_with_all_else_as_it_is() -> None:
    config = EagleDecodingConfig(max_draft_len=7, speculative_model=reasoner_dir())
    other = with_draft_len(config, 3)
    assert other == EagleDecodingConfig(max_draft_len=3, speculative_model=reasoner_dir())
    assert with_draft_len(config, None) is config
