"""Medusa-2: heads and target are trained together; the target stays close to the original.

Cai et al., 2024 (arXiv 2401.10774), sections 2.2.2 and 2.3.2. First the heads are trained alone, as
in Medusa-1; then both, with the loss ``L_LM + w * L_heads``. ``L_LM`` is the divergence
KL(original || adapted) for texts that the target wrote itself, and the cross entropy for texts that
it was trained on. The target is trained through low-rank adapters, at a learning rate of its own.
The result is another model than the original.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pydantic
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from forethought.config.medusa import MedusaDecodingConfig
from forethought.errors import ParameterError
from forethought.model.hidden_states import FINAL
from forethought.model_dir import find_model_dir
from forethought.speculative.heads.medusa import MedusaHeads
from forethought.training.backbone import Backbone, BackboneOutput, check_adaptable
from forethought.training.batches import Batches, TrainingBatch, pad_texts
from forethought.training.recipes.medusa import (
    Labels,
    MedusaSettings,
    heads_loss,
    new_heads,
    save_heads,
    vocabulary_of,
)
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import MODEL, ParameterGroup

_DISTRIBUTION_WIDTH = 8
"""Number of the original's top-k probabilities that heads learn from."""


class Medusa2Settings(MedusaSettings):
    """Medusa-1's settings, where ``rate`` is that of the heads, and these."""

    adapts: ClassVar[bool] = True

    initial_heads: Path | None = None
    """Directory or Hub id of heads to start from, such as those of Medusa-1; their tree is kept."""
    heads_first: float = Field(default=0.4, ge=0.0, lt=1.0)
    """Share of the steps in which the heads are trained alone."""
    heads_weight: float = Field(default=0.2, gt=0.0)
    """Weight of the heads' loss while both are trained."""
    heads_weight_schedule: Literal["sine", "constant"] = "sine"
    """Whether the weight rises to that value as a quarter of a sine, or is constant."""
    backbone_rate: float = Field(default=2.5e-4, gt=0.0)
    """Peak learning rate of the target; it rises over ``warm_up`` after ``heads_first``."""
    backbone_labels: Labels = "distributions"
    """Keep the target near the original's distributions, or train it on the tokens of the texts,
    which should be texts that the original was trained on."""
    lora_rank: int = Field(default=32, ge=1)
    lora_alpha: float = Field(default=16.0, gt=0.0)

    @override
    def check_target(self, teacher: Teacher) -> None:
        """Raises ModelError as ``check_adaptable``."""
        check_adaptable(teacher)

    @pydantic.model_validator(mode="after")
    def _begins_once(self) -> Medusa2Settings:
        if self.start is not None and self.initial_heads is not None:
            raise ValueError("start and initial_heads are two names of the same: give one")
        if self.initial_heads is not None and self.draft_vocab_size is not None:
            raise ValueError("initial_heads have their draft vocabulary: leave the size out")
        return self


@dataclass(frozen=True, slots=True)
class JointBatch:
    """Texts of a step."""

    texts: Sequence[Text]
    progress: float
    """Share of the run that is done, from 0 to 1."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the texts."""
        return sum(map(len, self.texts))


