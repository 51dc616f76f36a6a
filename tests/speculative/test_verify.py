"""Verification: worked cases, agreement with the reference implementation, and bad drafts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forethought.config.sampling import SamplingParams
from forethought.config.tree import TreeChoices
from forethought.model.sampling import TokenContext, logits_to_probs, sample, uniform_at
from forethought.reference.engine import Draft as ReferenceDraft
from forethought.reference.engine import RandomSource
from forethought.reference.engine import verify as reference_verify
from forethought.speculative.drafter import NO_DRAFT, DeviceTokens, Draft, DraftKind
from forethought.speculative.verify import verify as verification
from forethought.speculative.verify.accept import VerificationResult, verify_argmax
from forethought.speculative.verify.rejection import DrawnDraft, accept_drawn
from forethought.speculative.verify.rules import SyntheticAcceptance
from forethought.speculative.verify.unread_drafts import read_drafts
from forethought.speculative.verify.verify import (
    VerificationRequest,
    verify,
)

GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams()
KINDS = list(DraftKind)
BROKEN = [math.nan, math.inf, -math.inf]
RANDOM = [DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT]


def request(
    draft: Draft, params: SamplingParams, begin: int = 0, seed: int = 0, position: int = 0
) -> VerificationRequest:
    """A request whose rows follow each other, each node with its own prefix."""
    prefixes: list[list[int]] = [[]]
    for node, token in enumerate(draft.tokens):
        prefixes.append([*prefixes[1 + draft.parent(node)], token])
    contexts = [TokenContext(params, (), prefix, frozenset({1})) for prefix in prefixes]
    rows = range(begin, begin + 1 + len(draft))
    return VerificationRequest(draft, rows, contexts, seed, 0, position)


def result(
    logits: Tensor, draft: Draft, params: SamplingParams = GREEDY, seed: int = 0
) -> VerificationResult:
    return verify(logits, [request(draft, params, seed=seed)])[0]


def certain(*tokens: int, width: int = 128) -> Tensor:
    """Logits of rows that leave no doubt."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), width).float() * 100


# --- greedy --------------------------------------------------------------------------------------

CHOICES = [[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0]]
CHOICES += [[0, 0, 0], [0, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("most_probable", "path", "tokens"),
    [
        ([31, *range(102, 114)], [], [31]),
        ([11, 15, *range(102, 113)], [0, 4], [11, 15, 105]),
        ([11, 14, 102, 103, 20, *range(105, 113)], [0, 3, 9], [11, 14, 20, 110]),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_greedy_walk_goes_to_the_child_that_is_most_probable(most_probable, path, tokens, kind):
    """Worked cases of a tree of twelve, whose tokens are 11 to 22 in order of length and rank."""
    parents = TreeChoices.parse(CHOICES).parents
    q = None if kind is DraftKind.POINT else torch.full((12, 128), 1 / 128)
    found = result(certain(*most_probable), Draft(range(11, 23), parents, kind, q))
    assert (found.path, found.tokens, found.logprobs) == (path, tokens, None)


def test_no_draft_is_plain_decoding():
    logits = torch.randn(3, 8)
    sampling_params = [GREEDY, PLAIN, replace(PLAIN, logprobs=1)]
    given = [request(NO_DRAFT, params, row, seed=row) for row, params in enumerate(sampling_params)]
    plain = sample(
        logits, [c.contexts[0] for c in given], [uniform_at(row, 0, 0) for row in range(3)]
    )
    found = verify(logits, given)
    assert [v.tokens for v in found] == [[token] for token in plain.tokens]
    assert [v.path for v in found] == [[], [], []]
    assert [v.logprobs for v in found] == [None, None, [plain.logprobs[2]]]
    assert verify(logits, []) == []


# --- points --------------------------------------------------------------------------------------

WIDTH = 7
TABLE = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))
"""A model that looks at the last token only: the logits after each token."""


def plainly(params: SamplingParams, seed: int, count: int) -> tuple[list[int], list[object]]:
    """What plain decoding draws after token 0, one token at a time."""
    output: list[int] = []
    logprobs: list[object] = []
    for position in range(count):
        row = TABLE[output[-1] if output else 0].unsqueeze(0)
        context = TokenContext(params, (0,), list(output), frozenset({1}))
        choice = sample(row, [context], [uniform_at(seed, 0, position)])
        output += choice.tokens
        logprobs += choice.logprobs
    return output, logprobs


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_tokens=st.sampled_from([0, 3]),
    logit_bias=st.sampled_from([None, {2: 1.5}]),
    logprobs=st.sampled_from([None, 0, 2]),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sampling_params, st.integers(0, 2**32), st.data())
