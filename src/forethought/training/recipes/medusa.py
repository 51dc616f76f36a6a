"""Medusa-1: heads are trained for a target that stays as it is.

Cai et al., 2024 (arXiv 2401.10774), section 2.2.1: at position t, head k (from 0) predicts token
t + k + 2 from the target's hidden state t after its final norm; the loss is the sum over the heads
of ``decay ** k`` times their cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from forethought.config.medusa import MedusaDecodingConfig
from forethought.model.hidden_states import FINAL
from forethought.speculative.heads.medusa import MedusaHeads, MedusaShape
from forethought.training.batches import TrainingBatch, TrainingBatches, cross_entropy_terms
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import DrafterSettings, ParameterGroup, begin_with

Labels = Annotated[
    Literal["tokens", "distributions"],
    BeforeValidator(lambda value: "distributions" if value == "laws" else value),
]
"""The tokens of the texts, or the target's distributions over them; ``laws`` is an older name."""


class MedusaSettings(DrafterSettings):
    """The loop's settings, and these."""

    num_heads: int = Field(default=4, ge=1)
    num_layers: int = Field(default=1, ge=0)
    """Residual blocks of each head."""
    decay: float = Field(default=0.8, gt=0.0, le=1.0)
    """Weight of a head's loss relative to that of the head before it."""
    labels: Labels = "distributions"
    """Learn the tokens of the texts, as published, or the target's next-token distributions."""


class MedusaRecipe:
    """Heads in float32 for a target, in whose dtype they are saved. Batches have the states after
    the final norm.
    """

    Settings = MedusaSettings

    def __init__(
        self,
        settings: MedusaSettings,
        batches: TrainingBatches,
        module: MedusaHeads,
        teacher: Teacher,
    ) -> None:
        self._settings, self._batches, self._teacher = settings, batches, teacher
        self.module = module

    @classmethod
    def build(
        cls, settings: MedusaSettings, texts: Sequence[Text], teacher: Teacher
    ) -> MedusaRecipe:
        """New heads, each of which predicts what the target's own projection predicts."""
        heads = new_heads(settings, teacher)
        batches = TrainingBatches(
            texts, teacher, [FINAL], tokens=settings.batch_tokens, seed=settings.seed
        )
        return cls(settings, batches, heads, teacher)

    @staticmethod
    def decoding(directory: Path) -> MedusaDecodingConfig:
        """How to decode with the drafter that was saved in ``directory``."""
        return MedusaDecodingConfig(speculative_model=directory)

    def groups(self) -> list[ParameterGroup]:
        """All weights of the heads."""
        return [ParameterGroup(list(self.module.parameters()))]

    def batch(self, step: int) -> TrainingBatch:
        """The batch of a step, counted from 0."""
        return self._batches(step)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """The loss of a batch, a float32 scalar."""
        return heads_loss(self.module, batch, self._settings)

    def save(self, directory: Path) -> None:
        """In the authors' layout."""
        heads = deepcopy(self.module).to(self._teacher.lm.dtype)
        heads.save(directory, config={"base_model_name_or_path": self._teacher.directory.name})


def new_heads(settings: MedusaSettings, teacher: Teacher) -> MedusaHeads:
    """Heads in float32 on the target's device: those of ``settings.start``, or new ones, which
    begin as the target's own projection.

    Raises ModelError if the heads to begin with have other sizes.
    """
    shape = MedusaShape(
        hidden=teacher.hidden_size,
        vocab=teacher.lm.vocab_size,
        heads=settings.num_heads,
        blocks=settings.num_layers,
    )
    heads = MedusaHeads(shape)
    if settings.start is not None:
        read = MedusaHeads.load(settings.start, shape.hidden, shape.vocab)
        begin_with(heads, read.state_dict(), settings.start)
        return heads.to(teacher.lm.device)
    heads.to(teacher.lm.device)
    weight = projection_of(teacher)
    for head in heads:
        head[-1].weight.data.copy_(weight)
    return heads


def heads_loss(heads: MedusaHeads, batch: TrainingBatch, settings: MedusaSettings) -> Tensor:
    """Mean cross entropy of each head in nats, weighted, summed."""
    states = batch.states[FINAL].float()  # [R, W, hidden]
    losses = [
        settings.decay**number * head_loss(head, states, batch, number + 2, settings.labels)
        for number, head in enumerate(heads)
    ]
    return torch.stack(losses).sum()


def head_loss(
    head: Callable[[Tensor], Tensor], states: Tensor, batch: TrainingBatch, ahead: int, labels: str
) -> Tensor:
    """Mean cross entropy of one head over the positions whose label is a token of an answer.

    Args:
        head: states ``[N, hidden]`` -> logits ``[N, vocab]``.
        states: float32 ``[R, W - ahead, hidden]`` or longer.
        ahead: the label of position t is token t + ahead.
        labels: see ``MedusaSettings``.
    """
    is_label = batch.taught[:, ahead:]  # [R, W - ahead]
    logits = head(states[:, : is_label.shape[1]][is_label]).float()  # [N, vocab]
    if not len(logits):  # every answer is too short for this head
        return logits.sum()
    if labels == "tokens":
        return nn.functional.cross_entropy(logits, batch.tokens[:, ahead:][is_label])
    choices = batch.choices[:, ahead - 1 : -1][is_label]  # [N, K]
    probs = batch.probs[:, ahead - 1 : -1][is_label]
    return cross_entropy_terms(logits, choices, probs).sum() / probs.sum()


def projection_of(teacher: Teacher) -> Tensor:
    """The target's output projection, float32 ``[vocab, hidden]``."""
    unit = torch.eye(teacher.hidden_size, dtype=teacher.lm.dtype, device=teacher.lm.device)
    bias = teacher.lm.unembed(torch.zeros_like(unit[:1]))
    return (teacher.lm.unembed(unit) - bias).T.float().clone()
