"""Drafts of MTP modules made the slow way: without pages, batches or memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forethought.speculative.heads.mtp import MtpModule
from models import transformers_model


def target_states(path: Path, tokens: Sequence[int]) -> Tensor:
    """[1, n, hidden]: transformers' own states behind the final norm."""
    with torch.inference_mode():
        model = transformers_model(path).base_model
        return model(torch.tensor([list(tokens)])).last_hidden_state


def read(path: Path, module: MtpModule, states: Tensor, tokens: Sequence[int]) -> Any:
    """One module over whole texts, with transformers' own attention."""
    target = transformers_model(path)
    with torch.inference_mode():
        embedded = target.get_input_embeddings()(torch.tensor([list(tokens)]))
        positions = torch.arange(len(tokens))[None]
        return module(embedded, states, positions)


def next_token(path: Path, normed: Tensor) -> int:
    with torch.inference_mode():
        head = transformers_model(path).get_output_embeddings()
        return int(head(normed[0, -1]).argmax())


def replayed(path: Path, module: MtpModule, tokens: Sequence[int], depth: int) -> list[int]:
    """The draft of one module behind ``tokens``, all of it computed again for each next_token."""
    states, text = target_states(path, tokens[:-1]), list(tokens)
    for _ in range(depth):
        left = read(path, module, states, text[1:])
        text.append(next_token(path, left.normed))
        # Inputs made of the target's states stay so; the module's own state goes on behind them.
        states = torch.cat([states, left.states[:, -1:]], 1)
    return text[len(tokens) :]


def vanilla(
    path: Path, modules: Sequence[MtpModule], tokens: Sequence[int], depth: int
) -> list[int]:
    """The draft of one module per level; with fewer modules these are used in turn."""
    states, text = target_states(path, tokens[:-1]), list(tokens)
    for level in range(depth):
        left = read(path, modules[level % len(modules)], states, text[1 + level :])
        text.append(next_token(path, left.normed))
        states = left.states
    return text[len(tokens) :]


class Watch:
    """Keeps every draft, with the tokens that it was made behind."""

    def __init__(self, machine: Any) -> None:
        [entry] = machine.speculation.drafters
        self.drafter, self._inner = entry.drafter, entry.drafter.prepare_draft_tokens
        entry.drafter.prepare_draft_tokens = self._prepare
        self.seen: list[tuple[list[int], list[int], int]] = []

    def _prepare(self, scheduled: Any, manager: Any = None) -> None:
        self._inner(scheduled, manager)
        for request in scheduled.generation_requests:
            draft = list(request.draft.tokens)
            self.seen.append((list(request.tokens), draft, request.max_draft_len))
