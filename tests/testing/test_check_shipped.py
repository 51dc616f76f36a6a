"""The public suite passes for trained drafters, most of whose drafts are accepted."""

from __future__ import annotations

import pytest

from forethought.assets import reasoner_dir
from forethought.llm.tokenizer import Tokenizer
from forethought.testing import check_drafter
from shipped import QUESTIONS, SHIPPED, shipped


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_drafter_passes_on_the_embedded_reasoner(name: str) -> None:
    tokenizer = Tokenizer.load(reasoner_dir())
    prompts = [tokenizer.encode_more(question) for question in QUESTIONS[:3]]
    assert "forks agree" in check_drafter(shipped(name)[0], reasoner_dir(), prompts)
