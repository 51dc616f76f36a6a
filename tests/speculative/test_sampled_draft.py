"""Drafts that are sampled together, against the one that is sampled alone."""

from __future__ import annotations

import pytest
import torch

from engines import drain, engine, expect_empty
from forethought.config.drafters import DraftTargetDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.tree import TreeChoices
from forethought.speculative.drafter import DraftRequest
from forethought.speculative.sampled_draft import SampledDraft, SampledDrafts, depends_on_tokens
from forethought.speculative.tree import _levels
from models import tiny

WIDTH = 11
CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=2),  # fewer tokens than siblings
    SamplingParams(top_p=0.8, logit_bias={3: 1.0}),
    SamplingParams(min_p=0.2, min_tokens=2, stop_token_ids=[4]),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.1),
    SamplingParams(xtc_probability=0.5, xtc_threshold=0.1, top_n_sigma=1.5),
    SamplingParams(dry_multiplier=2.0, dry_allowed_length=1),
    SamplingParams(min_tokens=9, stop_token_ids=[4, 5]),
]
TREES = {
    "chain": TreeChoices.chain(4),
    "tree": TreeChoices.parse(
        [[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [2, 0], [2, 1], [0, 1, 0], [2, 0, 0]]
    ),
    "star": TreeChoices.parse([[0], [1], [2]]),
}


def request(number: int, params: SamplingParams) -> DraftRequest:
    tokens = [5, 7, *range(number % 3 + 2)]
    return DraftRequest(number, tokens, 2, params, 0, number, 100 + number)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_drafts_sampled_together_are_those_that_are_sampled_alone(name: str, cut: int) -> None:
    """Token for token and q for q, beside requests that are not sampled and ones that end early."""
    choices, levels = TREES[name], _levels(TREES[name], CPU)
    generator = torch.Generator().manual_seed(len(name) + cut)
    for round_ in range(6):
        requests = [request(n + 50 * round_, params) for n, params in enumerate(PARAMS)]
        num_rows = len(requests) + 2
        row_of = dict(zip(torch.randperm(num_rows).tolist(), requests, strict=False))
        sizes = [len(choices)] * (num_rows - 3) + [max(1, len(choices) - cut)] * 3
        together = SampledDrafts(row_of, choices, sizes, CPU)
        alone = {row: SampledDraft(each, choices, sizes[row]) for row, each in row_of.items()}
        assert set(together.alone) == {row for row in row_of if depends_on_tokens(row_of[row])}
        drawn: dict[int, list[int]] = {row: [] for row in range(num_rows)}
        for level in levels:
            rows = sum(size > level.begin for size in sizes)
            logits = 2 * torch.randn(rows * level.width, WIDTH, generator=generator)
            tokens = torch.full((rows, level.end - level.begin), -7)
            together.grow(logits, level, tokens)
            for row in range(rows):
                drawn[row] += tokens[row].tolist()
                if row in alone:
                    own = logits[row * level.width : (row + 1) * level.width]
                    alone[row].grow(own, level.above, range(level.begin, level.end))
        found = together.q()
        for row, each in alone.items():
            draft, sampled = each.draft(), drawn[row][: sizes[row]]
            assert all(b in (a, -1) for a, b in zip(sampled, draft.tokens, strict=True))
            for node, token in enumerate(draft.tokens):
                if token < 0:  # all there is has been drawn before
                    parent = choices.parents[node]
                    earlier = [n for n in range(node) if choices.parents[n] == parent]
                    assert sampled[node] in [sampled[n] for n in earlier]
            if row not in together.alone:
                assert torch.equal(found[row], draft.q)
        assert all(set(drawn[row]) == {-7} for row in drawn if row not in row_of and drawn[row])


@pytest.mark.parametrize(
    "other", [{"temperature": 0.0}, {"temperature": 1.0, "repetition_penalty": 1.3}, {}]
)
def test_a_request_that_ends_early_leaves_the_others_their_drafts(other) -> None:
    """Its draft is shorter than that of a row that is not sampled together with it."""
    config = DraftTargetDecodingConfig(
        max_draft_len=5, speculative_model=tiny("llama"), draft_sampling="sampled"
    )
    made = engine(speculative=[config])
    long = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, **other)
    short = SamplingParams(temperature=1.0, max_tokens=3, seed=2, ignore_eos=True)
    [first] = made.add([5, 7, 9], long)
    [second] = made.add([5, 7, 8], short)
    drain(made)
    assert made.stats.draft_failures == 0
    assert (len(first.output), len(second.output)) == (20, 3)
    expect_empty(made)
