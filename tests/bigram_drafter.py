"""A learned drafter as small as one can be: the next token follows from the last one alone.

All of it is in this file; ``SPEC`` is its one entry in the table of drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from forethought.config.drafter_table import DrafterSpec
from forethought.config.speculation import DecodingBaseConfig, Levels
from forethought.errors import ModelError
from forethought.speculative.drafter import Drafter, ResourceManager, ScheduledRequests, Target
from forethought.speculative.heads.checkpoint import Checkpoint
from forethought.training.batches import Batches, pad_texts
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import ParameterGroup, TrainingSettings

SPEC = DrafterSpec(
    "Bigram",
    "bigram_drafter:BigramDecodingConfig",
    "bigram_drafter:BigramDrafter",
    option="bigram",
    option_defaults={"max_draft_len": 3},
    recipes={"bigram": "bigram_drafter:BigramRecipe"},
)


class BigramDecodingConfig(DecodingBaseConfig):
    """Drafts follow from pairs of tokens."""

    decoding_type: ClassVar[str] = "Bigram"
    uses_model: ClassVar[bool] = True

    name: str = Field(default="bigram", min_length=1)
    max_draft_len: Levels = 2


class BigramHead(nn.Module):
    """Logits of the next token from the last one: ``[N]`` -> ``[N, vocab]``."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.table(token_ids)
        return logits


class BigramDrafter(Drafter):
    """Drafts greedy chains."""

    def __init__(self, head: BigramHead) -> None:
        self._best = head.table.weight.argmax(-1).tolist()

    @classmethod
    def build(cls, config: BigramDecodingConfig, target: Target) -> BigramDrafter:
        assert config.speculative_model is not None
        stored = Checkpoint.read(config.speculative_model)
        vocab_size = target.runner.lm.vocab_size
        if stored.config["vocab_size"] != vocab_size:
            raise ModelError("the head is another target's", "its vocabulary differs", "Train one")
        return cls(stored.build(lambda: BigramHead(vocab_size), stored.tensors))

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        for request in scheduled_requests.generation_requests:
            tokens = [request.tokens[-1]]
            for _ in range(request.max_draft_len):
                tokens.append(self._best[tokens[-1]])
            request.py_draft_tokens = tokens[1:]


class BigramRecipe:
    """Learns the table from texts."""

    Settings = TrainingSettings

    def __init__(self, module: BigramHead, batches: Batches, teacher: Teacher) -> None:
        self.module, self._batches, self._teacher = module, batches, teacher

    @classmethod
    def build(cls, settings: Any, texts: Sequence[Text], teacher: Teacher) -> BigramRecipe:
        head = BigramHead(teacher.lm.vocab_size).to(teacher.lm.device)
        return cls(head, Batches(texts, settings.batch_tokens, settings.seed), teacher)

    @staticmethod
    def decoding(directory: Path) -> BigramDecodingConfig:
        return BigramDecodingConfig(speculative_model=directory)

    def groups(self) -> list[ParameterGroup]:
        return [ParameterGroup(list(self.module.parameters()))]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return pad_texts(self._batches(step), self._teacher.lm.device)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, taught = batch
        wanted = taught[:, 1:]
        logits = self.module(tokens[:, :-1][wanted])
        return nn.functional.cross_entropy(logits, tokens[:, 1:][wanted])

    def save(self, directory: Path) -> None:
        config = {"vocab_size": self._teacher.lm.vocab_size}
        tensors: dict[str, torch.Tensor] = dict(self.module.state_dict())
        Checkpoint(directory, config, tensors).write()