def test_points_change_nothing_about_what_is_drawn(params: SamplingParams, seed: int, data):
    """Token for token and figure for figure, whatever is proposed; often the truth is among it."""
    truth, figures = plainly(params, seed, 12)
    output: list[int] = []
    logprobs: list[object] = []
    steps = 0
    while len(output) < 12:
        size = data.draw(st.integers(0, 5))
        parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(size))
        tokens: list[int] = []
        depths = [0]
        for node in range(size):
            depths.append(depths[1 + parents[node]] + 1)
            ahead = min(len(output) + depths[-1] - 1, 11)
            tokens.append(data.draw(st.sampled_from([truth[ahead], *range(WIDTH)])))
        draft = Draft(tokens, parents)
        given = request(draft, params, seed=seed, position=len(output))
        for context in given.contexts:
            context.prompt, context.output = (0,), [*output, *context.output]
        given.rows = [(c.output or [0])[-1] for c in given.contexts]
        (found,) = verify(TABLE, [given])
        assert len(found.tokens) == len(found.path) + 1
        output += found.tokens
        logprobs += found.logprobs or [None] * len(found.tokens)
        steps += 1
    assert output[:12] == truth
    assert logprobs[:12] == figures
    assert steps <= 12


def test_the_right_points_are_all_accepted():
    truth, _ = plainly(PLAIN, 5, 4)
    rows = TABLE[[0, *truth[:3]]]
    assert result(rows, Draft(truth[:3]), PLAIN, seed=5).path == [0, 1, 2]
    assert result(rows, Draft(truth[:3]), PLAIN, seed=5).tokens == truth


def test_tokens_behind_the_root_are_drawn_only_if_it_accepts_a_child(monkeypatch):
    rows: list[int] = []
    draw = verification.draw_tokens

    def counted(logits, contexts, uniforms):
        rows.append(len(contexts))
        return draw(logits, contexts, uniforms)

    monkeypatch.setattr(verification, "draw_tokens", counted)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    logits = torch.cat([certain(5, 6, 7), certain(5, 6, 7)])
    good, bad = Draft([5, 6]), Draft([9, 6])
    context = TokenContext(params, (), (), frozenset())
    requests = [
        VerificationRequest(draft, range(at, at + 3), [context] * 3, seed=1, stream=0, position=4)
        for at, draft in ((0, good), (3, bad))
    ]
    results = verify(logits, requests)
    assert [each.tokens for each in results] == [[5, 6, 7], [5]]
    assert rows == [2, 2], "two roots, then the two nodes of the first draft"
    rows.clear()
    verify(logits[3:], [replace(requests[1], rows=range(3))])
    assert rows == [1]


def test_each_node_is_verified_with_its_own_prefix():
    """One token is as good as any until it has been said: then the penalty sends it away."""
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    logits = torch.tensor([[0.5, 0.4, 0.0, 0.0]]).expand(5, 4)
    #            root -> 0 (said: 1 is next) -> 1 (both said: 2 is next) -> 2
    draft = Draft([0, 0, 1, 2], (-1, 0, 0, 2))
    found = result(logits, draft, params)
    assert (found.path, found.tokens) == ([0, 2, 3], [0, 1, 2, 3])


# --- the reference implementation ----------------------------------------------------------------


