"""ReDrafter's recipe: the head reads on behind a place, and learns what the target thinks there.

Cheng et al., 2024 (arXiv 2403.09919, section 3.4): distillation along texts that the target wrote
itself. Behind a place the head takes in the tokens that stand there, one after the other, and is
measured at each against the target's law of the next one. Places that follow each other teach much
the same, so a share of them is learned from, drawn anew in each step. Knows nothing about beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from forethought.config.drafters import ReDrafterDecodingConfig
from forethought.model.causal_lm import FINAL
from forethought.speculative.heads.redrafter import ReDrafterHead, ReDrafterShape
from forethought.training.batches import TrainingBatch, TrainingBatches
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import ParameterGroup, TrainingSettings


class ReDrafterSettings(TrainingSettings):
    """The loop's, and these."""

    unrolled: int = Field(default=5, ge=1)
    """Tokens that are guessed behind each place: those of a beam."""
    blocks: int = Field(default=2, ge=0)
    """Residual blocks."""
    exit_dim: int | None = Field(default=None, ge=1)
    """Their width; None: twice the target's hidden size, and no projection to it."""
    distribution_width: int = Field(default=8, ge=1)
    """Tokens of the target's law that are learned from."""
    share: float = Field(default=0.5, gt=0.0, le=1.0)
    """Of the places, that is learned from in a step."""
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"


class ReDrafterRecipe:
    """A head for a target.

    Args:
        settings: of the run.
        lessons: with the states behind the final norm.
        module: the head, in float32, on the target's device.
        teacher: the target, for its embeddings.
    """

    Settings = ReDrafterSettings

    def __init__(
        self,
        settings: ReDrafterSettings,
        lessons: TrainingBatches,
        module: ReDrafterHead,
        teacher: Teacher,
    ) -> None:
        self._settings, self._lessons, self._teacher = settings, lessons, teacher
        self.module = module

    @classmethod
    def build(
        cls, settings: ReDrafterSettings, texts: Sequence[Text], teacher: Teacher
    ) -> ReDrafterRecipe:
        """A new head. See ``recipes.table``."""
        lessons = TrainingBatches(
            texts,
            teacher,
            [FINAL],
            tokens=settings.batch_tokens,
            seed=settings.seed,
            width=settings.distribution_width,
        )
        return cls(settings, lessons, new_head(teacher, settings), teacher)

    @staticmethod
    def decoding(directory: Path) -> ReDrafterDecodingConfig:
        """See ``recipes.table``."""
        return ReDrafterDecodingConfig(speculative_model=directory)

    def groups(self) -> list[ParameterGroup]:
        """All of its weights."""
        return [ParameterGroup(list(self.module.parameters()))]

    def batch(self, step: int) -> TrainingBatch:
        """See :class:`~forethought.training.trainer.Recipe`."""
        return self._lessons(step)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Mean cross entropy in nats, over places and tokens.

        From the state of token t, the head reads token t + 1, and guesses the token at t + 2; then
        it reads that one. As in use, token t + 1 is one that the target chose.
        """
        head = self.module
        rows, places = self._places(batch)
        context = batch.states[FINAL][rows, places].float()  # [N, hidden]
        state = torch.zeros_like(context)
        total, count = context.new_zeros(()), 0
        for read in range(1, 1 + self._settings.unrolled):
            known = places + read + 1 < batch.lengths[rows]  # the token to guess is there
            rows, places, context, state = (x[known] for x in (rows, places, context, state))
            at = rows, places + read
            embedded = self._teacher.lm.embed(batch.tokens[at]).float()
            state = head.advance(embedded, state)
            surprise = cross_entropies(head(context, state), batch.choices[at], batch.probs[at])
            total, count = total + surprise.sum(), count + len(rows)
        return total / max(1, count)

    def _places(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """int64 ``[N]`` each, row and place: a share of those whose next token was chosen."""
        rows, places = batch.taught[:, 1:].nonzero(as_tuple=True)
        kept = torch.randperm(len(rows)).to(rows.device)
        kept = kept[: max(1, int(len(rows) * self._settings.share))]
        return rows[kept], places[kept]

    def save(self, directory: Path) -> None:
        """In Apple's layout."""
        written = ReDrafterHead(self.module.shape)
        written.load_state_dict(self.module.state_dict())
        written.to(getattr(torch, self._settings.export_dtype)).save(directory)


def cross_entropies(logits: Tensor, choices: Tensor, probs: Tensor) -> Tensor:
    """From the target's laws to the head's, in nats: float32 ``[N]``.

    Args:
        logits: ``[N, vocab]``.
        choices: int64 ``[N, K]``, the target's likeliest tokens.
        probs: float32 ``[N, K]``, theirs; what lies outside is left out.
    """
    logits = logits.float()
    surprise = logits.logsumexp(-1, keepdim=True) - logits.gather(-1, choices)
    return (probs * surprise).sum(-1)


def new_head(teacher: Teacher, settings: ReDrafterSettings) -> ReDrafterHead:
    """An untrained head in float32, whose state has values around 1 whatever the embeddings are."""
    lm = teacher.lm
    wide = settings.exit_dim or 2 * lm.hidden_size
    head = ReDrafterHead(ReDrafterShape(lm.hidden_size, lm.vocab_size, wide, settings.blocks))
    everything = torch.arange(lm.vocab_size, device=lm.device)
    size = float(lm.embed(everything).float().square().mean().sqrt())
    nn.init.normal_(head.rnn_w.weight, std=lm.hidden_size**-0.5 / max(size, 1e-6))
    nn.init.normal_(head.lm_head[-1].weight, std=0.02)
    return head.to(lm.device)
