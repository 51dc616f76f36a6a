"""The loss of a draft model: how far its law of each next token lies from its target's.

Knowledge distillation (Hinton, Vinyals and Dean 2015) at temperature 1, on text that the target
wrote: where drafts will be made, and where the closeness of the two laws decides how many of them
are accepted (Leviathan et al. 2023, section 3). Knows nothing about where samples come from.

[draft_model] A small language model of the target's vocabulary learns to say what the target says.

Knowledge distillation (Hinton, Vinyals and Dean, 2015) on texts that the target wrote: the loss is
the cross entropy from the target's law of each next token to the small model's. Knows nothing about
speculation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pydantic
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from forethought.config.drafters import DraftTargetDecodingConfig
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.reasoner.network import Network, NetworkShape
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import ParameterGroup, TrainingSettings


def distillation_loss(network: Network, tokens: Tensor, choices: Tensor, probs: Tensor) -> Tensor:
    """Mean cross entropy, in nats, from the target's laws to the network's.

    Its lower bound is the entropy of the target, which no network changes.

    Args:
        network: the draft model.
        tokens: int64 ``[R, W]``.
        choices: int64 ``[R, W, TOP]``, the target's likeliest tokens behind each place.
        probs: float32 ``[R, W, TOP]``, their probabilities; a place with nothing but 0 is left out.
    """
    logits = network(tokens).float()
    surprise = logits.logsumexp(-1, keepdim=True) - logits.gather(-1, choices)
    return (probs * surprise).sum() / probs.sum()


_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_TRIED_DRAFT_LEN = 5
"""Levels of the drafts that it is tried with."""


class DraftModelSettings(TrainingSettings):
    """The loop's, and the sizes of a Llama."""

    num_layers: int = Field(default=2, ge=1)
    hidden_size: int = Field(default=96, ge=2)
    intermediate_size: int = Field(default=192, ge=1)
    num_heads: int = Field(default=3, ge=1)
    num_kv_heads: int = Field(default=1, ge=1)

    @pydantic.model_validator(mode="after")
    def _fit(self) -> DraftModelSettings:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError("hidden_size must be an even multiple of num_heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        return self


class DraftModelRecipe:
    """A draft model for a target.

    Args:
        lessons: with the target's laws.
        module: the small model, in float32, on the target's device.
        teacher: the target, whose tokenizer the small model shares.
    """

    Settings = DraftModelSettings

    def __init__(self, lessons: TrainingBatches, module: Network, teacher: Teacher) -> None:
        self._lessons, self._teacher, self.module = lessons, teacher, module

    @classmethod
    def build(
        cls, settings: DraftModelSettings, texts: Sequence[Text], teacher: Teacher
    ) -> DraftModelRecipe:
        """A model with random weights."""
        shape = NetworkShape(
            vocab_size=teacher.lm.vocab_size,
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_layers=settings.num_layers,
            num_heads=settings.num_heads,
            num_kv_heads=settings.num_kv_heads,
            max_positions=teacher.lm.max_positions,
        )
        lessons = TrainingBatches(
            texts, teacher, (), tokens=settings.batch_tokens, seed=settings.seed
        )
        return cls(lessons, Network(shape).to(teacher.lm.device), teacher)

    @staticmethod
    def decoding(directory: Path) -> DraftTargetDecodingConfig:
        """See ``recipes.table``."""
        return DraftTargetDecodingConfig(
            speculative_model=directory, max_draft_len=_TRIED_DRAFT_LEN
        )

    def groups(self) -> list[ParameterGroup]:
        """All weights."""
        return [ParameterGroup(list(self.module.parameters()))]

    def batch(self, step: int) -> TrainingBatch:
        """See :class:`~forethought.training.trainer.Recipe`."""
        return self._lessons(step)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Mean cross entropy in nats over the places whose next token the target has chosen."""
        behind = batch.taught[:, 1:, None]  # [R, W - 1, 1]
        return distillation_loss(
            self.module, batch.tokens[:, :-1], batch.choices[:, :-1], batch.probs[:, :-1] * behind
        )

    def save(self, directory: Path) -> None:
        """A Hugging Face directory of a Llama in bf16, with the target's tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        config = self.module.llama_config(min(self._teacher.lm.eos_token_ids, default=0))
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(
            self.module.llama_state(), directory / "model.safetensors", metadata={"format": "pt"}
        )
        for name in _TOKENIZER:
            if (self._teacher.directory / name).exists():
                shutil.copyfile(self._teacher.directory / name, directory / name)
