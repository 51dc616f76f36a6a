"""``bench speculation --fit-tree``: the static draft tree that suits a model and its prompts.

Cai et al., 2024 (arXiv 2401.10774), section 2.3.3 and its appendix on tree construction. First a
profile is measured by decoding with a wide tree: how often the drafter's token of each rank is
right at each level. With the ranks of different levels taken as independent, a node is accepted
with the product of the probabilities on its path, and the expected number of accepted tokens is the
sum over all nodes. Adding the most probable child of the tree, again and again, gives the best tree
of each size.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.engine.scheduler import Limits
from forethought.errors import ParameterError
from forethought.kv.storage import DraftKvCache
from forethought.model import loader
from forethought.model.device import find_device
from forethought.model.runner import ModelRunner
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
    Target,
)

RankPath = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """How often the drafter's r-th most probable token was right, given that its parent was."""

    chances: tuple[tuple[float, ...], ...]
    """One row per level, from the root's children down; entry r is that of rank r, from 0."""

    def chance(self, path: RankPath) -> float:
        """Product of the probabilities on a path."""
        product = 1.0
        for level, rank in enumerate(path):
            product *= self.chances[level][rank]
        return product


@dataclass(frozen=True, slots=True)
class FittedTree:
    """The best tree of its size under a profile."""

    choices: tuple[RankPath, ...]
    """All nodes, sorted by length, then by value."""
    acceptance_length: float
    """Expected tokens per step: 1 plus the sum over all nodes."""

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return max(map(len, self.choices), default=0)

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "choices": [list(path) for path in self.choices],
            "nodes": len(self.choices),
            "depth": self.depth,
            "acceptance_length": round(self.acceptance_length, 3),
        }


def fit_tree(profile: AcceptanceProfile, nodes: int) -> FittedTree:
    """The tree of at most ``nodes`` nodes with the largest expected acceptance.

    Nodes of probability 0 are left out. Ties go to the shorter path, then to the smaller one.
    """
    paths: list[RankPath] = []
    expected = 1.0
    heap: list[tuple[float, int, RankPath]] = []

    def offer(parent: RankPath) -> None:
        for path in _children(profile, parent):
            if (chance := profile.chance(path)) > 0:
                heapq.heappush(heap, (-chance, len(path), path))

    offer(())
    while heap and len(paths) < nodes:
        cost, _, path = heapq.heappop(heap)
        paths.append(path)
        expected -= cost
        offer(path)
    return FittedTree(tuple(sorted(paths, key=lambda path: (len(path), path))), expected)


def _children(profile: AcceptanceProfile, path: RankPath) -> Iterator[RankPath]:
    if len(path) < len(profile.chances):
        for rank in range(len(profile.chances[len(path)])):
            yield (*path, rank)


def comb(depth: int, width: int) -> tuple[RankPath, ...]:
    """The tree that measures a profile: ``width`` ranks after each prefix of the top-1 path.

    It has ``depth * width`` nodes, and every rank of every level is seen where the levels before it
    were right.
    """
    return tuple((*(0,) * level, rank) for level in range(depth) for rank in range(width))


class ProfileCount:
    """Counts which ranks were right, for ``depth`` levels of drafts with ``width`` ranks each."""

    def __init__(self, depth: int, width: int) -> None:
        self._tried = [0] * depth
        self._right = [[0] * width for _ in range(depth)]

    def record(self, drafted: Sequence[RankPath], accepted: RankPath) -> None:
        """Count one verified draft: its nodes, and the accepted one, as paths of ranks."""
        inner = {path[:-1] for path in drafted}
        for level in range(len(accepted) + 1):
            if accepted[:level] in inner:
                self._tried[level] += 1
        for level, rank in enumerate(accepted):
            self._right[level][rank] += 1

    def profile(self) -> AcceptanceProfile:
        """The profile so far; levels that were never tried are left out."""
        return AcceptanceProfile(
            tuple(
                tuple(count / tried for count in right)
                for tried, right in zip(self._tried, self._right, strict=True)
                if tried
            )
        )


WIDTH = 10
"""Ranks measured on each level."""
_PAGE_SIZE = 16


def choices_field(config: DecodingBaseConfig) -> str:
    """The field of a drafter's static tree; raises ParameterError if it drafts none."""
    for name in type(config).model_fields:
        if name.endswith("_choices"):
            return name
    raise ParameterError(
        f"there is no tree to fit for {config.name}",
        f"{type(config).__name__} has no static trees",
        "Choose a drafter that has, such as --speculative medusa",
    )


def widened(config: DecodingBaseConfig, width: int = WIDTH) -> DecodingBaseConfig:
    """The same drafter with a tree that shows ``width`` ranks on each of its levels."""
    field = choices_field(config)
    sizes = {"max_draft_len", "max_total_draft_tokens", "tree", "min_draft_probability", field}
    fields: dict[str, Any] = {name: getattr(config, name) for name in config.model_fields_set}
    settings = {name: value for name, value in fields.items() if name not in sizes}
    settings[field] = comb(config.max_draft_len, width)
    return type(config)(**settings)


