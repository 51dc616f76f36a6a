"""ReDrafter's drafts: the beams of a plain search, packed into one tree, from the right state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engines import drain, engine, expect_empty, load, outputs
from forethought.backends.cpu.heads import NativeBeams, NativeBeamSearch
from forethought.backends.cpu.library import find_compiler
from forethought.backends.cpu.network import NativeNetwork
from forethought.config.drafters import ReDrafterDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine
from forethought.errors import ModelError, ParameterError
from forethought.kv.pool import PagePool
from forethought.kv.table import PageTable
from forethought.speculative import registry
from forethought.speculative.drafter import DraftRequest, ScheduledRequests, Target
from forethought.speculative.drafters.redrafter import (
    Beams,
    BeamSearch,
    last_beams,
    pack,
    top_beams_tree,
)
from forethought.speculative.heads.redrafter import (
    DraftRecurrence,
    ReDrafterHead,
    ReDrafterShape,
    beam_head,
)
from models import VOCAB, prompts
from redrafter_heads import HIDDEN, make_head, random_head

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = prompts((4, 9, 17))
HEADS: list[dict[str, Any]] = [
    {},
    {"exit": 2 * HIDDEN},
    {"blocks": 0},
    {"exit": 2 * HIDDEN, "blocks": 1, "recurrent": False},
    {"vocab": 7},
]


# ---- the search -----------------------------------------------------------------------------


def searched(
    head: ReDrafterHead, vocab: Tensor, contexts: Tensor, roots: Sequence[int], **how: Any
) -> list[Beams]:
    fast = DraftRecurrence(head, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        search = BeamSearch(fast, lambda ids: vocab[ids])
        return search(contexts, roots, **how)


def paths(beams: Beams) -> list[list[int]]:
    """Every beam written out."""
    written: list[list[int]] = []
    for token, parent in zip(beams.tokens, beams.parents, strict=True):
        written.append([*(written[parent] if parent >= 0 else ()), token])
    return written


def score(head: ReDrafterHead, vocab: Tensor, context: Tensor, path: Sequence[int]) -> float:
    """Log-probability of all tokens of ``path`` behind its first one."""
    total, state = 0.0, torch.zeros(HIDDEN)
    with torch.inference_mode():
        for token, following in itertools.pairwise(path):
            state = head.advance(vocab[token], state)
            rows = range(head.shape.vocab) if head.token_map is None else head.token_map.tolist()
            total += float(head(context, state).log_softmax(-1)[rows.index(following)])
    return total


def plainly(
    head: ReDrafterHead, vocab: Tensor, context: Tensor, root: int, width: int, length: int
) -> list[list[int]]:
    """The search of one request, each candidate scored from scratch; what it keeps."""
    beams: list[list[int]] = [[]]
    kept: list[list[int]] = []
    for _ in range(length):
        longer = [[*beam, token] for beam in beams for token in range(head.shape.vocab)]
        longer.sort(key=lambda beam: -score(head, vocab, context, [root, *beam]))
        beams = longer[:width]
        kept += beams
    return kept


def test_beams_are_those_of_a_plain_search_whatever_the_company() -> None:
    head, vocab = make_head(vocab=7), torch.randn(7, HIDDEN)
    contexts, roots = torch.randn(3, HIDDEN), [2, 0, 5]
    found = searched(head, vocab, contexts, roots, width=3, length=4)
    for row, root in enumerate(roots):
        assert paths(found[row]) == plainly(head, vocab, contexts[row], root, 3, 4)
        assert found[row].ends == [0, 3, 6, 9, 12]


def test_a_search_that_drops_nothing_finds_every_continuation() -> None:
    head, vocab, context = make_head(vocab=4), torch.randn(4, HIDDEN), torch.randn(1, HIDDEN)
    [found] = searched(head, vocab, context, [1], width=64, length=3)
    for length in (1, 2, 3):
        these = paths(found)[found.ends[length - 1] : found.ends[length]]
        every = itertools.product(range(4), repeat=length)
        assert sorted(these) == [list(path) for path in every]
        scores = [score(head, vocab, context[0], [1, *path]) for path in these]
        assert all(before >= after - 1e-5 for before, after in itertools.pairwise(scores))
        assert sum(map(math.exp, scores)) == pytest.approx(1.0, abs=1e-4)


def test_beams_are_ranked_over_all_lengths_none_before_what_it_prolongs() -> None:
    head, vocab, contexts = make_head(vocab=9), torch.randn(9, HIDDEN), torch.randn(2, HIDDEN)
    for row, beams in enumerate(searched(head, vocab, contexts, [1, 2], width=4, length=4)):
        written = paths(beams)
        scores = [score(head, vocab, contexts[row], [row + 1, *path]) for path in written]
        ranked = [scores[beam] for beam in beams.order]
        assert sorted(beams.order) == list(range(16))
        assert all(before >= after - 1e-5 for before, after in itertools.pairwise(ranked))
        for rank, beam in enumerate(beams.order):
            assert beams.parents[beam] in (-1, *beams.order[:rank])


def test_a_head_that_is_sure_ranks_certain_tokens_in_order_of_length() -> None:
    """Where every probability is 1 or 0, beams are as likely as those that they prolong."""
    head = make_head(vocab=5)
    head.lm_head[-1].weight.data *= 1e4
    [beams] = searched(head, torch.randn(5, HIDDEN), torch.randn(1, HIDDEN), [1], width=2, length=4)
    assert beams.order[:4] == [0, 2, 4, 6]


def test_beams_of_no_use_are_not_ranked_and_a_search_for_nothing_else_ends() -> None:
    head, vocab, contexts = make_head(vocab=9), torch.randn(9, HIDDEN), torch.randn(2, HIDDEN)
    whole = searched(head, vocab, contexts, [1, 2], width=4, length=4)
    scores = [
        [score(head, vocab, contexts[n], [n + 1, *path]) for path in paths(whole[n])]
        for n in range(2)
    ]
    floor = sorted(scores[0])[-3] - 1e-4  # three beams of the first request are of use
    cut = searched(head, vocab, contexts, [1, 2], width=4, length=4, min_logprob=floor)
    for beams, every, values in zip(cut, whole, scores, strict=True):
        assert beams.order == [beam for beam in every.order if values[beam] >= floor]
    longest = max(len(path) for n in range(2) for path in paths(cut[n]))
    useful = max(len(paths(cut[n])[beam]) for n in range(2) for beam in cut[n].order)
    assert longest == min(4, useful + 1)  # one more level, to see that nothing follows


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("sizes", HEADS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_beams_found_in_one_call_are_those_of_the_search_in_torch(
    architecture: str, sizes: dict[str, Any], width: int
) -> None:
    """As probable, level by level: beams that are nearly as probable may change places."""
    lm, head = load(architecture), make_head(**sizes)
    if sizes.get("vocab"):
        head.token_map = torch.tensor([90, 3, 17, 8, 100, 55, 2])
    assert isinstance(lm.network, NativeNetwork)
    native = NativeBeamSearch(NativeBeams(beam_head(head), lm.network, torch.float32))
    search = BeamSearch(DraftRecurrence(head, torch.float32, torch.device("cpu")), lm.embed)
    contexts, roots = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1)), [2, 0, 99]
    vocab = lm.embed(torch.arange(VOCAB))

    def scores(beams: Beams, row: int) -> tuple[list[float], list[float]]:
        """Of all beams, and of those in ``order``."""
        every = [score(head, vocab, contexts[row], [roots[row], *path]) for path in paths(beams)]
        return every, [every[beam] for beam in beams.order]

    for some, floor in itertools.product((slice(3), slice(1)), (-math.inf, -9.0, 0.0)):
        how = {"width": width, "length": 4, "min_logprob": floor}
        with torch.inference_mode():
            expected = search(contexts[some], roots[some], **how)
        found = native(contexts[some], roots[some], **how)
        for row, (mine, other) in enumerate(zip(found, expected, strict=True)):
            assert mine.ends == other.ends
            for own, true in zip(scores(mine, row), scores(other, row), strict=True):
                assert own == pytest.approx(true, abs=1e-3)


def test_no_requests_have_no_beams() -> None:
    none = torch.zeros(0, HIDDEN)
    assert searched(make_head(), torch.zeros(VOCAB, HIDDEN), none, [], width=3, length=2) == []


# ---- the tree -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beams", "tokens", "parents"),
    [
        ([[91, 92, 93], [91, 92, 94]], [91, 92, 93, 94], (-1, 0, 1, 1)),
        ([[91, 92], [93, 92]], [91, 92, 93, 92], (-1, 0, -1, 2)),  # only prefixes are shared
        ([[1, 2, 3], [1, 4, 3], [1, 2, 5]], [1, 2, 3, 4, 3, 5], (-1, 0, 1, 0, 3, 1)),
        ([[1, 1], [1, 1]], [1, 1], (-1, 0)),
        ([], [], ()),
    ],
)
def test_what_beams_begin_with_stands_in_the_tree_once(beams, tokens, parents) -> None:
    draft = pack(beams, max_nodes=99)
    assert (draft.tokens, draft.parents) == (tokens, parents)


def test_the_least_likely_beams_are_dropped_where_not_all_fit() -> None:
    beams = [[1, 2, 3], [1, 4, 3], [5, 2, 3], [1, 2, 6]]
    assert pack(beams, 5).tokens == [1, 2, 3, 4, 3]
    assert pack(beams, 4).tokens == [1, 2, 3, 4]  # the end of the last one that begins
    assert pack(beams, 6).tokens == [1, 2, 3, 4, 3, 5]
    assert pack(beams, 0).tokens == []


FOUND = Beams(  # 1 2 | 1-3 1-4 | 1-3-5 1-4-5
    tokens=[1, 2, 3, 4, 5, 5],
    parents=[-1, -1, 0, 0, 2, 3],
    order=[0, 2, 1, 4, 3, 5],
    ends=[0, 2, 4, 6],
)


@pytest.mark.parametrize(
    ("tree", "depth", "most", "tokens", "parents"),
    [
        (last_beams, 3, 9, [1, 3, 5, 4, 5], (-1, 0, 1, 0, 3)),
        (last_beams, 3, 4, [1, 3, 5, 4], (-1, 0, 1, 0)),
        (last_beams, 2, 9, [1, 3, 4], (-1, 0, 0)),
        (last_beams, 1, 9, [1, 2], (-1, -1)),
        (last_beams, 7, 9, [1, 3, 5, 4, 5], (-1, 0, 1, 0, 3)),
        (top_beams_tree, 3, 9, [1, 3, 2, 5, 4, 5], (-1, 0, -1, 1, 0, 4)),
        (top_beams_tree, 3, 4, [1, 3, 2, 5], (-1, 0, -1, 1)),
        (top_beams_tree, 2, 9, [1, 3, 2, 4], (-1, 0, -1, 0)),
        (top_beams_tree, 1, 9, [1, 2], (-1, -1)),
        (top_beams_tree, 7, 9, [1, 3, 2, 5, 4, 5], (-1, 0, -1, 1, 0, 4)),
    ],
)
def test_trees_of_beams_keep_to_depth_and_size(tree, depth, most, tokens, parents) -> None:
    draft = tree(FOUND, depth, most)
    assert (draft.tokens, draft.parents) == (tokens, parents)


BEAMS = st.integers(1, 4).flatmap(
    lambda length: st.lists(st.lists(st.integers(0, 3), min_size=length, max_size=length))
)


@given(BEAMS, st.integers(0, 12))
def test_a_tree_has_the_prefixes_of_its_beams_as_paths_and_nothing_else(
    beams: list[list[int]], most: int
) -> None:
    whole, cut = pack(beams, 99), pack(beams, most)
    paths: list[tuple[int, ...]] = []
    for node, token in enumerate(whole.tokens):
        parent = whole.parent(node)
        assert parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    expected = {tuple(beam[:end]) for beam in beams for end in range(1, len(beam) + 1)}
    assert len(set(paths)) == len(paths)
    assert set(paths) == expected
    assert cut.tokens == whole.tokens[:most]
    assert cut.parents == whole.parents[:most]


# ---- what the head reads --------------------------------------------------------------------


def head_of_states() -> ReDrafterHead:
    """Its logits are the target's own, of the state that it reads, whatever tokens it takes in."""
    unembedding = load("llama").unembed(torch.eye(HIDDEN)).T
    head = ReDrafterHead(ReDrafterShape(HIDDEN, VOCAB, 2 * HIDDEN, blocks=0))
    with torch.no_grad():
        head.lm_head[0].weight[:, :HIDDEN] = unembedding
        head.lm_head[0].weight[:, HIDDEN:] = 0.0
    return head