class Medusa2Recipe:
    """Heads for a target that is trained with them; everything is saved in the target's dtype."""

    Settings = Medusa2Settings

    def __init__(
        self,
        settings: Medusa2Settings,
        batches: Batches,
        heads: MedusaHeads,
        backbone: Backbone,
        teacher: Teacher,
    ) -> None:
        self._settings, self._batches, self._teacher = settings, batches, teacher
        self._heads, self._backbone = heads, backbone
        self._vocabulary, self.target_dtype = vocabulary_of(heads, teacher), teacher.lm.dtype
        self.module = nn.ModuleDict({"heads": heads, "adapters": backbone.adapters})

    @classmethod
    def build(
        cls, settings: Medusa2Settings, texts: Sequence[Text], teacher: Teacher
    ) -> Medusa2Recipe:
        """Given heads or new ones, and new adapters, for a teacher loaded with ``fuse=False``.

        Raises:
            ModelError: the target cannot be adapted, or the heads do not fit it.
            ParameterError: the heads are not of the sizes in the settings.
        """
        heads = _heads(settings, texts, teacher)
        backbone = Backbone(teacher, settings.lora_rank, settings.lora_alpha)
        batches = Batches(texts, settings.batch_tokens, settings.seed)
        return cls(settings, batches, heads, backbone, teacher)

    @staticmethod
    def decoding(directory: Path) -> MedusaDecodingConfig:
        """How to decode with the drafter that was saved in ``directory``."""
        return MedusaDecodingConfig(speculative_model=directory)

    def groups(self) -> list[ParameterGroup]:
        """Heads, and adapters at their own rate."""
        return [
            ParameterGroup(list(self._heads.parameters())),
            ParameterGroup(list(self._backbone.adapters.parameters()), self.backbone_scale),
        ]

    def backbone_scale(self, progress: float) -> float:
        """The target's learning rate as a factor on that of the heads."""
        settings = self._settings
        if progress < settings.heads_first:
            return 0.0
        rising = self._joint(progress) / settings.warm_up if settings.warm_up else 1.0
        return settings.backbone_rate / settings.rate * min(1.0, rising)

    def heads_weight(self, progress: float) -> float:
        """Weight of the heads' loss: 1 while they are trained alone."""
        settings = self._settings
        if progress < settings.heads_first:
            return 1.0
        if settings.heads_weight_schedule == "constant":
            return settings.heads_weight
        done = self._joint(progress) / (1.0 - settings.heads_first)
        return settings.heads_weight * math.sin(math.pi / 2 * min(1.0, done))

    def _joint(self, progress: float) -> float:
        """Share of the steps that trained both, the current one included."""
        return progress - self._settings.heads_first + 1 / self._settings.steps

    def batch(self, step: int) -> JointBatch:
        """The batch of a step, counted from 0."""
        return JointBatch(self._batches(step), step / self._settings.steps)

    def loss(self, batch: JointBatch) -> Tensor:
        """The heads' loss, plus in the second stage that of the target."""
        settings = self._settings
        tokens, taught = pad_texts(batch.texts, self._teacher.lm.device)
        joint = batch.progress >= settings.heads_first
        needed = "distributions" in (settings.labels, settings.backbone_labels)
        original = self._backbone.original(tokens) if needed or not joint else None
        read = self._backbone.adapted(tokens) if joint else original
        assert read is not None
        choices, probs = _top_k(original or read)
        lengths = torch.tensor([len(text) for text in batch.texts], device=tokens.device)
        padded = TrainingBatch(tokens, taught, lengths, {FINAL: read.states}, choices, probs)
        loss = self.heads_weight(batch.progress) * heads_loss(
            self._heads, self._vocabulary, padded, settings
        )
        if joint:
            labels = original if settings.backbone_labels == "distributions" else None
            loss = loss + backbone_loss(read, tokens, taught, labels)
        return loss

    def save(self, directory: Path) -> None:
        """The heads as those of Medusa-1, and the adapted target beside them."""
        config = dict[str, object]()
        if self._settings.initial_heads is not None:
            config["medusa_choices"] = self.decoding(self._settings.initial_heads).medusa_choices
        save_heads(self._heads, directory, self._teacher, MODEL, **config)
        self._backbone.save(directory.with_name(MODEL))


def backbone_loss(
    adapted: BackboneOutput, tokens: Tensor, taught: Tensor, original: BackboneOutput | None
) -> Tensor:
    """Mean over the positions whose next token belongs to an answer (``taught``), in nats.

    With ``original`` it is KL(original || adapted), else the cross entropy of the tokens.
    """
    is_label = taught[:, 1:]
    logits = adapted.logits[:, :-1][is_label].float()  # [N, vocab]
    if original is None:
        return F.cross_entropy(logits, tokens[:, 1:][is_label])
    distributions = original.logits[:, :-1][is_label].float().log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), distributions, reduction="batchmean", log_target=True)


def _top_k(read: BackboneOutput) -> tuple[Tensor, Tensor]:
    distribution = read.logits.detach().float().softmax(-1)
    top = distribution.topk(min(_DISTRIBUTION_WIDTH, distribution.shape[-1]))
    return top.indices, top.values


def _heads(settings: Medusa2Settings, texts: Sequence[Text], teacher: Teacher) -> MedusaHeads:
    """Heads to start from, in float32 on the target's device."""
    directory = settings.initial_heads
    if directory is None:
        return new_heads(settings, texts, teacher)
    heads = MedusaHeads.load(find_model_dir(directory), teacher.hidden_size, teacher.lm.vocab_size)
    sizes = (heads.shape.heads, heads.shape.blocks)
    if sizes != (settings.num_heads, settings.num_layers):
        raise ParameterError(
            f"the heads in {directory} have other sizes than the run",
            "num_heads and num_layers are {} and {}".format(*sizes),
            "Give these in the settings, or other heads",
        )
    return heads.to(teacher.lm.device)
