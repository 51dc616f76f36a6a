"""A target that learns: the teacher's own module, read with gradients, with adapters or without.

One copy of the weights is the original and the adapted model. What is written is a directory like
the target's, with the adapters merged into the weights. Knows nothing about losses or drafters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forethought.model.attention.base import Capability
from forethought.model.attention.interface import ATTENTION
from forethought.silence import without_progress_bars
from forethought.training.adapters import Adapters
from forethought.training.teacher import Teacher

_BEYOND_SDPA = frozenset({Capability.SOFTCAP, Capability.SINKS})


@dataclass(frozen=True, slots=True)
class Read:
    """What a model made of R texts of W tokens."""

    states: Tensor
    """``[R, W, hidden]`` behind the final norm, in the model's dtype."""
    logits: Tensor
    """``[R, W, vocab]`` in the model's dtype."""


class Backbone:
    """A teacher's model and its adapters.

    Args:
        teacher: loaded with ``fuse=False``; its model stays the original.
        rank, alpha: see :class:`~forethought.training.adapters.Adapters`.

    Raises:
        ModelError: it has no layers to adapt.
    """

    def __init__(self, teacher: Teacher, rank: int, alpha: float) -> None:
        self._teacher, self._module = teacher, teacher.module
        self.adapters = Adapters(self._module, rank, alpha)
        quick = getattr(self._module, "_supports_sdpa", False) and all(
            _BEYOND_SDPA.isdisjoint(layer.needs()) for layer in teacher.lm.traits.layers
        )
        self._attention = "sdpa" if quick else "eager"

    def original(self, tokens: Tensor) -> Read:
        """Read texts as the original does, without gradients.

        Args:
            tokens: int64 ``[R, W]``, filled up behind their ends with any tokens.
        """
        with torch.no_grad():
            return self._read(tokens)

    def adapted(self, tokens: Tensor) -> Read:
        """The same as the adapted model does, with gradients for the adapters."""
        with self.adapters.attached():
            return self._read(tokens)

    def _read(self, tokens: Tensor) -> Read:
        states: list[Tensor] = []

        def leaving(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            states.append(output[0])

        with ExitStack() as open_:
            open_.enter_context(self._differentiable())
            hook = self._module.get_decoder().register_forward_hook(leaving)
            open_.callback(hook.remove)
            seen = torch.ones_like(tokens)  # filling stands behind all that is looked at
            output = self._module(input_ids=tokens, attention_mask=seen, use_cache=False)
        return Read(states[0], output.logits)

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        """While it is open, transformers' own attention is used in place of that over pages."""
        self._module.set_attn_implementation(self._attention)
        try:
            yield
        finally:
            self._module.set_attn_implementation(ATTENTION)

    def save(self, directory: Path) -> None:
        """Write the adapted model, with the target's tokenizer, as a Hugging Face directory."""
        weights = {**self._module.state_dict(), **self.adapters.merged()}
        with without_progress_bars():
            self._module.save_pretrained(directory, state_dict=weights)
        for file in directory.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors lets nobody else read
        self._teacher.tokenizer.hf.save_pretrained(directory)