def head_of_tokens() -> ReDrafterHead:
    """Behind token t it is sure of t + 1, whatever state it reads and whatever came before."""
    embedding = load("llama").embed(torch.arange(VOCAB))
    head = ReDrafterHead(ReDrafterShape(HIDDEN, VOCAB, 2 * HIDDEN, blocks=0))
    taken_in = torch.nn.functional.silu(embedding)
    with torch.no_grad():
        for weight in head.parameters():
            weight.zero_()
        head.rnn_w.weight.copy_(torch.eye(HIDDEN))
        nearest = torch.nn.functional.normalize(taken_in, dim=-1)
        head.lm_head[0].weight[:, HIDDEN:] = 500.0 * nearest.roll(1, 0)
    return head


def drafting(directory: Path, head: ReDrafterHead, **fields: Any) -> ReDrafterDecodingConfig:
    head.save(directory)
    return ReDrafterDecodingConfig(speculative_model=directory, **fields)


class Watched:
    """An engine whose drafts are kept as they were proposed, with the tokens at that time."""

    def __init__(self, config: DecodingBaseConfig, **sizes: Any) -> None:
        self.machine: Engine = engine(speculative=[config], **sizes)
        self.drafts: list[tuple[list[int], list[int], tuple[int, ...]]] = []
        [entry] = self.machine.speculation.drafters
        propose = entry.drafter.prepare_draft_tokens

        def noted(scheduled: ScheduledRequests, manager: Any = None) -> None:
            propose(scheduled, manager)
            for request in scheduled.generation_requests:
                draft = request.draft
                self.drafts.append((list(request.tokens), draft.tokens, draft.parents))

        entry.drafter.prepare_draft_tokens = noted


