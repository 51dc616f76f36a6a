"""Which ranks of a drafter's guesses are right, measured by decoding with a wide tree.

Knows nothing about what is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forethought.bench.tree_fit import AcceptanceProfile, ProfileCount, comb
from forethought.decoding import DecodingBaseConfig
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.engine.scheduler import Limits
from forethought.errors import ParameterError
from forethought.kv.companion import Companion
from forethought.kv.storage import KvStorage
from forethought.model import loader
from forethought.model.device import find_device
from forethought.model.runner import Runner
from forethought.params import SamplingParams
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.table import Target
from forethought.speculative.tree import TokenTree

WIDTH = 10
"""Ranks that are looked at on each level."""
_PAGE_SIZE = 16


def choices_field(config: DecodingBaseConfig) -> str:
    """The field that holds a drafter's static tree.

    Raises:
        ParameterError: it drafts none.
    """
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
    kept = {name: value for name, value in fields.items() if name not in sizes}
    kept[field] = comb(config.max_draft_len, width)
    return type(config)(**kept)


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
    runner = Runner(lm, KvStorage(lm.layer_shapes, pages, _PAGE_SIZE, lm.dtype, lm.device))
    limits = Limits(
        len(prompts), max(2048, len(prompts) * (1 + wide.max_total_draft_tokens)), length
    )
    equipped = resolve.equip(wide, Target(runner, limits.max_num_tokens), len(prompts))
    count = ProfileCount(wide.max_draft_len, WIDTH)
    equipped.drafter = _Recorder(equipped.drafter, count)
    machine = Engine(runner, limits, drafters=[equipped])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for prompt in prompts:
        machine.add(prompt, params)
    while machine.has_work:
        for event in machine.step():
            if event.error is not None:
                raise event.error
    machine.shutdown()
    return count.profile()


class _Recorder(Drafter):
    """Counts what becomes of another one's drafts."""

    def __init__(self, inner: Drafter, count: ProfileCount) -> None:
        self._inner, self._count = inner, count
        self._lengths: dict[int, int] = {}

    @property
    def companions(self) -> Sequence[Companion]:
        return self._inner.companions

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

    def _record(self, request: DraftRequest, said: Sequence[int]) -> None:
        """Find the drafted path that was said: siblings stand in the order of their ranks."""
        draft = request.draft
        tree = TokenTree(tuple(draft.parent(node) for node in range(len(draft))))
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        for node, parent in enumerate(tree.parents):
            elders = sum(other == parent for other in tree.parents[:node])
            paths[node] = (*paths[parent], elders)
        at = -1
        for token in said:
            following = [node for node in tree.children(at) if draft.tokens[node] == token]
            if not following:
                break
            at = following[0]
        self._count.record([paths[node] for node in range(len(draft))], paths[at])

    def release(self, request: DraftRequest) -> None:
        self._lengths.pop(request.request_id, None)
        self._inner.release(request)

    def shutdown(self) -> None:
        self._inner.shutdown()
