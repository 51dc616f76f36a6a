"""MTP modules for a target that was trained without: each place of a draft is learned at once.

At depth k (from 1) a module reads what depth k - 1 made of every position, with the token k places
further on, and guesses the one behind it (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2). Depth
k weighs ``decay ** (k - 1)``, all weights together 1. One module is trained as it will be replayed:
with positions that move on, on keys and values that it made of the target's states where these are
known, and of its own where not. Several modules have a depth each, and see their own depth only.
Knows nothing about the loop around it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from forethought.decoding import MTPDecodingConfig
from forethought.errors import ModelError
from forethought.model.attention.base import Capability
from forethought.model.taps import FINAL
from forethought.speculative.heads.mtp import MtpModule, Recycled, save_modules
from forethought.training.lesson import Lesson, Lessons
from forethought.training.recipes.medusa import projection_of
from forethought.training.teacher import Teacher
from forethought.training.text import Text
from forethought.training.trainer import ParameterGroup, TrainingSettings
from forethought.training.unrolled import ATTENTION, KEYWORD, UnrolledKeys

CHAIN = 5
"""Levels of the drafts by which one module is measured while it learns."""


class MtpSettings(TrainingSettings):
    """The loop's, and these."""

    modules: int = Field(default=1, ge=1)
    """One is replayed; of several, each has a place of its own."""
    depths: int = Field(default=3, ge=1)
    """Places that one module learns to guess; of several modules, as many as there are."""
    decay: float = Field(default=0.6, gt=0.0, le=1.0)
    """Each depth's weight, as a share of that of the one before."""
    recycled_state: Recycled = "normed"
    """What takes the target's state's place at the next depth."""
    labels: Literal["tokens", "laws"] = "laws"
    """Learn the tokens that stand there, or the target's law of each of them."""
    layout: Literal["deepseek", "mimo", "qwen"] = "deepseek"
    """Whose names the modules are written under, and whose order of inputs they have."""
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"


class MtpRecipe:
    """Modules for a target.

    Args:
        settings: sizes and weights of the losses.
        lessons: with the states behind the final norm.
        module: the modules, in float32, on the target's device.
        teacher: the target.
    """

    Settings = MtpSettings

    def __init__(
        self, settings: MtpSettings, lessons: Lessons, module: nn.ModuleList, teacher: Teacher
    ) -> None:
        self._settings, self._lessons, self._teacher = settings, lessons, teacher
        self.module, self._projection = module, projection_of(teacher)
        depths = settings.depths if len(module) == 1 else len(module)
        weights = [settings.decay**depth for depth in range(depths)]
        self._weights = [weight / sum(weights) for weight in weights]

    @classmethod
    def build(cls, settings: MtpSettings, texts: Sequence[Text], teacher: Teacher) -> MtpRecipe:
        """New modules.

        Raises:
            ModelError: the target's attention is of a kind that cannot be unrolled here.
        """
        lm = teacher.lm
        unknown = {Capability.SOFTCAP, Capability.SINKS}.intersection(
            *(layer.needs() for layer in lm.traits.layers[-1:])
        )
        if unknown:
            raise ModelError(
                "no MTP modules can be trained for this model",
                f"its attention has {', '.join(sorted(unknown))}",
                "Train another kind of drafter",
            )
        modules = [
            MtpModule.fresh(lm, settings.layout, settings.recycled_state)
            for _ in range(settings.modules)
        ]
        for module in modules:
            module.model.set_attn_implementation(ATTENTION)
        lessons = Lessons(texts, teacher, [FINAL], tokens=settings.batch_tokens, seed=settings.seed)
        return cls(settings, lessons, nn.ModuleList(modules), teacher)

    @staticmethod
    def decoding(directory: Path) -> MTPDecodingConfig:
        """See ``recipes.table``."""
        return MTPDecodingConfig(max_draft_len=CHAIN, speculative_model=directory)

    def groups(self) -> list[ParameterGroup]:
        """All weights of the modules; embedding and projection are the target's."""
        return [ParameterGroup(list(self.module.parameters()))]

    def batch(self, step: int) -> Lesson:
        """See :class:`~forethought.training.trainer.Recipe`."""
        return self._lessons(step)

    def loss(self, batch: Lesson) -> Tensor:
        """Mean cross entropy at each depth in nats, weighted.

        At depth k row t has state t and token t + k, and guesses the token at t + k + 1.
        """
        states = batch.states[FINAL].float()
        rows, width = batch.tokens.shape
        keys, losses = UnrolledKeys(), list[Tensor]()
        for depth, weight in enumerate(self._weights, start=1):
            size = width - depth - 1  # rows whose label lies in the text
            if size < 1:
                break
            states = states[:, :size]
            replayed = len(self.module) == 1
            positions = torch.arange(size, device=states.device) + (depth - 1) * replayed
            left = self.module[0 if replayed else depth - 1](
                self._teacher.lm.embed(batch.tokens[:, depth : depth + size]).float(),
                states,
                positions.expand(rows, -1),
                **{KEYWORD: keys if replayed else UnrolledKeys()},
            )
            losses.append(weight * self._depth_loss(left.normed, batch, depth))
            states = left.states
        return torch.stack(losses).sum()

    def _depth_loss(self, normed: Tensor, batch: Lesson, depth: int) -> Tensor:
        """normed ``[R, S, hidden]``, what left the module at one depth."""
        told = slice(depth, depth + normed.shape[1])  # where the laws of the guesses stand
        wanted = batch.taught[:, told.start + 1 : told.stop + 1]
        logits = nn.functional.linear(normed[wanted], self._projection).float()  # [N, vocab]
        if not len(logits):
            return logits.sum()
        if self._settings.labels == "tokens":
            labels = batch.tokens[:, told.start + 1 : told.stop + 1][wanted]
            return nn.functional.cross_entropy(logits, labels)
        choices, probs = batch.choices[:, told][wanted], batch.probs[:, told][wanted]
        surprise = logits.logsumexp(-1, keepdim=True) - logits.gather(-1, choices)
        return (probs * surprise).sum() / probs.sum()

    def save(self, directory: Path) -> None:
        """Write the modules, as they are numbered behind the target's layers."""
        dtype = getattr(torch, self._settings.export_dtype)
        first = self._teacher.lm.num_layers if self._settings.layout == "deepseek" else 0
        modules = [copy.deepcopy(module).to(dtype) for module in self.module]
        save_modules(modules, directory, self._settings.layout, first)
