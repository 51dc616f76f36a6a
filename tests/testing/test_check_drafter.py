"""The public suite passes for every drafter of ours, and fails for those that break promises."""

from __future__ import annotations

from typing import Any

import pytest

import drafters
from eagle_heads import random_head as eagle
from forethought.decoding import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MedusaDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PearlDecodingConfig,
    ReDrafterDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.speculative import drafter as interface
from forethought.testing import check_drafter
from medusa_heads import shared_heads
from models import tiny
from mtp_modules import saved
from redrafter_heads import random_head

PROMPTS = [[5, 6, 7, 8] * 3, [9], [20, 21] * 6, [5, 6, 7]]
MODEL: dict[str, Any] = {"speculative_model": tiny("llama", seed=7)}
TWIN: dict[str, Any] = {"speculative_model": tiny("llama")}


@pytest.mark.parametrize(
    "config",
    [
        NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=3),
        NGramDecodingConfig(max_draft_len=4, is_public_pool=False, is_use_oldest=False),
        SuffixDecodingConfig(max_draft_len=8),
        DraftTargetDecodingConfig(max_draft_len=4, **MODEL),
        DraftTargetDecodingConfig(max_draft_len=4, **TWIN),
        DraftTargetDecodingConfig(max_draft_len=4, draft_sampling="sampled", **TWIN),
        DraftTargetDecodingConfig(draft_choices=[[0, 0], [1, 0], [2]], **TWIN),
        DraftTargetDecodingConfig(
            draft_choices=[[0, 0], [1, 0], [2]], draft_sampling="sampled", **MODEL
        ),
        PearlDecodingConfig(max_draft_len=4, **TWIN),
        PearlDecodingConfig(max_draft_len=3, overlap=False, **MODEL),
        EagleDecodingConfig(max_draft_len=4, speculative_model=eagle("eagle")),
        EagleDecodingConfig(max_draft_len=4, speculative_model=eagle()),
        EagleDecodingConfig(eagle_choices=[[0, 0], [1, 0], [2]], speculative_model=eagle()),
        EagleDecodingConfig(
            max_draft_len=4,
            use_dynamic_tree=True,
            dynamic_tree_max_topK=4,
            max_total_draft_tokens=10,
            speculative_model=eagle(),
        ),
        MedusaDecodingConfig(speculative_model=shared_heads()),
        MTPDecodingConfig(max_draft_len=4, speculative_model=saved()),
        MTPDecodingConfig(max_draft_len=3, speculative_model=saved(), use_mtp_vanilla=True),
        MTPDecodingConfig(max_draft_len=4, speculative_model=saved(count=2)),
        ReDrafterDecodingConfig(speculative_model=random_head()),
        ReDrafterDecodingConfig(num_beams=4, tree="beams", speculative_model=random_head()),
    ],
    ids=lambda config: f"{config.decoding_type}",
)
def test_every_drafter_of_ours_passes(config: DecodingBaseConfig) -> None:
    assert len(check_drafter(config, tiny("llama"), PROMPTS)) == 8


def test_a_drafter_of_ones_own_passes_on_the_embedded_reasoner() -> None:
    class Repeat(interface.Drafter):
        def prepare_draft_tokens(
            self, scheduled_requests: Any, resource_manager: Any = None
        ) -> None:
            for request in scheduled_requests.generation_requests:
                request.py_draft_tokens = [request.tokens[-1]] * request.max_draft_len

    assert "forks agree" in check_drafter(Repeat())


def test_a_drafter_that_writes_into_the_tokens_is_found_out() -> None:
    def meddle(request: interface.DraftRequest) -> list[int]:
        request.tokens[-1] = 7  # type: ignore[index]
        return [7]

    with pytest.raises(AssertionError, match="greedy tokens are those of plain decoding"):
        check_drafter(drafters.PerRequest(meddle), tiny("llama"), PROMPTS)


def test_a_drafter_that_keeps_pages_is_found_out() -> None:
    kept = []

    def hoard(request: interface.DraftRequest) -> list[int]:
        assert request.table is not None
        kept.append(request.table.fork())
        return [7]

    with pytest.raises(AssertionError):
        check_drafter(drafters.PerRequest(hoard), tiny("llama"), PROMPTS)


def test_a_drafter_that_raises_is_found_out() -> None:
    failing = drafters.PerRequest(lambda request: [request.tokens[10_000]])
    with pytest.raises(AssertionError, match="the drafter failed"):
        check_drafter(failing, tiny("llama"), PROMPTS)
