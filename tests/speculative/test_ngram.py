"""The n-gram drafter proposes what TensorRT-LLM's pool would, from a pool that stays in bounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.speculative.drafter import DraftRequest, ScheduledRequests
from forethought.speculative.drafters.ngram import MAX_MATCHES, NGramDrafter, NGramPool

LOOP = [1, 2, 3, 4, 1, 2, 5, 1, 2]
NUMBERS = itertools.count()


def request(
    tokens: Sequence[int],
    salt: str = "",
    depth: int = 100,
    group: int | None = None,
    prompt_length: int = 1,
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
        max_nodes=depth,
    )


def propose(drafter: NGramDrafter, *requests: DraftRequest) -> list[int]:
    """The draft of the last of them."""
    drafter.prepare_draft_tokens(ScheduledRequests(list(requests)))
    return requests[-1].py_draft_tokens


def grow(drafter: NGramDrafter, shown: DraftRequest, tokens: Sequence[int]) -> list[int]:
    """The draft after the last of ``tokens``, which arrive one by one."""
    for token in tokens:
        shown.tokens.append(token)
        propose(drafter, shown)
    return shown.py_draft_tokens


def slow(tokens: list[int], sizes: int, length: int, keep_all: bool, oldest: bool) -> list[int]:
    """The same, read off the whole text: the longest n-gram's longest matches, each by itself."""
    for size in range(min(sizes, len(tokens) - 1), 0, -1):
        pattern = tokens[-size:]
        found = [
            tokens[last + 1 : last + 1 + length]
            for last in range(size - 1, len(tokens) - 1)
            if tokens[last + 1 - size : last + 1] == pattern
        ]
        longest = max(map(len, found), default=0)
        found = [match for match in found if len(match) == longest]
        if not found:
            continue
        if oldest or not keep_all:
            return found[0]
        # a match that is seen again keeps its place
        return [match for i, match in enumerate(found) if match not in found[:i]][-1]
    return []


@pytest.mark.parametrize(("oldest", "expected"), [(True, [3, 4, 1]), (False, [5, 1, 2])])
def test_the_oldest_or_the_newest_match_is_proposed(oldest, expected):
    assert propose(NGramDrafter(3, 2, is_use_oldest=oldest), request(LOOP)) == expected


@pytest.mark.parametrize("oldest", [True, False])
def test_with_one_match_old_or_new_is_the_same(oldest):
    drafter = NGramDrafter(3, 2, is_use_oldest=oldest, is_keep_all=False)
    assert propose(drafter, request(LOOP)) == [3, 4, 1]


@pytest.mark.parametrize(("max_len", "expected"), [(1, [3]), (0, [])])
def test_a_draft_never_exceeds_the_limit_of_its_request(max_len, expected):
    assert propose(NGramDrafter(3, 2), request(LOOP, depth=max_len)) == expected


def test_a_draft_never_exceeds_the_nodes_of_its_request():
    shown = request(LOOP)
    shown.max_nodes = 2
    assert propose(NGramDrafter(3, 2), shown) == [3, 4]


@pytest.mark.parametrize(("public", "expected"), [(True, [12, 13, 14]), (False, [])])
def test_a_public_pool_answers_other_requests_and_a_private_one_does_not(public, expected):
    drafter = NGramDrafter(3, 2, is_public_pool=public)
    propose(drafter, request([10, 11, 12, 13, 14]))
    assert propose(drafter, request([10, 11])) == expected


@pytest.mark.parametrize("oldest", [True, False])
def test_the_newest_match_is_not_cut_short_where_a_longer_one_is_known(oldest):
    """TensorRT-LLM answers [9, 7]: what it saw of the newest match when that was still growing."""
    drafter = NGramDrafter(3, 2, is_use_oldest=oldest)
    assert grow(drafter, request([7]), [8, 9, 7, 8, 9, 7, 8]) == [9, 7, 8]