def test_what_the_head_holds_unlikely_is_left_out_of_drafts() -> None:
    seen = {}
    for floor in (0.0, 0.02):
        config = ReDrafterDecodingConfig(
            speculative_model=random_head(), min_draft_probability=floor
        )
        watched = Watched(config)
        watched.machine.add(PROMPTS[1], GREEDY)
        drain(watched.machine)
        seen[floor] = {len(tokens): drafted for tokens, drafted, _ in watched.drafts}
    assert seen[0.0] != seen[0.02]
    for row, drafted in seen[0.02].items():
        if row in seen[0.0]:  # the most probable come first
            assert drafted == seen[0.0][row][: len(drafted)]


@pytest.mark.parametrize("page_size", [1, 3])
def test_the_state_is_that_which_the_root_was_drawn_from(tmp_path: Path, page_size: int) -> None:
    """One position further on or back, its first choice would be another token than the root."""
    config = drafting(tmp_path, head_of_states(), num_beams=1, draft_len_per_beam=3)
    watched = Watched(config, page_size=page_size, pages=240 // page_size)
    for prompt in PROMPTS:
        watched.machine.add(prompt, GREEDY)
    drain(watched.machine)
    assert len(watched.drafts) > 20
    roots = {tokens[-1] for tokens, _, _ in watched.drafts}
    assert len(roots) > 10  # and not the same one again and again
    for tokens, drafted, _ in watched.drafts:
        assert drafted == [tokens[-1]] * len(drafted)


def test_the_root_is_taken_in_first_and_then_each_drafted_token(tmp_path: Path) -> None:
    config = drafting(tmp_path, head_of_tokens(), num_beams=1, draft_len_per_beam=4)
    watched = Watched(config)
    watched.machine.add(PROMPTS[0], GREEDY)
    drain(watched.machine)
    for tokens, drafted, _ in watched.drafts:
        assert drafted == [(tokens[-1] + 1 + n) % VOCAB for n in range(len(drafted))]


def test_prompts_found_in_the_prefix_cache_are_drafted_for_from_the_start() -> None:
    config = ReDrafterDecodingConfig(speculative_model=random_head())
    first: list[Any] = []
    second: list[Any] = []
    watched = Watched(config)
    for drafts in (first, second):
        watched.machine.add(PROMPTS[2], GREEDY)
        drain(watched.machine)
        drafts += watched.drafts
        watched.drafts.clear()
    assert watched.machine.stats.cached > 0
    assert first == second


def test_a_head_that_reads_in_bfloat16_drafts_too(tmp_path: Path) -> None:
    make_head().to(torch.bfloat16).save(tmp_path)
    fast = DraftRecurrence(
        ReDrafterHead.load(tmp_path, HIDDEN, VOCAB), torch.bfloat16, torch.device("cpu")
    )
    with torch.inference_mode():
        vocab = torch.randn(VOCAB, HIDDEN).bfloat16()
        search = BeamSearch(fast, lambda ids: vocab[ids])
        found = search(torch.randn(2, HIDDEN).bfloat16(), [3, 4], 4, 5)
    assert [len(beams.tokens) for beams in found] == [20, 20]


# ---- in the engine --------------------------------------------------------------------------


def target() -> Target:
    return Target(engine().runner, 64)


def requests_of(*limits: tuple[int, int]) -> list[DraftRequest]:
    """Requests of one text each on pages of their own, by most depth and most nodes."""
    pool = PagePool(64, 4)
    made = []
    for number, (depth, nodes) in enumerate(limits):
        pages = PageTable(pool)
        pages.append(len(PROMPTS[1]) + nodes)
        request = DraftRequest(number, PROMPTS[1], 4, GREEDY, group=0, index=0, seed=0)
        request.table, request.max_draft_len, request.max_nodes = pages, depth, nodes
        made.append(request)
    return made


@pytest.mark.parametrize("tree", ["most_probable", "beams"])
def test_drafts_keep_to_the_depth_and_nodes_of_each_request(tree: Any) -> None:
    config = ReDrafterDecodingConfig(
        speculative_model=random_head(), num_beams=4, draft_len_per_beam=5, tree=tree
    )
    drafter: Any = registry.build(config, target())
    requests = requests_of((5, 20), (2, 20), (5, 6), (1, 1))
    for request in requests:
        assert request.table is not None
        drafter.draft_caches[0].mark(request.table, 0, len(request.tokens))
    drafter.prepare_draft_tokens(ScheduledRequests(requests))
    whole, shallow, small, least = (request.draft for request in requests)
    assert (len(shallow) > 2, shallow.depth, len(least)) == (True, 2, 1)
    assert 5 < len(whole) <= 20
    assert small.tokens == whole.tokens[:6]
    assert least.tokens == whole.tokens[:1]
    drafter.prepare_draft_tokens(ScheduledRequests([]))


def test_a_request_whose_state_is_unknown_gets_no_draft_and_the_others_do() -> None:
    config = ReDrafterDecodingConfig(speculative_model=random_head())
    drafter: Any = registry.build(config, target())
    unknown, known = requests_of((5, 25), (5, 25))
    assert known.table is not None
    drafter.draft_caches[0].mark(known.table, 0, len(known.tokens))
    drafter.prepare_draft_tokens(ScheduledRequests([unknown, known]))
    assert not len(unknown.draft)
    assert len(known.draft) > 4


def test_nodes_are_counted_as_if_no_beams_began_alike_up_to_the_limit() -> None:
    config = ReDrafterDecodingConfig(
        speculative_model=random_head(), num_beams=4, max_total_draft_tokens=10
    )
    drafter = registry.build(config, target())
    assert [drafter.nodes(depth) for depth in (1, 2, 3, 4)] == [4, 8, 10, 10]


def test_prefills_and_drafts_share_steps_and_nothing_changes() -> None:
    config = ReDrafterDecodingConfig(speculative_model=random_head(), num_beams=3)
    plain, watched = engine(), Watched(config, max_num_tokens=24)
    expected = [plain.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(plain)
    found = [watched.machine.add(PROMPTS[0], GREEDY)[0]]
    watched.machine.step()
    found += [watched.machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[1:]]
    drain(watched.machine)
    assert outputs(found) == outputs(expected)
    assert watched.machine.stats.drafted > 0
    expect_empty(watched.machine)


def test_another_targets_head_is_refused(tmp_path: Path) -> None:
    for sizes, message in (({"hidden": 16}, "states of 16"), ({"vocab": 300}, "has 300")):
        make_head(**sizes).save(tmp_path)
        with pytest.raises(ModelError, match=message):
            registry.build(ReDrafterDecodingConfig(speculative_model=tmp_path), target())


# ---- the configuration ----------------------------------------------------------------------


def test_depth_and_size_follow_from_the_beams() -> None:
    config = ReDrafterDecodingConfig(speculative_model="d", num_beams=3, draft_len_per_beam=4)
    assert (config.name, config.max_draft_len) == ("redrafter", 4)
    assert config.max_total_draft_tokens == 12
    usual = ReDrafterDecodingConfig(speculative_model="d")
    assert (usual.num_beams, usual.max_draft_len, usual.max_total_draft_tokens) == (10, 4, 15)
    published = ReDrafterDecodingConfig(speculative_model="d", tree="beams")
    assert published.max_total_draft_tokens == 40
    read = DecodingBaseConfig.from_dict(
        {"decoding_type": "ReDrafter", "speculative_model": "d", "max_draft_len": 3}
    )
    assert (read.draft_len_per_beam, read.num_beams, read.max_total_draft_tokens) == (3, 10, 15)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_draft_len": 3, "draft_len_per_beam": 5}, "draft_len_per_beam makes it 5"),
        ({"num_beams": 2, "max_total_draft_tokens": 9}, "2 beams of 4 have no more than 8"),
        ({"max_total_draft_tokens": 3}, "max_draft_len is 4"),
        ({"num_beams": 0}, "invalid num_beams"),
        ({"tree": "beams", "min_draft_probability": 0.1}, "which are always all drafted"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(fields, message) -> None:
    with pytest.raises(ParameterError, match=message):
        ReDrafterDecodingConfig(speculative_model="d", **fields)
