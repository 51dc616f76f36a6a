"""The suffix drafter proposes what is likely behind the longest match, from texts it may show."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.speculative.drafter import Draft, DraftRequest, ScheduledRequests
from forethought.speculative.drafters.suffix import (
    MAX_POSITIONS,
    PastOutputs,
    SuffixDrafter,
    SuffixIndex,
    _longest,
    chain,
    tree,
)

NUMBERS = itertools.count()


def request(
    tokens: Sequence[int],
    prompt_length: int = 1,
    salt: str = "",
    group: int | None = None,
    depth: int = 100,
    nodes: int = 100,
) -> DraftRequest:
    number = next(NUMBERS)
    return DraftRequest(
        request_id=number,
        tokens=list(tokens),
        prompt_length=prompt_length,
        params=SamplingParams(cache_salt=salt),
        group=number if group is None else group,
        index=0,
        seed=0,
        max_draft_len=depth,
        max_nodes=nodes,
    )


def propose(drafter: SuffixDrafter, *requests: DraftRequest) -> list[int]:
    """The draft of the last of them."""
    drafter.prepare_draft_tokens(ScheduledRequests(list(requests)))
    return requests[-1].py_draft_tokens


def finish(drafter: SuffixDrafter, *requests: DraftRequest) -> None:
    propose(drafter, *requests)
    for each in requests:
        drafter.release(each)


def paths(draft: Draft) -> list[list[int]]:
    """The tokens from the root to each node."""
    found: list[list[int]] = []
    for node, token in enumerate(draft.tokens):
        parent = draft.parent(node)
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


# ---- the index ----------------------------------------------------------------------------------


def slow_find(texts: list[list[int]], tokens: list[int], depth: int) -> tuple[int, list]:
    """All positions behind the longest match, by trying every one."""
    end = tokens[-depth:]

    def common(text: list[int], at: int) -> int:
        length = 0
        while length < min(len(end), at) and text[at - 1 - length] == end[-1 - length]:
            length += 1
        return length

    positions = [(common(text, at), text, at) for text in texts for at in range(1, len(text))]
    longest = max((length for length, _, _ in positions), default=0)
    return longest, [(text, at) for length, text, at in positions if length == longest > 0]


@settings(deadline=None, max_examples=150)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4),
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=14),
    depth=st.integers(1, 12),
    gone=st.integers(0, 3),
)
def test_the_index_finds_what_trying_every_place_finds(texts, tokens, depth, gone):
    index = SuffixIndex(depth)
    for text in texts:
        index.add(text, 0, len(text))
    for text in texts[:gone]:
        index.remove(text)
    length, positions = index.find(tokens)
    expected, all_positions = slow_find(texts[gone:], tokens, depth)
    assert length == expected
    if len(all_positions) <= MAX_POSITIONS and sum(map(len, texts)) <= MAX_POSITIONS:
        assert [(id(text), at) for text, at in positions] == [
            (id(t), at) for t, at in all_positions
        ]
    assert all((text, at) in all_positions for text, at in positions)


def test_an_index_is_empty_once_all_its_texts_are_taken_away():
    random.seed(1)
    texts = [random.choices(range(4), k=200) for _ in range(5)]
    index = SuffixIndex(24)
    for text in texts:
        index.add(text, 0, len(text))
    for text in texts:
        assert len(index)
        index.remove(text)
    assert not len(index)


def test_a_common_ngram_is_searched_at_its_newest_positions_only():
    text = [token for other in range(300) for token in (1000, other)]
    index = SuffixIndex(24)
    index.add(text, 0, len(text))
    length, positions = index.find([7, 1000])
    assert length == 1
    assert [text[at] for _, at in positions] == list(range(300 - MAX_POSITIONS, 300))


# ---- continuations ------------------------------------------------------------------------------


def behind(*ends: list[int]) -> list[tuple[list[int], int]]:
    return [([0, *end], 1) for end in ends]


def test_a_chain_takes_the_most_probable_tokens_and_expects_the_sum_of_their_probabilities():
    found = chain(behind([1, 2, 9], [1, 3, 9], [1, 3, 8], [5, 5, 5]), 3, 0.0)
    assert found.tokens == [1, 3, 8]  # 9 and 8 are equally likely: the newer
    assert found.score == pytest.approx(3 / 4 + 2 / 4 + 1 / 4)


def test_a_chain_ends_where_its_path_becomes_too_unlikely():
    positions = behind([1, 2, 9], [1, 3, 9], [1, 3, 8], [5, 5, 5])
    assert chain(positions, 3, 0.3).tokens == [1, 3]
    assert chain(positions, 3, 0.8).tokens == []


def test_a_place_where_the_text_ends_says_nothing_about_what_comes_then():
    found = chain(behind([1, 2, 3], [1], [1]), 3, 0.9)
    assert (found.tokens, found.score) == ([1, 2, 3], 3.0)


def test_a_tree_holds_the_most_probable_nodes_parents_first():
    positions = behind([1, 2], [1, 3], [1, 3], [5, 6], [5, 7])
    found = tree(positions, 2, 4, 0.0)
    assert (found.tokens, found.parents) == ([1, 5, 3, 7], (-1, -1, 0, 1))
    assert found.score == pytest.approx(3 / 5 + 2 / 5 + 2 / 5 + 1 / 5)
    assert tree(positions, 2, 4, 0.3).tokens == [1, 5, 3]
    assert tree(positions, 1, 9, 0.0).tokens == [1, 5]


def test_a_tree_of_one_continuation_is_a_chain():
    found = tree(behind([1, 2, 3], [1, 2, 3]), 3, 9, 0.1)
    assert (found.tokens, found.parents) == ([1, 2, 3], None)


# ---- the drafter --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, [3, 4]), (2.0, [3, 4, 5, 6]), (0.5, [3]), (0.4, [])]
)
def test_the_longer_the_match_the_longer_the_draft(factor, expected):
    shown = request([9, 1, 2, 3, 4, 5, 6, 8, 1, 2])
    assert propose(SuffixDrafter(16, max_spec_factor=factor), shown) == expected


def test_the_longest_match_wins_over_newer_ones():
    shown = request([1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 4, 70, 9, 1, 2, 3, 4])
    assert propose(SuffixDrafter(1), shown) == [50]


def test_limits_of_the_request_and_of_the_drafter_hold():
    tokens = [*range(20), *range(10)]
    assert propose(SuffixDrafter(4), request(tokens)) == [10, 11, 12, 13]
    assert propose(SuffixDrafter(4), request(tokens, depth=2)) == [10, 11]
    assert propose(SuffixDrafter(4), request(tokens, nodes=1)) == [10]
    assert propose(SuffixDrafter(4), request(tokens, depth=0)) == []


def test_siblings_draft_for_each_other_while_one_of_them_runs():
    drafter = SuffixDrafter(8, max_cached_requests=0)
    ahead = request([1, 2, 3, 30, 31, 32, 33], prompt_length=3, group=7)
    behind_it = request([1, 2, 3, 30], prompt_length=3, group=7)
    unrelated = request([5, 3, 30], prompt_length=2)
    assert propose(drafter, unrelated, ahead, behind_it) == [31, 32, 33]
    assert propose(drafter, unrelated) == []
    drafter.release(ahead)
    assert propose(drafter, behind_it) == [31, 32, 33]
    drafter.release(behind_it)
    assert propose(drafter, request([1, 2, 3, 30], prompt_length=3, group=7)) == []


def test_a_groups_texts_go_with_its_last_request():
    drafter = SuffixDrafter(8)
    siblings = [request([1, 2, 3, 4], prompt_length=3, group=7) for _ in range(3)]
    propose(drafter, *siblings)
    for left, sibling in zip((1, 1, 0), siblings, strict=True):
        drafter.release(sibling)
        drafter.release(sibling)
        assert drafter.prompts == left


def test_equal_groups_of_other_tenants_share_nothing():
    drafter = SuffixDrafter(8)
    ahead = request([1, 2, 3, 30, 31, 32, 33], prompt_length=3, group=7, salt="a")
    other = request([1, 2, 3, 30], prompt_length=3, group=7, salt="b")
    assert propose(drafter, ahead, other) == []
    drafter.release(ahead)
    assert propose(drafter, other) == []
    assert propose(drafter, request([3, 30], salt="a", group=8)) == [31]


def test_past_outputs_are_proposed_and_past_prompts_are_not():
    drafter = SuffixDrafter(8)
    finish(drafter, request([1, 2, 3, 4, 5, 6, 7, 8], prompt_length=4))
    assert propose(drafter, request([90, 5, 6])) == [7, 8]
    assert propose(drafter, request([90, 1, 2])) == []


def test_of_equal_proposals_that_of_the_text_itself_is_taken():
    drafter = SuffixDrafter(8)
    finish(drafter, request([5, 1, 2, 9, 4], prompt_length=1))
    assert propose(drafter, request([1, 2, 7, 3, 1, 2])) == [7, 3]
    assert propose(drafter, request([6, 1, 2])) == [9, 4]


def test_an_output_of_as_many_tokens_as_may_be_kept_is_kept():
    past = PastOutputs(2, 3, 8)
    past.add("", [1, 2, 3])
    assert (len(past), past.tokens) == (1, 3)
    past.add("", [1, 2, 3, 4])
    assert (len(past), past.tokens) == (1, 3)


def test_a_path_that_is_just_likely_enough_is_proposed():
    text = [1, 2, 3, 1, 2, 4]
    positions = [(text, 2), (text, 5)]
    assert list(chain(positions, 1, 0.5).tokens) == [4]
    assert sorted(tree(positions, 1, 2, 0.5).tokens) == [3, 4]


def test_tokens_accepted_in_the_last_step_are_remembered():
    drafter = SuffixDrafter(8)
    shown = request([1, 2])
    propose(drafter, shown)
    shown.tokens.extend([3, 4])
    drafter.release(shown)
    assert propose(drafter, request([90, 2, 3])) == [4]


def test_with_more_nodes_than_levels_a_draft_branches():
    drafter = SuffixDrafter(2, 4)
    finish(drafter, request([0, 1, 2, 3]), request([0, 1, 2, 4]), request([0, 1, 2, 4]))
    shown = request([0, 1, 2], nodes=4)
    propose(drafter, shown)
    assert (shown.draft.tokens, shown.draft.parents) == ([4, 3], (-1, -1))
    shown.max_nodes = 1
    propose(drafter, shown)
    assert (list(shown.draft.tokens), shown.draft.parents) == ([4], None)
    assert [drafter.nodes(depth) for depth in range(3)] == [0, 2, 4]
    assert SuffixDrafter(5).nodes(3) == 3


@pytest.mark.parametrize(("requests", "tokens"), [(10_000, 100), (7, 10_000), (0, 100), (5, 0)])
def test_ten_thousand_requests_stay_in_bounds(requests, tokens):
    random.seed(0)
    drafter = SuffixDrafter(3, max_cached_requests=requests, max_cached_tokens=tokens)
    for number in range(10_000 if requests and tokens else 100):
        finish(
            drafter,
            request(random.choices(range(50), k=random.randint(2, 9)), salt=str(number % 9)),
        )
        assert len(drafter.past) <= requests
        assert drafter.past.tokens <= tokens
    assert bool(len(drafter.past)) == bool(requests and tokens)
    assert drafter.prompts == 0
    entries = sum(len(drafter.past.index(salt)) for salt in drafter.past._indexes)
    assert entries <= 3 * drafter.past.tokens


def test_the_oldest_output_leaves_first_and_its_tenant_with_it():
    past = PastOutputs(max_requests=2, max_tokens=100, max_depth=24)
    past.add("a", [1, 2, 3])
    past.add("b", [4, 5, 6])
    past.add("b", [7, 8, 9])
    assert list(past._indexes) == ["b"]
    assert past.index("a") is None
    past.add("b", list(range(101)))
    past.add("b", [1])
    assert (len(past), past.tokens) == (2, 6)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_draft_is_what_followed_the_last_token_in_a_text_it_may_see(data):
    """Whatever the history: requests come, grow and go, tenants and groups mix."""
    depth = data.draw(st.integers(1, 5))
    drafter = SuffixDrafter(
        depth,
        depth * data.draw(st.integers(1, 3)),
        max_tree_depth=data.draw(st.integers(1, 8)),
        max_spec_factor=data.draw(st.sampled_from([0.5, 1.0, 4.0])),
        min_token_prob=data.draw(st.sampled_from([0.0, 0.1, 0.6])),
        max_cached_requests=data.draw(st.integers(0, 4)),
        max_cached_tokens=data.draw(st.integers(0, 40)),
    )
    live: list[DraftRequest] = []
    gone: list[DraftRequest] = []
    for _ in range(data.draw(st.integers(1, 12))):
        event = data.draw(st.sampled_from(["come", "grow", "go"])) if live else "come"
        tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        if event == "come":
            salt, group = data.draw(st.sampled_from("ab")), data.draw(st.integers(0, 1))
            prompt = [group, 1, 2]
            live.append(request([*prompt, *tokens], 3, salt, group))
        elif event == "grow":
            data.draw(st.sampled_from(live)).tokens.extend(tokens)
        else:
            gone.append(live.pop(data.draw(st.integers(0, len(live) - 1))))
            drafter.release(gone[-1])
        for shown in live:
            shown.max_draft_len = data.draw(st.integers(0, 6))
            shown.max_nodes = shown.max_draft_len and data.draw(st.integers(1, 12))
        drafter.prepare_draft_tokens(ScheduledRequests(live))
        for shown in live:
            draft = shown.draft
            assert draft.depth <= min(shown.max_draft_len, depth)
            assert len(draft) <= shown.max_nodes
            ours = [each for each in live + gone if each.params == shown.params]
            allowed = [each.tokens for each in ours if each.group == shown.group]
            allowed += [each.tokens[3:] for each in gone if each.params == shown.params]
            found = paths(draft)
            assert len({tuple(path) for path in found}) == len(found)
            for path in found:
                wanted = [shown.tokens[-1], *path]
                assert any(
                    text[i : i + len(wanted)] == wanted
                    for text in allowed
                    for i in range(len(text))
                )


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_draft_len": 0},
        {"max_total_draft_tokens": 3},
        {"max_tree_depth": 0},
        {"max_spec_factor": 0.0},
        {"min_token_prob": 1.5},
        {"max_cached_requests": -1},
        {"max_cached_tokens": -1},
    ],
)
def test_values_outside_their_ranges_are_refused_by_name(wrong):
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        SuffixDrafter(**{"max_draft_len": 4, **wrong})


def test_a_match_at_the_begin_of_a_text_is_not_continued_from_its_end():
    text = [5, 6, 7]  # before position 2 stand 5 and 6 and nothing else
    assert _longest((7, 5, 6), 2, [(text, 2)]) == (2, [(text, 2)])