def test_a_run_of_one_token_is_continued_as_far_as_it_is_long():
    assert grow(NGramDrafter(4, 2), request([5]), [5, 5]) == [5]
    assert grow(NGramDrafter(4, 2), request([5]), [5] * 5) == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("tokens", "size", "length", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, 3, [4, 1, 2]),
        ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 4, 2, [1, 2]),
        ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 2, [100, 1]),
        ([1, 2, 3, 4, 5, 6], 4, 2, []),
        ([1], 4, 2, []),
    ],
)
def test_the_longest_ngram_wins_and_what_is_new_finds_nothing(tokens, size, length, expected):
    assert propose(NGramDrafter(length, size), request(tokens)) == expected


@settings(deadline=None, max_examples=150)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    sizes=st.integers(1, 4),
    length=st.integers(1, 5),
    keep_all=st.booleans(),
    oldest=st.booleans(),
)
def test_it_proposes_what_a_search_of_the_whole_text_finds(tokens, sizes, length, keep_all, oldest):
    drafter = NGramDrafter(length, sizes, is_keep_all=keep_all, is_use_oldest=oldest)
    shown = request(tokens[:1])
    for end in range(1, len(tokens) + 1):
        grow(drafter, shown, tokens[len(shown.tokens) : end])
        expected = slow(tokens[:end], sizes, length, keep_all, oldest)
        assert propose(drafter, shown) == expected


def test_one_match_per_pattern_is_kept_if_not_all():
    tokens = [1, 2, 9, 1, 3, 9, 1, 4, 9, 9]
    for keep_all, oldest, expected in (
        (True, True, [(2, 9), (3, 9), (4, 9)]),
        (False, True, [(2, 9)]),
        (False, False, [(2, 9)]),
    ):
        drafter = NGramDrafter(2, 1, is_keep_all=keep_all, is_use_oldest=oldest)
        propose(drafter, request(tokens))
        assert drafter.pool.matches("", [1]) == expected


@pytest.mark.parametrize(("oldest", "answer"), [(True, 0), (False, 199)])
def test_a_common_pattern_keeps_a_bounded_number_of_matches(oldest, answer):
    pool = NGramPool(1, 1, keep_all=True, use_oldest=oldest, max_size=10_000)
    tokens = [token for other in range(200) for token in (1000, other)]
    pool.learn("", tokens, 0, len(tokens) - 1)
    assert len(pool.matches("", [1000])) == MAX_MATCHES
    assert list(pool.look_up("", [7, 1000])) == [answer]


def test_a_finished_text_is_known_to_its_end_and_gives_way_to_longer_matches():
    drafter = NGramDrafter(3, 2)
    first, second = request([1, 2, 3, 4]), request([9, 1, 2, 3])
    propose(drafter, first)
    assert propose(drafter, second) == []  # in a running text a match counts when it is complete
    first.tokens.append(5)
    drafter.release(first)
    assert propose(drafter, second) == [4, 5]
    propose(drafter, request([2, 3, 6, 7, 8]))
    assert propose(drafter, second) == [6, 7, 8]


def test_the_cut_end_of_a_text_is_not_taken_beside_longer_matches():
    drafter = NGramDrafter(3, 2, is_use_oldest=False)
    propose(drafter, request([2, 3, 6, 7, 8]))
    cut = request([2, 3, 4])
    propose(drafter, cut)
    drafter.release(cut)
    assert propose(drafter, request([9, 2, 3])) == [6, 7, 8]


def test_siblings_learn_their_prompt_once_and_each_its_own_output(monkeypatch):
    prompt = [1, 2, 3, 4, 5, 6]
    drafter = NGramDrafter(2, 1)
    learn, learnt = drafter.pool.learn, []

    def spy(owner, tokens, start, stop):
        learnt.append((start, stop))
        learn(owner, tokens, start, stop)

    monkeypatch.setattr(drafter.pool, "learn", spy)
    siblings = [request([*prompt, new], group=5, prompt_length=6) for new in (7, 8)]
    propose(drafter, *siblings)
    assert learnt == [(0, 5), (4, 5)]
    for sibling, new in zip(siblings, (70, 80), strict=True):
        grow(drafter, sibling, [new, 0])
    assert drafter.pool.matches("", [5]) == [(6, 7), (6, 8)]
    assert drafter.pool.matches("", [8]) == [(80, 0)]


