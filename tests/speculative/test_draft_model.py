"""A draft model whose vocabulary is padded otherwise than the target's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engines import drain, engine
from forethought.decoding import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    PearlDecodingConfig,
)
from forethought.errors import ParameterError
from forethought.params import SamplingParams
from models import VOCAB, save_random, tiny

LAST = VOCAB - 1
"""An id that the narrower model does not have."""


def with_vocabulary(size: int, path: Path) -> Path:
    config = AutoConfig.from_pretrained(tiny("llama"))
    config.vocab_size = size
    save_random(config, path / f"vocabulary-{size}", seed=7)
    return path / f"vocabulary-{size}"


KINDS: dict[str, Callable[[Path], DecodingBaseConfig]] = {
    "greedy": lambda path: DraftTargetDecodingConfig(max_draft_len=3, speculative_model=path),
    "sampled": lambda path: DraftTargetDecodingConfig(
        max_draft_len=3, speculative_model=path, draft_sampling="sampled"
    ),
    "tree": lambda path: DraftTargetDecodingConfig(
        draft_choices=[[0], [0, 0], [1], [VOCAB - 2]], speculative_model=path
    ),
    "pearl": lambda path: PearlDecodingConfig(speculative_model=path, overlap=False),
}


def test_ranks_beyond_the_vocabulary_are_refused() -> None:
    config = DraftTargetDecodingConfig(
        draft_choices=[[0], [VOCAB]], speculative_model=tiny("llama")
    )
    with pytest.raises(ParameterError, match=f"the rank {VOCAB}, and the drafter knows {VOCAB}"):
        engine(speculative=[config])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [VOCAB - 1, VOCAB + 1])
@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "logit_bias": {LAST: 3.0, 3: 1.0}},
        {"temperature": 1.0, "repetition_penalty": 1.3, "stop_token_ids": [LAST], "min_tokens": 9},
    ],
)
def test_ids_that_only_one_model_has_fail_nobody(
    kind: str, size: int, asked: dict[str, Any], tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True, **asked)
    config = KINDS[kind](with_vocabulary(size, tmp_path))
    plain, machine = engine(), engine(speculative=[config])
    said = [each.add([5, LAST, 7, LAST], params)[0] for each in (plain, machine)]
    drain(plain)
    assert all(event.error is None for event in drain(machine))
    assert machine.stats.draft_failures == 0
    if kind != "sampled":
        assert said[0].output == said[1].output


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = DraftTargetDecodingConfig(
        max_draft_len=2, speculative_model=with_vocabulary(VOCAB + 9, tmp_path)
    )
    with pytest.raises(ParameterError, match=f"{VOCAB + 9} tokens, the target has {VOCAB}"):
        engine(speculative=[config])