weights = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 3.0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, VerificationRequest, ReferenceDraft]:
    """A draft with logits, and the same on lists; now and then q is no distribution."""
    size = draw(st.integers(0, 6))
    kind = draw(st.sampled_from(KINDS))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
    tokens = [draw(st.integers(0, WIDTH - 1)) for _ in range(size)]
    logits = torch.tensor(
        [[draw(st.integers(-4, 4)) / 2 for _ in range(WIDTH)] for _ in range(size + 1)]
    )
    ids = draw(st.sampled_from([None, [5, 0, 3], [6, 5, 4, 3, 2, 1, 0]]))
    odd = draw(st.sampled_from([None, math.nan, math.inf, -1.0]))
    columns = len(ids or range(WIDTH))
    q = [[draw(weights) for _ in range(columns)] for _ in range(size)]
    if odd is not None and size:
        q[draw(st.integers(0, size - 1))][draw(st.integers(0, columns - 1))] = odd
    wide = [[0.0] * WIDTH for _ in range(size)]
    for row, distribution in zip(wide, q, strict=True):
        for column, weight in enumerate(distribution):
            row[ids[column] if ids else column] = weight
    distributions = None if kind is DraftKind.POINT else torch.tensor(q).reshape(size, columns)
    draft = Draft(tokens, parents, kind, distributions, None if ids is None else torch.tensor(ids))
    seed, position = draw(st.integers(0, 2**32)), draw(st.integers(0, 50))
    given = request(draft, draw(sampling_params), seed=seed, position=position)
    return logits, given, ReferenceDraft(tokens, parents, kind, wide)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_the_vectorised_result_is_that_of_the_reference_implementation(case):
    logits, given, plain = case
    distributions = logits_to_probs(logits, given.contexts).double().tolist()
    again = [replace(given, seed=given.seed + more) for more in range(12)]
    for one, found in zip(again, verify(logits, again), strict=True):
        source = RandomSource(one.seed, 0, one.position)
        expected = reference_verify(lambda node: distributions[1 + node], plain, source)
        assert (found.path, found.tokens) == expected


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(cases(), min_size=2, max_size=5), st.sampled_from([1, 60, 2**19]))
def test_a_draft_has_the_same_result_alone_and_beside_others(several, cached):
    alone = [verify(logits, [each])[0] for logits, each, _ in several]
    begin = 0
    for logits, each, _ in several:
        each.rows = range(begin, begin + len(logits))
        begin += len(logits)
    together = torch.cat([logits for logits, _, _ in several])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_MAX_GROUP_LOGITS", cached)
        assert verify(together, [each for _, each, _ in several]) == alone
        backwards = verify(together, [each for _, each, _ in several[::-1]])
    assert backwards == alone[::-1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(cases(), min_size=1, max_size=4), st.integers(0, 2**8 - 1))
def test_drafts_that_are_on_the_device_are_verified_as_those_on_the_host(several, which):
    """Whatever was drawn how, beside drafts on the host; the tokens are known afterwards."""
    begin, there = 0, []
    for number, (logits, each, _) in enumerate(several):
        each.rows = range(begin, begin + len(logits))
        begin += len(logits)
        tokens = DeviceTokens(torch.tensor(each.draft.tokens, dtype=torch.int64))
        is_moved = bool(which >> number & 1) and len(tokens)
        draft = replace(each.draft, tokens=tokens) if is_moved else each.draft
        there.append(replace(each, draft=draft))
    together = torch.cat([logits for logits, _, _ in several])
    assert verify(together, there) == verify(together, [each for _, each, _ in several])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(cases(), min_size=1, max_size=4), st.data())
def test_greedy_drafts_are_verified_by_argmax_as_by_verification(several, data):
    """Chains and trees, tokens on the host or the device, logits that are finite or not."""
    requests, begin = [], 0
    for _, each, _ in several:
        draft = each.draft
        is_chain = data.draw(st.booleans())
        tokens = DeviceTokens(torch.tensor(draft.tokens, dtype=torch.int64))
        there = bool(len(draft)) and data.draw(st.booleans())
        draft = replace(
            draft,
            tokens=tokens if there else draft.tokens,
            parents=None if is_chain else draft.parents,
        )
        requests.append(request(draft, GREEDY, begin))
        begin += 1 + len(draft)
    together = torch.cat([logits for logits, _, _ in several])
    for row in data.draw(st.sets(st.integers(0, begin - 1), max_size=2)):
        together[row] = data.draw(st.sampled_from(BROKEN))
    found = verify_argmax(together, [each.draft for each in requests])
    assert found == verify(together, requests)


def test_drafts_on_the_device_are_read_in_one_transfer():
    reads = []

    class Watched(DeviceTokens):
        def set(self, tokens):
            reads.append(tokens)
            super().set(tokens)

    drafts = [Draft(Watched(torch.tensor(ids))) for ids in ([4, 5], [6])]
    read_drafts([*drafts, drafts[0], Draft([9])])
    assert [list(draft.tokens) for draft in drafts] == reads == [[4, 5], [6]]
    read_drafts(drafts)
    assert len(reads) == 2, "nothing is read twice"


# --- drafts that were drawn at random -------------------------------------------------------------


def drawn_draft(
    kind: DraftKind, tokens: Sequence[int], q: Sequence[float], **fields: object
) -> Draft:
    """Children of the root, all drawn from one q."""
    distributions = torch.tensor([list(q)] * len(tokens))
    return Draft(tokens, (-1,) * len(tokens), kind, distributions, **fields)


def log(*probs: float) -> Tensor:
    """Logits of one distribution, for a root and up to three nodes."""
    return torch.tensor([probs]).log().expand(4, -1)