def measure_profile(
    model_dir: Path,
    config: DecodingBaseConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    dtype: str = "auto",
    device: str = "auto",
) -> AcceptanceProfile:
    """Decode greedily with a wide tree and count.

    Args:
        model_dir: of the target.
        config: of a drafter with static trees; its levels are those of the profile.
        prompts: token ids.
        max_tokens: of each answer.
        dtype, device: of the target.

    Raises:
        UsageError: the drafter has no static trees, or something cannot be loaded.
    """
    wide = widened(config.with_local_model())
    lm = loader.load(model_dir, dtype=dtype, device=find_device(device))
    length = min(lm.max_positions, max(map(len, prompts)) + max_tokens)
    tokens = length + wide.max_total_draft_tokens
    pages = len(prompts) * -(-tokens // _PAGE_SIZE)
    runner = ModelRunner(lm, lm.storage(pages, _PAGE_SIZE))
    limits = Limits(
        len(prompts), max(2048, len(prompts) * (1 + wide.max_total_draft_tokens)), length
    )
    entry = resolve.build_drafter_entry(wide, Target(runner, limits.max_num_tokens), len(prompts))
    count = ProfileCount(wide.max_draft_len, WIDTH)
    entry.drafter = _Recorder(entry.drafter, count)
    engine = Engine(runner, limits, drafters=[entry])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for prompt in prompts:
        engine.add(prompt, params)
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error
    engine.shutdown()
    return count.profile()


class _Recorder(Drafter):
    """Wraps a drafter and counts which ranks of its drafts are accepted."""

    def __init__(self, inner: Drafter, count: ProfileCount) -> None:
        self._inner, self._count = inner, count
        self._lengths: dict[int, int] = {}

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        return self._inner.draft_caches

    def nodes(self, depth: int) -> int:
        return self._inner.nodes(depth)

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        self._inner.prepare_draft_tokens(scheduled_requests, resource_manager)
        for request in scheduled_requests.generation_requests:
            self._lengths[request.request_id] = len(request.tokens)

    def update(self, scheduled_requests: ScheduledRequests) -> None:
        self._inner.update(scheduled_requests)
        for request in scheduled_requests.generation_requests:
            if len(request.draft):
                self._record(request, request.tokens[self._lengths[request.request_id] :])

    def _record(self, request: DraftRequest, accepted: Sequence[int]) -> None:
        """Find the accepted path: siblings are in the order of their ranks."""
        draft = request.draft
        parents = [draft.parent(node) for node in range(len(draft))]
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        for node, parent in enumerate(parents):
            earlier_siblings = sum(other == parent for other in parents[:node])
            paths[node] = (*paths[parent], earlier_siblings)
        at = -1
        for token in accepted:
            following = [
                n for n, above in enumerate(parents) if (above, draft.tokens[n]) == (at, token)
            ]
            if not following:
                break
            at = following[0]
        self._count.record([paths[node] for node in range(len(draft))], paths[at])

    def release(self, request: DraftRequest) -> None:
        self._lengths.pop(request.request_id, None)
        self._inner.release(request)

    def shutdown(self) -> None:
        self._inner.shutdown()


_SIZES = (4, 8, 16, 32, 64)
_SHOWN = 4
"""Ranks of the profile in the table."""


def drafter_of(configs: Sequence[DecodingBaseConfig]) -> DecodingBaseConfig:
    """The drafter that a tree is fitted for.

    Raises ParameterError if not exactly one is configured, or it has no static trees.
    """
    if len(configs) != 1:
        raise ParameterError(
            "--fit-tree needs one drafter",
            f"{len(configs)} are configured",
            "Choose it with --speculative",
        )
    choices_field(configs[0])
    return configs[0]


def fit_static_tree(
    config: DecodingBaseConfig,
    nodes: int,
    model_dir: Path,
    prompts: Sequence[list[int]],
    max_tokens: int,
    **loading: Any,
) -> dict[str, Any]:
    """Measure a profile and fit a tree of ``nodes`` nodes, at least 1; as plain values."""
    profile = measure_profile(model_dir, config, prompts, max_tokens=max_tokens, **loading)
    sizes = sorted({nodes, *(size for size in _SIZES if size < nodes)})
    return {
        "benchmark": "fit_tree",
        "drafter": config.name,
        "field": choices_field(config),
        "profile": [[round(chance, 4) for chance in level] for level in profile.chances],
        "sizes": {str(size): fit_tree(profile, size).to_dict() for size in sizes},
        **fit_tree(profile, nodes).to_dict(),
    }


def tree_fit_lines(report: dict[str, Any]) -> list[str]:
    """For people."""
    profile = AcceptanceProfile(tuple(map(tuple, report["profile"])))
    lines = ["accepted, in % of the drafts that got there, by rank:"]
    for level, chances in enumerate(profile.chances, start=1):
        shown = "  ".join(f"{100 * chance:5.1f}" for chance in chances[:_SHOWN])
        lines.append(f"  level {level}: {shown} ...")
    for size, tree in report["sizes"].items():
        nodes = "node: " if size == "1" else "nodes:"
        lines.append(f"{size:>4} {nodes} {tree['acceptance_length']:.2f} tokens per step")
    choices = json.dumps(report["choices"], separators=(",", ":"))
    return [*lines, f"{report['field']}: {choices}"]
