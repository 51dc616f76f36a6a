"""Decoders of reward models after cached prefixes: a segment in, its states and scores out.

``TorchRewardForward`` runs the module of transformers: rows and the states before them are padded
to one shape. It takes every decoder, and is the reference implementation. ``NativeRewardForward``
runs the layers in C++ over one pool of slots, of which a segment holds some: nothing is padded or
copied. The other rows of a batch, and the bounds of segments, change only the rounding of a score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from typing_extensions import override

from forethought.errors import ModelError
from forethought.kv.storage import KvStorage, LayerShape
from forethought.model import backends
from forethought.model.attention import create_backend
from forethought.model.attention.base import PagedPass
from forethought.model.batch import Batch, Span
from forethought.model.hidden_states import FINAL
from forethought.model.loader import native_refusal
from forethought.rewards.reward_cache import SegmentForward

Head = Callable[[Tensor], Tensor]
"""Hidden states [..., hidden] -> scores [...] float32."""
_LEAST_SLOTS = 1024


def native_forward(backbone: Any, head: Head) -> NativeRewardForward | None:
    """The forward in C++ for the layers of a decoder, whose weights it takes.

    None: it cannot run natively, or not as fast as torch runs it.
    """
    config, device = backbone.config, backbone.device
    cpu = backends.cpu()
    causal_lm_class = cpu.causal_lm_class(config)
    if causal_lm_class is None or device.type != "cpu":
        return None
    if (reason := cpu.why_unavailable()) is not None:
        cpu.warn_unavailable(reason)
        return None
    with torch.device("meta"):
        module: Any = causal_lm_class(config)
    module.model, module.lm_head = backbone, nn.Linear(config.hidden_size, 1, dtype=backbone.dtype)
    try:
        return None if native_refusal(module) else NativeRewardForward(module, head)
    except ModelError as error:  # the compiler fails
        cpu.warn_unavailable(error.why, error.fix)
        return None


class NativeRewardForward(SegmentForward):
    """The layers in C++. The states of a segment are the slots of its tokens, one after the other.

    Args:
        module: a causal model that runs natively, all of whose layers attend to all tokens; its
            output projection is not used.
        head: makes scores of final-norm states.
    """

    def __init__(self, module: Any, head: Head) -> None:
        config, attention = module.config, module.model.layers[0].self_attn
        windows = [None] * config.num_hidden_layers
        shape = LayerShape(config.num_key_value_heads, attention.head_dim, attention.head_dim)
        with torch.inference_mode():
            self._network = backends.cpu().network(module, config.max_position_embeddings, windows)
        self._head, self._windows = head, windows
        self._backend = create_backend("auto", "cpu")
        self._storage = KvStorage([shape] * len(windows), _LEAST_SLOTS, 1, module.dtype)
        self._free = list(range(_LEAST_SLOTS))[::-1]

    @override
    def compute(
        self, rows: Sequence[list[int]], pasts: Sequence[Sequence[list[int]]]
    ) -> list[tuple[list[int], list[float]]]:
        new: list[list[int]] = []
        try:
            for ids in rows:
                new.append(self._take(len(ids)))
            before = [list(chain.from_iterable(past)) for past in pasts]
            scores = self._scores(rows, before, new)
        except BaseException:
            for slots in new:
                self.free(slots)
            raise
        remaining = iter(scores)
        return [(slots, [next(remaining) for _ in slots]) for slots in new]

    @override
    def split(self, states: list[int], count: int) -> tuple[list[int], list[int]]:
        return states[:count], states[count:]

    @override
    def free(self, states: list[int]) -> None:
        self._free += reversed(states)

    def _take(self, count: int) -> list[int]:
        """Free slots; the storage doubles until there are enough."""
        storage = self._storage
        while len(self._free) < count:
            size = storage.num_pages
            stored = storage.read_slots(range(size))
            storage.resize(2 * size)
            storage.write_slots(range(size), stored)
            self._free = [*reversed(range(size, 2 * size)), *self._free]
        return [self._free.pop() for _ in range(count)]

    def _scores(
        self, rows: Sequence[list[int]], before: Sequence[list[int]], new: Sequence[list[int]]
    ) -> list[float]:
        """The score at each token of all rows, after the tokens in the slots ``before``."""
        spans, positions = list[Span](), list[int]()
        for past, slots in zip(before, new, strict=True):
            held, begin = (*past, *slots), len(positions)
            spans.append(
                Span(begin, begin + len(slots), len(held), held, _first_of_run(held), None)
            )
            positions += range(len(past), len(held))
        batch = Batch(
            token_ids=torch.tensor([*chain.from_iterable(rows)]),
            positions=torch.tensor(positions),
            slots=torch.tensor([*chain.from_iterable(new)]),
            logit_index=torch.empty(0, dtype=torch.int64),
            spans=tuple(spans),
        )
        states = frozenset({FINAL})
        forward_pass = PagedPass(batch, self._storage, self._backend, self._windows, states)
        self._network(batch, forward_pass)
        results: list[float] = self._head(forward_pass.states[FINAL]).tolist()
        return results


def _first_of_run(slots: Sequence[int]) -> int | None:
    first = slots[0]
    return first if all(slot == first + i for i, slot in enumerate(slots)) else None


class TorchRewardForward(SegmentForward):
    """The module of transformers. The states of a segment are its keys and values:
    [layers, 2, heads, tokens, width].

    Args:
        backbone: a decoder without output projection, whose cache holds all tokens of every layer.
        head: makes scores of its last hidden states.
    """

    def __init__(self, backbone: Any, head: Head) -> None:
        self._backbone, self._head, self._device = backbone, head, backbone.device
        config = backbone.config.get_text_config()
        self._last = (getattr(config, "max_position_embeddings", None) or math.inf) - 1

    @override
    def compute(
        self, rows: Sequence[list[int]], pasts: Sequence[Sequence[Tensor]]
    ) -> list[tuple[Tensor, list[float]]]:
        past_lengths = [sum(part.shape[3] for part in past) for past in pasts]
        past, width = max(past_lengths), max(map(len, rows))
        cache = transformers.DynamicCache(config=self._backbone.config)
        if past:
            for layer, (keys, values) in enumerate(_aligned(pasts, past)):
                cache.update(keys, values, layer)
        lengths = list(zip(past_lengths, map(len, rows), strict=True))
        mask = [[0] * (past - p) + [1] * (p + n) + [0] * (width - n) for p, n in lengths]
        # padding may lie beyond the last position
        positions = [[min(p + i, self._last) for i in range(width)] for p in past_lengths]
        hidden = self._backbone(
            input_ids=padded(rows, width, self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            position_ids=torch.tensor(positions, device=self._device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        scores = self._head(hidden).tolist()
        results = []
        for row, ids in enumerate(rows):
            new = slice(past, past + len(ids))
            layers = [
                torch.stack([layer.keys[row, :, new], layer.values[row, :, new]])
                for layer in cache.layers
            ]
            results.append((torch.stack(layers), scores[row][: len(ids)]))
        return results

    @override
    def split(self, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return states[:, :, :, :count].clone(), states[:, :, :, count:].clone()

    def free(self, states: Tensor) -> None:
        """Nothing to do: the garbage collector frees tensors."""


def padded(rows: Iterable[list[int]], width: int, device: torch.device) -> Tensor:
    """int64 [R, width], with 0 after the rows."""
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)


def _aligned(pasts: Sequence[Sequence[Tensor]], width: int) -> Tensor:
    """[layers, 2, R, heads, width, dim]: the pasts, each at the end of its row, 0 before it."""
    like = next(part for past in pasts for part in past)
    layers, pair, heads, _, dim = like.shape
    states = like.new_zeros(layers, pair, len(pasts), heads, width, dim)
    for row, past in enumerate(pasts):
        end = width
        for part in reversed(past):
            begin = end - part.shape[3]
            states[:, :, row, :, begin:end] = part
            end = begin
    return states