@pytest.mark.parametrize("kind", RANDOM)
def test_what_was_drawn_from_the_targets_own_distribution_is_always_accepted(kind):
    probs = (0.4, 0.3, 0.2, 0.1)
    for seed in range(200):
        for token in range(4):
            assert result(log(*probs), drawn_draft(kind, [token], probs), PLAIN, seed).path == [0]


@pytest.mark.parametrize("kind", RANDOM)
def test_nothing_forbidden_comes_out(kind):
    """Token 0 has no probability, however much the drafter likes it."""
    draft = drawn_draft(kind, [0, 0], (0.9, 0.05, 0.05))
    drawn = {result(log(0.0, 0.5, 0.5), draft, PLAIN, seed).tokens[0] for seed in range(300)}
    assert drawn == {1, 2}


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize(
    "q", [[math.nan] * 4, [0.0] * 4, [-1.0] * 4, [math.inf] * 4, [0.0, 1.0, 0.0, 0.0]]
)
def test_a_token_that_q_gives_no_mass_counts_as_a_point(kind, q):
    """Accepted with its own probability, over 2,000 seeds within four standard deviations."""
    probs = (0.2, 0.3, 0.4, 0.1)
    given = [
        VerificationRequest(
            drawn_draft(kind, [0], q),
            [0, 1],
            [TokenContext(PLAIN, (), (), frozenset())] * 2,
            s,
            0,
            0,
        )
        for s in range(2000)
    ]
    found = verify(log(*probs), given)
    counts = [sum(v.tokens[0] == token for v in found) for token in range(4)]
    for count, p in zip(counts, probs, strict=True):
        assert abs(count - 2000 * p) < 4 * math.sqrt(2000 * p * (1 - p))
    assert all((v.tokens[0] == 0) == (v.path == [0]) for v in found)


def test_where_the_distributions_are_equal_nothing_is_left_but_the_distribution_itself():
    """Only rounding could reject there, and what is drawn then must still be a token."""
    distributions = torch.tensor([[0.5, 0.25, 0.25, 0.0]] * 2)
    draft = drawn_draft(DraftKind.IID, [0], distributions[0].tolist())
    assert accept_drawn(distributions, [DrawnDraft(draft, 0, [0.999])]).tolist() == [False, True]
    assert distributions.tolist() == [[0.5, 0.25, 0.25, 0.0]] * 2


def test_not_even_the_lowest_uniform_sample_accepts_what_the_target_forbids():
    distributions = torch.tensor([[0.5, 0.5, 0.0]] * 2)
    draft = drawn_draft(DraftKind.IID, [2], [0.2, 0.2, 0.6])
    assert accept_drawn(distributions, [DrawnDraft(draft, 0, [0.0])]).tolist() == [False, False]


def test_weights_are_normalised_to_a_distribution():
    probs = (0.4, 0.3, 0.2, 0.1)
    for seed in range(50):
        one = result(
            log(*probs), drawn_draft(DraftKind.IID, [3], (0.1, 0.2, 0.3, 0.4)), PLAIN, seed
        )
        two = result(
            log(*probs), drawn_draft(DraftKind.IID, [3], (1.0, 2.0, 3.0, 4.0)), PLAIN, seed
        )
        assert one == two


@pytest.mark.parametrize("kind", RANDOM)
def test_columns_of_a_reduced_vocabulary_are_the_ids_that_they_stand_for(kind):
    probs, ids = (0.1, 0.2, 0.3, 0.4), torch.tensor([3, 1])
    for seed in range(100):
        narrow = drawn_draft(kind, [3, 1], (0.75, 0.25), ids=ids)
        wide = drawn_draft(kind, [3, 1], (0.0, 0.25, 0.0, 0.75))
        found = [result(log(*probs), draft, PLAIN, seed) for draft in (narrow, wide)]
        assert found[0] == found[1]


def test_a_random_draft_in_the_batch_leaves_greedy_and_point_requests_as_they_are():
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    q = torch.full((2, 6), 1 / 6)
    quiet = [request(Draft([2, 3]), GREEDY, 0), request(Draft([2, 3]), PLAIN, 3, seed=4)]
    random = request(Draft([2, 3], None, DraftKind.IID, q), PLAIN, 6, seed=8)
    assert verify(logits, [*quiet, random])[:2] == verify(logits, quiet)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_the_models_own_distribution_where_each_token_was_decided(kind):
    logits = 0.3 * torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(logprobs=1, temperature=0.9, logit_bias={0: 0.5})
    q = None if kind is DraftKind.POINT else torch.full((3, 3), 1 / 3)
    draft = Draft([2, 1, 2], (-1, -1, 0), kind, q)
    lengths = set()
    for seed in range(40):
        found = result(logits, draft, params, seed)
        rows = [0, *(1 + node for node in found.path)]
        expected = logits.log_softmax(dim=-1)
        for row, token, entries in zip(rows, found.tokens, found.logprobs, strict=True):
            assert entries[token].logprob == pytest.approx(expected[row, token].item())
            assert int(expected[row].argmax()) in entries
        lengths.add(len(found.tokens))
    assert lengths == {1, 2, 3}


