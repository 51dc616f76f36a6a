"""ReDrafter: the recurrent head is trained on the target's distributions along texts.

Cheng et al., 2024 (arXiv 2403.09919, section 3.4): distillation on texts that the target wrote
itself. From the hidden state of token t the head reads tokens t + 1, t + 2, ... of the text, and
after each predicts the next one, with the target's distribution there as label. Neighbouring
positions give much the same gradient, so each step uses a random share of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import AliasChoices, Field
from torch import Tensor, nn

from forethought.config.drafters import ReDrafterDecodingConfig
from forethought.model.hidden_states import FINAL
from forethought.speculative.heads.redrafter import ReDrafterHead, ReDrafterShape
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.cross_entropy import projected_cross_entropy
from forethought.training.draft_vocabulary import DraftVocabulary, DraftVocabularySettings
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import ParameterGroup, begin_with


class ReDrafterSettings(DraftVocabularySettings):
    """The loop's settings, and these."""

    draft_len: int = Field(default=5, ge=1, validation_alias=AliasChoices("draft_len", "unrolled"))
    """Number of tokens that are predicted from each position: those of a beam."""
    blocks: int = Field(default=2, ge=0)
    """Residual blocks."""
    exit_dim: int | None = Field(default=None, ge=1)
    """Their width; None: twice the target's hidden size, without a projection to it."""
    distribution_width: int = Field(default=8, ge=1)
    """Number of the target's top-k probabilities that are learned from."""
    share: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of the positions that is used in a step."""
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"


class ReDrafterRecipe:
    """A head in float32 for a target, whose embeddings it reads. Batches have the states after the
    final norm.
    """

    Settings = ReDrafterSettings

    def __init__(
        self,
        settings: ReDrafterSettings,
        batches: TrainingBatches,
        module: ReDrafterHead,
        teacher: Teacher,
    ) -> None:
        self._settings, self._batches, self._teacher = settings, batches, teacher
        self.module, self.target_dtype = module, teacher.lm.dtype
        self._vocabulary = vocabulary_of(module, teacher)

    @classmethod
    def build(
        cls, settings: ReDrafterSettings, texts: Sequence[Text], teacher: Teacher
    ) -> ReDrafterRecipe:
        """A new head. See ``recipes.table``."""
        batches = TrainingBatches(
            texts,
            teacher,
            [FINAL],
            tokens=settings.batch_tokens,
            seed=settings.seed,
            width=settings.distribution_width,
        )
        return cls(settings, batches, new_head(settings, texts, teacher), teacher)

    @staticmethod
    def decoding(directory: Path) -> ReDrafterDecodingConfig:
        """How to decode with the drafter that was saved in ``directory``."""
        return ReDrafterDecodingConfig(speculative_model=directory)

    def groups(self) -> list[ParameterGroup]:
        """All of its weights."""
        return [ParameterGroup(list(self.module.parameters()))]

    def batch(self, step: int) -> TrainingBatch:
        """The batch of a step, counted from 0."""
        return self._batches(step)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Mean cross entropy in nats, over positions and tokens.

        From state t the head reads token t + 1, which belongs to the answer as in decoding, and
        predicts token t + 2; then it reads that one.
        """
        head = self.module
        rows, positions = self._sample(batch)
        context = batch.states[FINAL][rows, positions].float()  # [N, hidden]
        state = torch.zeros_like(context)
        total, count = context.new_zeros(()), 0
        for read in range(1, 1 + self._settings.draft_len):
            has_label = positions + read + 1 < batch.lengths[rows]  # the label is in the text
            rows, positions, context, state = (
                x[has_label] for x in (rows, positions, context, state)
            )
            at = rows, positions + read
            embedded = self._teacher.lm.embed(batch.tokens[at]).float()
            state = head.advance(embedded, state)
            labels = self._vocabulary.restrict(batch.choices[at], batch.probs[at])
            inputs, projection = head.mix(context, state), head.projection.weight
            total = total + projected_cross_entropy(inputs, projection, *labels)
            count += len(rows)
        return total / max(1, count)

    def _sample(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Row and position, int64 ``[N]`` each: a share of those whose next token is taught."""
        rows, positions = batch.taught[:, 1:].nonzero(as_tuple=True)
        indices = torch.randperm(len(rows)).to(rows.device)
        indices = indices[: max(1, int(len(rows) * self._settings.share))]
        return rows[indices], positions[indices]

    def save(self, directory: Path) -> None:
        """In Apple's layout, with the ids of the draft vocabulary, if there is one."""
        written = ReDrafterHead(self.module.shape, self.module.token_map)
        written.load_state_dict(self.module.state_dict())
        written.to(getattr(torch, self._settings.export_dtype)).save(directory)


def new_head(settings: ReDrafterSettings, texts: Sequence[Text], teacher: Teacher) -> ReDrafterHead:
    """A head in float32: that of ``settings.start``, or an untrained one, whose state has values
    around 1 for any scale of embeddings.

    Raises ModelError if the head to begin with has other sizes.
    """
    lm, read = teacher.lm, None
    vocabulary = DraftVocabulary.of(settings, texts, teacher)
    if settings.start is not None:
        read = ReDrafterHead.load(settings.start, lm.hidden_size, lm.vocab_size)
        vocabulary = vocabulary_of(read, teacher)
    wide = settings.exit_dim or 2 * lm.hidden_size
    shape = ReDrafterShape(lm.hidden_size, len(vocabulary), wide, settings.blocks)
    head = ReDrafterHead(shape, vocabulary.ids)
    if read is not None:
        assert settings.start is not None
        begin_with(head, read.state_dict(), settings.start)
        return head.to(lm.device)
    ids = torch.arange(lm.vocab_size, device=lm.device)
    size = float(lm.embed(ids).float().square().mean().sqrt())
    nn.init.normal_(head.rnn_w.weight, std=lm.hidden_size**-0.5 / max(size, 1e-6))
    nn.init.normal_(head.projection.weight, std=0.02)
    return head.to(lm.device)


def vocabulary_of(head: ReDrafterHead, teacher: Teacher) -> DraftVocabulary:
    """The draft vocabulary of a head; of one with fewer tokens and no map, the first ones."""
    ids, vocab_size = head.token_map, teacher.lm.vocab_size
    if ids is None and head.shape.vocab < vocab_size:
        ids = torch.arange(head.shape.vocab)
    return DraftVocabulary(vocab_size, ids, teacher.lm.device)
