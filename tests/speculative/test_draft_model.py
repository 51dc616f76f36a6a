"""A draft model whose vocabulary is padded otherwise than the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engines import drain, engine
from forethought import LLM
from forethought.config.drafters import DraftTargetDecodingConfig, PearlDecodingConfig
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.config.tree import TreeChoices
from forethought.errors import ParameterError
from forethought.kv.pool import PagePool
from forethought.kv.table import PageTable
from forethought.speculative.draft_module import TokenRange, compute_in_chunks
from forethought.speculative.drafter import DraftKind, DraftRequest
from forethought.speculative.sampled_draft import SampledDraft
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
def test_ids_that_only_one_model_has_fail_no_request(
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


@pytest.mark.parametrize(
    "kind", [DraftTargetDecodingConfig, PearlDecodingConfig], ids=lambda kind: kind.decoding_type
)
def test_a_draft_model_is_stored_in_as_many_bits_as_its_own_configuration_says(
    kind: type[DecodingBaseConfig],
) -> None:
    def num_bytes(**fields: Any) -> int:
        config = kind(max_draft_len=3, speculative_model="forethought/drafter", **fields)
        with LLM(speculative_config=config, max_batch_size=1) as llm:
            drafter: Any = llm._running().engine.speculation.drafters[0].drafter
            assert drafter.forward_path
            output = llm.generate("What is 3 plus 4?", SamplingParams(temperature=0, max_tokens=9))
            assert output.outputs[0].metrics is not None
            assert output.outputs[0].metrics.drafted > 0
            return sum(size.num_bytes for size in drafter._model.runner.lm.traits.weights)

    assert num_bytes(quantization="int8") < num_bytes()


def test_a_draft_may_reach_the_end_of_the_draft_models_context_and_no_further(
    tmp_path: Path,
) -> None:
    config = AutoConfig.from_pretrained(tiny("llama"))
    config.max_position_embeddings = 32
    save_random(config, tmp_path / "short", seed=7)
    machine = engine(
        speculative=[
            DraftTargetDecodingConfig(max_draft_len=4, speculative_model=tmp_path / "short")
        ]
    )
    drafter, ends = machine.speculation.drafters[0].drafter, []
    propose = drafter.prepare_draft_tokens

    def watched(scheduled: Any, manager: Any = None) -> None:
        propose(scheduled, manager)
        ends.extend(
            len(request.tokens) + len(request.draft)
            for request in scheduled.generation_requests
            if len(request.draft)
        )

    drafter.prepare_draft_tokens = watched  # type: ignore[method-assign]
    machine.add([5, 7, 9], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    assert all(event.error is None for event in drain(machine))
    assert max(ends) == 32
    assert machine.stats.draft_failures == 0


@pytest.mark.parametrize("kind", ["greedy", "sampled", "tree"])
def test_drafts_of_different_lengths_are_made_together(kind: str, tmp_path: Path) -> None:
    machine = engine(speculative=[KINDS[kind](tiny("llama"))])
    drafter, sizes = machine.speculation.drafters[0].drafter, set[tuple[int, ...]]()
    propose = drafter.prepare_draft_tokens

    def watched(scheduled: Any, manager: Any = None) -> None:
        propose(scheduled, manager)
        sizes.add(tuple(len(request.draft) for request in scheduled.generation_requests))

    drafter.prepare_draft_tokens = watched  # type: ignore[method-assign]
    for length in (1, 3):
        limit = SpeculationParams(max_draft_len=length)
        machine.add([5, 7], SamplingParams(seed=1, max_tokens=20, speculation=limit))
    assert all(event.error is None for event in drain(machine))
    assert machine.stats.draft_failures == 0
    assert (3, 4) in sizes if kind == "tree" else (1, 3) in sizes


def test_siblings_that_a_draft_model_draws_are_distinct() -> None:
    distribution = torch.tensor([[0.7, 0.2, 0.07, 0.03]])
    for seed in range(20):
        request = DraftRequest(0, [5], 1, SamplingParams(seed=seed), 0, 0, seed, 1, 3)
        growth = SampledDraft(request, TreeChoices.parse([[0], [1], [2]]), 3)
        growth.grow(distribution.log(), [-1], range(3))
        draft = growth.draft()
        assert len(set(draft.tokens)) == 3
        assert draft.kind is DraftKind.WITHOUT_REPLACEMENT
        torch.testing.assert_close(draft.q, distribution.expand(3, -1))


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = DraftTargetDecodingConfig(
        max_draft_len=2, speculative_model=with_vocabulary(VOCAB + 9, tmp_path)
    )
    with pytest.raises(ParameterError, match=f"{VOCAB + 9} tokens, the target has {VOCAB}"):
        engine(speculative=[config])


@pytest.mark.parametrize("held_back", [1, 3])
@pytest.mark.parametrize("sizes", [[1], [4, 4], [30], [9, 2, 17], [3] * 9])
def test_what_is_missing_is_computed_once_in_forwards_that_keep_to_their_size(
    sizes: list[int], held_back: int
) -> None:
    table = PageTable(PagePool(16, 16))
    ranges = [TokenRange([n] * 40, table, 5, 5 + size) for n, size in enumerate(sizes)]
    computed: list[list[int]] = [[] for _ in ranges]
    widths: list[int] = []

    def forward(parts: Sequence[TokenRange], num_logits: int) -> bool:
        widths.append(sum(part.stop - part.start for part in parts))
        for part in parts:
            computed[part.tokens[0]] += range(part.start, part.stop)
        return bool(num_logits)

    assert compute_in_chunks(ranges, 8, forward, held_back)
    assert computed == [list(range(each.start, each.stop)) for each in ranges]
    assert all(width <= 8 for width in widths[:-1])
    assert widths[-1] <= max(8, held_back * len(sizes))