def test_tenants_have_pools_of_their_own():
    drafter = NGramDrafter(3, 2)
    propose(drafter, request([10, 11, 12, 13, 14], salt="a"))
    assert propose(drafter, request([10, 11], salt="b")) == []
    assert propose(drafter, request([10, 11], salt="a")) == [12, 13, 14]


def test_a_private_pool_goes_with_its_request():
    drafter = NGramDrafter(3, 2, is_public_pool=False)
    shown = request(LOOP)
    propose(drafter, shown)
    assert len(drafter.pool)
    drafter.release(shown)
    drafter.release(shown)
    assert not len(drafter.pool)
    assert not drafter.pool.owners


def test_what_was_used_longest_ago_leaves_first():
    pool = NGramPool(1, 1, keep_all=True, use_oldest=True, max_size=4)
    pool.learn("busy", [1, 2, 3], 0, 2)
    pool.learn("idle", [1, 2, 3], 0, 2)
    assert list(pool.look_up("busy", [0, 1])) == [2]
    pool.learn("new", [5, 6], 0, 1)
    assert (pool.matches("idle", [1]), pool.matches("idle", [2])) == ([], [(3,)])
    pool.learn("new", [7, 8], 0, 1)
    assert pool.owners == ["busy", "new"]
    pool.learn("new", [9, 10], 0, 1)
    assert (pool.matches("busy", [2]), pool.matches("busy", [1])) == ([], [(2,)])
    assert len(pool) == 4


def test_a_pattern_that_is_seen_again_counts_as_used():
    pool = NGramPool(1, 1, keep_all=True, use_oldest=True, max_size=2)
    pool.learn("", [1, 2, 3], 0, 2)
    pool.learn("", [1, 2], 0, 1)
    pool.learn("", [5, 6], 0, 1)
    assert [pool.matches("", [pattern]) for pattern in (1, 2, 5)] == [[(2,)], [], [(6,)]]


def test_ten_thousand_requests_of_many_tenants_stay_in_bounds():
    random.seed(0)
    drafter = NGramDrafter(3, 2, max_pool_size=500)
    for number in range(10_000):
        shown = request(random.choices(range(50), k=8), salt=str(number % 700))
        propose(drafter, shown)
        drafter.release(shown)
    assert 400 < len(drafter.pool) <= 500
    assert len(drafter.pool.owners) <= 500
    assert drafter.idle


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_draft_follows_the_last_token_in_texts_of_the_same_tenant(data):
    """Whatever the history: requests come, grow and go, tenants mix, the pool overflows."""
    public, bound = data.draw(st.booleans()), data.draw(st.integers(1, 60))
    drafter = NGramDrafter(
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 3)),
        is_keep_all=data.draw(st.booleans()),
        is_use_oldest=data.draw(st.booleans()),
        is_public_pool=public,
        max_pool_size=bound,
    )
    texts: list[DraftRequest] = []
    live: list[DraftRequest] = []
    for _ in range(data.draw(st.integers(1, 12))):
        event = data.draw(st.sampled_from(["come", "grow", "go"])) if live else "come"
        tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        if event == "come":
            shown = request(tokens, data.draw(st.sampled_from("ab")), prompt_length=len(tokens))
            texts.append(shown)
            live.append(shown)
        elif event == "grow":
            data.draw(st.sampled_from(live)).tokens.extend(tokens)
        else:
            drafter.release(live.pop())
        for shown in live:
            shown.max_draft_len = data.draw(st.integers(0, 5))
            shown.draft = type(shown.draft)(())
        drafter.prepare_draft_tokens(ScheduledRequests(live))
        assert len(drafter.pool) <= bound
        for shown in live:
            draft = shown.py_draft_tokens
            assert len(draft) <= shown.max_draft_len
            wanted = [shown.tokens[-1], *draft]
            allowed = [t for t in texts if t.params == shown.params] if public else [shown]
            assert any(
                text.tokens[i : i + len(wanted)] == wanted
                for text in allowed
                for i in range(len(text.tokens))
            )


@pytest.mark.parametrize(
    "wrong", [{"max_draft_len": 0}, {"max_matching_ngram_size": 0}, {"max_pool_size": 0}]
)
def test_sizes_below_one_are_refused_by_name(wrong):
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        NGramDrafter(**{"max_draft_len": 3, **wrong})
