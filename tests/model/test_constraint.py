"""Constraints in the sampling distribution, with a rule that is a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.config.sampling import SamplingParams
from forethought.model.sampling import TokenContext, edit_logits, logits_to_probs, sample
from forethought.model.sampling.distribution import unpack
from forethought.reference.engine import logits_to_probs as reference_probs

VOCABULARY = 19  # not a multiple of 8
EOS = frozenset({1})


class Table:
    """Allows the same tokens after every output."""

    def __init__(self, allowed: Sequence[int], width: int = VOCABULARY) -> None:
        bits = np.zeros(width, np.bool_)
        bits[list(allowed)] = True
        self._mask = np.packbits(bits, bitorder="little")

    def mask(self, output: Sequence[int]) -> np.ndarray:
        return self._mask

    def is_complete(self, output: Sequence[int]) -> bool:
        return False


def distribution(logits: list[float], allowed: Sequence[int], **fields: object) -> list[float]:
    context = TokenContext(SamplingParams(**fields), (2,), (), EOS, Table(allowed, len(logits)))
    return logits_to_probs(torch.tensor([logits]), [context])[0].tolist()


ids = st.integers(0, VOCABULARY - 1)
rows = st.tuples(
    st.lists(
        st.one_of(st.integers(-16, 16).map(lambda x: x / 4), st.sampled_from([math.nan, math.inf])),
        min_size=VOCABULARY,
        max_size=VOCABULARY,
    ),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.6, 1.0]),
        top_k=st.integers(0, 4),
        min_tokens=st.integers(0, 2),
        stop_token_ids=st.lists(ids, max_size=2).map(tuple),
        logit_bias=st.dictionaries(ids, st.integers(-6, 6).map(float), max_size=2),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
    ),
    st.lists(ids, max_size=3),
    st.one_of(st.none(), st.sets(ids).map(sorted).map(Table)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4))
def test_the_distribution_under_constraints_agrees_with_the_reference(batch):
    logits = torch.tensor([row[0] for row in batch])
    contexts = [
        TokenContext(params, (3,), output, EOS, table) for _, params, output, table in batch
    ]
    found = logits_to_probs(logits, contexts)
    for row, (raw, params, output, table) in enumerate(batch):
        expected = reference_probs(raw, TokenContext(params, (3,), output, EOS, table))
        assert found[row].tolist() == pytest.approx(expected, abs=2e-6)


def test_what_is_not_allowed_has_no_probability_and_the_rest_keeps_its_ratios():
    probs = distribution([math.log(p) for p in (0.4, 0.3, 0.2, 0.1)], [1, 3])
    assert probs == pytest.approx([0.0, 0.75, 0.0, 0.25])


def test_the_cuts_are_made_on_what_is_allowed():
    """Truncating to the top 2 first would leave token 2 alone."""
    assert distribution([3.0, 2.0, 1.0, 0.0], [2, 3], top_k=2)[3] > 0


def test_a_constraint_holds_where_min_tokens_leaves_nothing():
    assert distribution([9.0, 0.0, 9.0], [1], min_tokens=5) == [0.0, 1.0, 0.0]


def test_a_constraint_holds_where_the_model_returns_nonsense():
    assert distribution([math.nan, math.nan, 1.0, math.nan], [1, 3]) == [0.0, 0.5, 0.0, 0.5]


def test_a_constraint_that_allows_nothing_forbids_nothing():
    assert distribution([0.0, 0.0, 0.0, 0.0], []) == [0.25] * 4


def test_greedy_takes_the_most_probable_allowed_token_and_leaves_the_logits():
    logits = torch.tensor([[5.0, 1.0, 2.0, 4.0], [5.0, 1.0, 2.0, 4.0]])
    before = logits.clone()
    greedy = SamplingParams(temperature=0.0)
    contexts = [
        TokenContext(greedy, (2,), (), EOS, Table([1, 2], 4)),
        TokenContext(greedy, (2,), (), EOS),
    ]
    assert sample(logits, contexts, [0.0, 0.0]).tokens == [2, 0]
    assert torch.equal(logits, before)


def test_a_row_is_not_touched_by_the_constraint_of_another():
    logits = torch.randn(2, 4)
    contexts = [
        TokenContext(SamplingParams(), (2,), (), EOS),
        TokenContext(SamplingParams(), (2,), (), EOS, Table([0], 4)),
    ]
    edited = edit_logits(logits, contexts)
    assert torch.equal(edited[0], logits[0])
    assert edited[1].tolist() == [logits[1, 0].item(), -math.inf, -math.inf, -math.inf]


def test_bits_are_read_lowest_first():
    mask = np.array([[0b00000010, 0b00000101]], np.uint8)
    assert np.flatnonzero(unpack(mask, 11)[0]).tolist() == [1, 8, 10]
