"""DRY finds the repeats of its definition, up to breakers and within its window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.config.sampling import SamplingParams
from forethought.model.sampling import TokenContext, edit_logits
from forethought.model.sampling.dry import MAX_PENALTY, dry_penalties, repeats
from slow_samplers import breakers_of, slow_dry

ON = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_sequence_breakers=())
few_tokens = st.lists(st.integers(0, 2), max_size=30)


class Counted(list):
    """Tokens that count how often one is read, or some are."""

    num_reads = 0

    def __getitem__(self, key):
        self.num_reads += 1
        return super().__getitem__(key)


@settings(max_examples=200, deadline=None)
@given(
    few_tokens,
    st.sampled_from([-1, 1, 2, 5, 12, 40]),
    st.sampled_from([1, 2, 4]),
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=3), max_size=2),
    st.sets(st.integers(0, 2), max_size=1),
)
def test_penalties_are_those_of_the_definition(tokens, last_n, allowed, runs, singles):
    params = ON.replace(dry_penalty_last_n=last_n, dry_allowed_length=allowed)
    breakers = [*runs, *([token] for token in singles)]
    result = dry_penalties(params, tokens, breakers_of(*breakers) if breakers else None)
    assert result == pytest.approx(slow_dry(params, tokens, breakers))


def test_the_longest_repeat_of_a_token_counts():
    tokens = [1, 2, 3, 4, 9, 3, 4, 8, 7, 3, 2, 3, 4]  # 9 after 2 3 4... and 8 after 3 4
    assert dry_penalties(ON, tokens, None) == {9: 2.0, 8: 1.0}


def test_a_repeat_that_overlaps_itself_counts_whole():
    assert dry_penalties(ON, [5, 5, 5, 5], None) == {5: 2.0}
    assert dry_penalties(ON, [1, 2, 1, 2, 1, 2], None) == {1: 4.0}


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3]])
def test_without_a_repeat_nothing_is_penalised(tokens):
    assert dry_penalties(ON, tokens, None) == {}


def test_a_breaker_ends_a_repeat_and_is_not_penalised():
    single = breakers_of([7])
    assert dry_penalties(ON, [1, 2, 3, 9, 1, 2, 3], single) == {9: 2.0}
    assert dry_penalties(ON, [1, 7, 3, 4, 9, 1, 7, 3, 4], single) == {9: 1.0}
    assert dry_penalties(ON, [1, 2, 7, 9, 1, 2, 7], single) == {}
    assert dry_penalties(ON, [1, 2, 7, 1, 2], single) == {}  # the breaker would continue it
    pair = breakers_of([2, 3])
    assert dry_penalties(ON, [1, 2, 3, 4, 9, 1, 2, 3, 4], pair) == {}
    assert dry_penalties(ON, [2, 3, 4, 9, 2, 3, 4], breakers_of([2], [2, 3])) == {}
    assert dry_penalties(ON, [1, 3, 3, 4, 9, 1, 3, 3, 4], pair) == {9: 4.0}


def test_breakers_that_begin_alike_are_compared_once():
    breakers = breakers_of(*([5] * size + [end] for size in range(2, 40) for end in range(6, 20)))
    newest_first = Counted([5] * 2000)
    assert breakers.distance(newest_first) == 2000
    assert newest_first.num_reads < 50 * len(newest_first)


def test_ids_beyond_the_vocabulary_of_the_breakers_are_none():
    assert dry_penalties(ON, [80, 81, 99, 80, 81], breakers_of([7])) == {99: 1.0}


def test_penalties_are_bounded_and_so_is_the_length_that_counts():
    steep = ON.replace(dry_base=100.0, dry_multiplier=100.0)
    assert dry_penalties(steep, [1, 2] * 200, None) == {1: MAX_PENALTY}
    slow = ON.replace(dry_base=1.001)
    assert dry_penalties(slow, [1] * 3000, None) == {1: pytest.approx(1.001**1000)}
    flat = ON.replace(dry_base=1.0)
    assert dry_penalties(flat, [1] * 3000, None) == {1: 1.0}


def test_lengths_are_found_in_one_pass_of_a_text_that_only_repeats():
    newest_first = Counted([1, 2, 3] * 4000)
    assert sum(1 for _ in repeats(newest_first, len(newest_first))) == 3999
    assert newest_first.num_reads < 8 * len(newest_first)


def test_prompt_and_output_count_alike_and_only_the_logits_of_repeats_change():
    logits = torch.zeros(1, 12)
    whole = TokenContext(ON, (1, 2, 3, 1, 2), (), frozenset())
    split = TokenContext(ON, (1, 2), (3, 1, 2), frozenset())
    expected = torch.zeros(1, 12)
    expected[0, 3] = -1.0
    for context in (whole, split):
        assert torch.equal(edit_logits(logits, [context]), expected)
    assert not logits.any()


@pytest.mark.parametrize("off", [{"dry_multiplier": 0.0}, {"dry_penalty_last_n": 0}])
def test_it_is_off_by_default_and_with_an_empty_window(off):
    params = ON.replace(**off)
    assert not SamplingParams().penalises_repeats
    assert not params.penalises_repeats
    logits = torch.zeros(1, 12)
    context = TokenContext(params, (1, 2, 3, 1, 2), (), frozenset())
    assert edit_logits(logits, [context]) is logits
