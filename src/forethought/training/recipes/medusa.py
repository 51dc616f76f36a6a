"""Medusa-1: heads are trained for a target that stays as it is.

Cai et al., 2024 (arXiv 2401.10774), section 2.2.1: at position t, head k (from 0) predicts token
t + k + 2 from the target's hidden state t after its final norm; the loss is the sum over the heads
of ``decay ** k`` times their cross entropy. With a draft vocabulary, what the target says of other
tokens is left out of the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from forethought.config.medusa import MedusaDecodingConfig
from forethought.model.hidden_states import FINAL
from forethought.speculative.heads.medusa import MedusaHeads, MedusaShape
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.cross_entropy import projected_cross_entropy
from forethought.training.draft_vocabulary import DraftVocabulary, DraftVocabularySettings
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import ParameterGroup, begin_with

Labels = Annotated[
    Literal["tokens", "distributions"],
    BeforeValidator(lambda value: "distributions" if value == "laws" else value),
]
"""The tokens of the texts, or the target's distributions over them; ``laws`` is an older name."""


class MedusaSettings(DraftVocabularySettings):
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
        self.module, self.target_dtype = module, teacher.lm.dtype
        self._vocabulary = vocabulary_of(module, teacher)

    @classmethod
    def build(
        cls, settings: MedusaSettings, texts: Sequence[Text], teacher: Teacher
    ) -> MedusaRecipe:
        """New heads, each of which predicts what the target's own projection predicts."""
        heads = new_heads(settings, texts, teacher)
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
        return heads_loss(self.module, self._vocabulary, batch, self._settings)

    def save(self, directory: Path) -> None:
        """In the authors' layout, or vLLM's where there is a draft vocabulary."""
        save_heads(self.module, directory, self._teacher, self._teacher.directory.name)


def new_heads(settings: MedusaSettings, texts: Sequence[Text], teacher: Teacher) -> MedusaHeads:
    """Heads in float32 on the target's device: those of ``settings.start``, or new ones, which
    begin as the target's own projection.

    Raises ModelError if the heads to begin with have other sizes.
    """
    vocabulary, read = DraftVocabulary.of(settings, texts, teacher), None
    if settings.start is not None:
        read = MedusaHeads.load(settings.start, teacher.hidden_size, teacher.lm.vocab_size)
        vocabulary = vocabulary_of(read, teacher)
    shape = MedusaShape(
        hidden=teacher.hidden_size,
        vocab=len(vocabulary),
        heads=settings.num_heads,
        blocks=settings.num_layers,
    )
    heads = MedusaHeads(shape, vocabulary.ids)
    if read is not None:
        assert settings.start is not None
        begin_with(heads, read.state_dict(), settings.start)
        return heads.to(teacher.lm.device)
    heads.to(teacher.lm.device)
    weight = teacher.lm.output_projection(vocabulary.ids)
    for head in heads:
        head[-1].weight.data.copy_(weight)
    return heads


def vocabulary_of(heads: MedusaHeads, teacher: Teacher) -> DraftVocabulary:
    """The draft vocabulary of heads."""
    return DraftVocabulary(teacher.lm.vocab_size, heads.token_map, teacher.lm.device)


def save_heads(
    heads: MedusaHeads, directory: Path, teacher: Teacher, target: str, **config: object
) -> None:
    """Write heads in the target's dtype; ``target`` is its name, ``config`` more for
    ``config.json``.
    """
    config["base_model_name_or_path"] = target
    if heads.token_map is not None:
        config["vocab_size"] = teacher.lm.vocab_size
    layout: Literal["authors", "vllm"] = "authors" if heads.token_map is None else "vllm"
    deepcopy(heads).to(teacher.lm.dtype).save(directory, layout, config)


def heads_loss(
    heads: MedusaHeads, vocabulary: DraftVocabulary, batch: TrainingBatch, settings: MedusaSettings
) -> Tensor:
    """Mean cross entropy of each head in nats, weighted, summed."""
    states = batch.states[FINAL].float()  # [R, W, hidden]
    total = states.new_zeros(())
    for number, head in enumerate(heads):
        labels = labels_ahead(batch, number + 2, settings.labels, vocabulary)
        loss = head_loss(head[:-1], head[-1].weight, states, labels)
        total = total + settings.decay**number * loss
    return total


class AheadLabels(NamedTuple):
    """What is to be predicted some tokens ahead of N positions."""

    is_label: Tensor
    """bool ``[R, W - ahead]``: the positions, N of them, whose label is a token of an answer."""
    choices: Tensor
    """int64 ``[N, K]``: rows of the projection."""
    probs: Tensor
    """float32 ``[N, K]``: their probabilities."""


def labels_ahead(
    batch: TrainingBatch, ahead: int, labels: str, vocabulary: DraftVocabulary
) -> AheadLabels:
    """The labels of positions t: tokens t + ahead. ``labels``: see ``MedusaSettings``."""
    is_label = batch.taught[:, ahead:]
    if labels == "tokens":
        choices = batch.tokens[:, ahead:][is_label][:, None]
        probs = torch.ones_like(choices, dtype=torch.float32)
    else:
        choices = batch.choices[:, ahead - 1 : -1][is_label]
        probs = batch.probs[:, ahead - 1 : -1][is_label]
    return AheadLabels(is_label, *vocabulary.restrict(choices, probs))


def head_loss(
    head: Callable[[Tensor], Tensor], projection: Tensor, states: Tensor, labels: AheadLabels
) -> Tensor:
    """Mean cross entropy of one head over the labelled positions, in nats; 0 without any.

    Args:
        head: states ``[N, hidden]`` -> input of the projection ``[N, hidden]``.
        projection: ``[vocab, hidden]``.
        states: float32 ``[R, W - ahead, hidden]`` or longer.
        labels: those of ahead.
    """
    inputs = head(states[:, : labels.is_label.shape[1]][labels.is_label])
    total = projected_cross_entropy(inputs, projection, labels.choices, labels.probs)
    return total / labels.probs.sum().clamp_min(1e-20)
