"""A draft model: a small Llama with the target's vocabulary learns the target's distributions.

Knowledge distillation (Hinton, Vinyals and Dean, 2015) at temperature 1 on texts that the target
wrote: the loss is the cross entropy from the target's top-k probabilities of each next token to the
draft model's. How close the two distributions are decides how many drafted tokens are accepted
(Leviathan et al., 2023, section 3).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pydantic
from pydantic import Field
from torch import Tensor

from forethought.config.drafters import DraftTargetDecodingConfig
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.cross_entropy import projected_cross_entropy
from forethought.training.llama import Llama, LlamaShape, muon_groups
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import DrafterSettings, ParameterGroup

_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Files of the target that the draft model shares."""
_EVALUATED_DRAFT_LEN = 5


class DraftModelSettings(DrafterSettings):
    """The loop's settings, and the sizes of a Llama."""

    num_layers: int = Field(default=2, ge=1)
    hidden_size: int = Field(default=96, ge=2)
    intermediate_size: int = Field(default=192, ge=1)
    num_heads: int = Field(default=3, ge=1)
    num_kv_heads: int = Field(default=1, ge=1)
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the layers' matrices; embedding and norms are trained with AdamW, beside Muon
    without weight decay."""
    runs_in_float32: bool = False
    """Whether ``config.json`` asks for float32 in place of bf16: small models are faster so on a
    CPU. Weights are stored in bf16 in any case."""

    @pydantic.model_validator(mode="after")
    def _fit(self) -> DraftModelSettings:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError("hidden_size must be an even multiple of num_heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        return self


class DraftModelRecipe:
    """A draft model in float32 for a target, whose tokenizer it shares."""

    Settings = DraftModelSettings

    def __init__(
        self,
        settings: DraftModelSettings,
        batches: TrainingBatches,
        module: Llama,
        teacher: Teacher,
    ) -> None:
        self._settings, self._batches, self._teacher = settings, batches, teacher
        self.module, self.target_dtype = module, teacher.lm.dtype

    @classmethod
    def build(
        cls, settings: DraftModelSettings, texts: Sequence[Text], teacher: Teacher
    ) -> DraftModelRecipe:
        """A draft model with random weights, or with those of ``settings.start``.

        Raises ModelError if these are missing or of another shape.
        """
        shape = LlamaShape(
            vocab_size=teacher.lm.vocab_size,
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_layers=settings.num_layers,
            num_heads=settings.num_heads,
            num_kv_heads=settings.num_kv_heads,
            max_positions=teacher.lm.max_positions,
        )
        batches = TrainingBatches(
            texts, teacher, (), tokens=settings.batch_tokens, seed=settings.seed
        )
        module = Llama(shape)
        if settings.start is not None:
            module.load(settings.start)
        return cls(settings, batches, module.to(teacher.lm.device), teacher)

    @staticmethod
    def decoding(directory: Path) -> DraftTargetDecodingConfig:
        """How to decode with the drafter that was saved in ``directory``."""
        return DraftTargetDecodingConfig(
            speculative_model=directory, max_draft_len=_EVALUATED_DRAFT_LEN
        )

    def groups(self) -> list[ParameterGroup]:
        """All weights."""
        if self._settings.optimizer == "muon":
            return muon_groups(self.module)
        return [ParameterGroup(list(self.module.parameters()))]

    def batch(self, step: int) -> TrainingBatch:
        """The batch of a step, counted from 0."""
        return self._batches(step)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Mean cross entropy in nats over the positions whose next token the target chose; its
        lower bound is the entropy of the target.
        """
        is_label = batch.taught[:, 1:]  # [R, W - 1]
        probs = batch.probs[:, :-1][is_label]  # [N, K]
        states = self.module.hidden(batch.tokens[:, :-1])[is_label]  # [N, hidden]
        projection, choices = self.module.embedding.weight, batch.choices[:, :-1][is_label]
        return projected_cross_entropy(states, projection, choices, probs) / probs.sum()

    def save(self, directory: Path) -> None:
        """A Hugging Face directory of a Llama in bf16, with the target's tokenizer."""
        dtype = "float32" if self._settings.runs_in_float32 else "bfloat16"
        self.module.save(directory, min(self._teacher.lm.eos_token_ids, default=0), dtype)
        for name in _COPIED:
            if (self._teacher.directory / name).exists():
                shutil.copyfile(self._teacher.directory / name, directory / name)