def test_only_requests_that_ask_get_logprobs():
    logits = torch.randn(4, 6)
    asks = request(Draft([2]), SamplingParams(logprobs=0), 0)
    not_asks = request(Draft([2]), PLAIN, 2)
    first, second = verify(logits, [asks, not_asks])
    assert len(first.logprobs) == len(first.tokens)
    assert second.logprobs is None


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_drafts_are_left_as_they_were(kind):
    logits, q = torch.randn(3, 6), torch.full((2, 6), 0.5)
    before, q_before = logits.clone(), q.clone()
    draft = Draft([1, 2], None, kind, None if kind is DraftKind.POINT else q)
    result(logits, draft, SamplingParams(frequency_penalty=1.0))
    assert torch.equal(logits, before)
    assert torch.equal(q, q_before)


def test_draws_do_not_touch_the_random_state_of_torch():
    state = torch.random.get_rng_state()
    result(torch.zeros(2, 6), drawn_draft(DraftKind.IID, [1], [1 / 6] * 6), PLAIN)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_the_same_on_a_gpu(kind):
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    q = torch.softmax(torch.randn(4, 50, generator=torch.Generator().manual_seed(4)), dim=-1)
    draft = Draft([7, 9, 11, 13], (-1, -1, 0, 0), kind, None if kind is DraftKind.POINT else q)
    for seed in range(50):
        for params in (GREEDY, PLAIN, replace(PLAIN, top_p=0.8)):
            host = result(logits, draft, params, seed)
            assert result(logits.cuda(), draft, params, seed) == host


# --- uniform samples -----------------------------------------------------------------------------


def test_the_uniform_sample_of_a_token_never_changes():
    """Seeded outputs depend on these."""
    assert uniform_at(7, 0, 3) == uniform_at(7, 0, 3, 0) == 0.32541466495141846
    assert uniform_at(-1, 2**70 + 1, 5) == 0.0785190984849522


def test_every_use_of_a_position_has_its_own_uniform_sample():
    uses = itertools.product((0, 9), (0, 1), (0, 5), (0, 1, 2, 257, 258))
    uniforms = [uniform_at(*use) for use in uses]
    assert len(set(uniforms)) == len(uniforms)


# --- logits that are not finite ------------------------------------------------------------------


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("lost", range(5))
@pytest.mark.parametrize("params", [GREEDY, PLAIN, replace(PLAIN, logprobs=1, top_k=3)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_ends_before_logits_that_are_not_finite(kind, params, lost, value):
    """The last accepted token counts as drawn: its node is computed again, as the next root."""
    logits = certain(11, 12, 13, 14, 15)
    logits[lost] = value
    q = None if kind is DraftKind.POINT else certain(11, 12, 13, 14).softmax(-1)
    found = result(logits, Draft([11, 12, 13, 14], None, kind, q), params)
    assert found.tokens == [11, 12, 13, 14][:lost]
    assert found.path == list(range(lost - 1))
    if params.logprobs is not None and lost:
        assert [min(entry) for entry in found.logprobs] == found.tokens


@pytest.mark.parametrize("params", [GREEDY, PLAIN])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_not_finite_off_the_path_change_nothing(kind, params):
    parents, tokens = (-1, -1, 0, 1), [20, 11, 21, 12]
    q = None if kind is DraftKind.POINT else torch.full((4, 128), 1 / 128)
    logits = certain(11, 30, 12, 30, 13)
    whole = result(logits, Draft(tokens, parents, kind, q), params)
    assert (whole.path, whole.tokens) == ([1, 3], [11, 12, 13])
    logits[1] = logits[3] = math.nan
    assert result(logits, Draft(tokens, parents, kind, q), params) == whole


@pytest.mark.parametrize("lost", range(3))
def test_no_rule_accepts_past_logits_that_are_not_finite(lost):
    logits = torch.zeros(3, 128)
    logits[lost] = math.nan
    accepting = SyntheticAcceptance.of_rate(1.0)
    given = replace(request(Draft([11, 12]), PLAIN), rule=accepting)
    [found] = verify(logits, [given])
    assert found.tokens == [11, 12][:lost]
    assert found.path == list(range(lost - 1))
