"""A small language model beside the target: loaded to fit it, and run over what it has not seen.

Knows nothing about which pages its keys and values lie in, or what is done with its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from forethought.errors import ParameterError
from forethought.kv.storage import KvStorage
from forethought.kv.table import ReadableTable
from forethought.model import loader
from forethought.model.attention.base import ForwardPass
from forethought.model.attention.workspace import KvWorkspace
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM
from forethought.model.device import find_device
from forethought.model.runner import ModelRunner
from forethought.speculative.registry import Target

PADDING = 0.02
"""Share of the vocabulary that may be padding in one model and not in the other."""


class Past(NamedTuple):
    """The tokens of one sequence; all from ``start`` on are to be computed."""

    tokens: Sequence[int]
    start: int
    table: ReadableTable
    """Reaches to their end or further."""


class DraftModel:
    """A draft model over a storage, which speaks the target's vocabulary.

    Ids that only the target has read as 0 and are never likely: they are padding, and if somebody
    uses them nevertheless, drafts are worse for it.

    Args:
        runner: model and storage.
        vocab_size: of the target.
        max_num_tokens: tokens in one forward.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, max_num_tokens: int) -> None:
        self.runner, self._max_num_tokens = runner, max_num_tokens
        self._vocab_size, self._missing = vocab_size, max(0, vocab_size - runner.lm.vocab_size)

    @classmethod
    def load(cls, directory: Path, target: Target, device: str | None = None) -> DraftModel:
        """Load a model for ``target``, in the dtype of its own, with a storage of as many pages.

        Args:
            directory: local Hugging Face directory.
            target: the model to draft for.
            device: name of the draft model's; None: the target's.

        Raises:
            ModelError: it cannot be loaded.
            ParameterError: its vocabulary is not the target's, or there is no such device.
        """
        lm, pages = target.runner.lm, target.runner.storage
        place = lm.device if device is None else find_device(device)
        model = loader.load(directory, dtype="auto", device=place)
        _check_sizes(directory, model, lm)
        storage = KvStorage(
            model.layer_shapes, pages.num_pages, pages.page_size, model.dtype, model.device
        )
        return cls(ModelRunner(model, storage), lm.vocab_size, target.max_num_tokens)

    @property
    def max_positions(self) -> int:
        """Tokens that a sequence may have."""
        return self.runner.lm.max_positions

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """float32 ``[R, V]`` over the target's vocabulary: the logits that the rows want."""
        if self._missing:
            known = self.runner.lm.vocab_size
            rows = [
                replace(row, tokens=[token if token < known else 0 for token in row.tokens])
                for row in rows
            ]
        return self._spoken(self.runner.forward(rows))

    def _spoken(self, logits: Tensor) -> Tensor:
        """Over the target's vocabulary."""
        if self._missing:
            return pad(logits, (0, self._missing), value=-torch.inf)
        return logits[:, : self._vocab_size]

    def workspace(
        self, tables: Sequence[ReadableTable], lengths: Sequence[int], room: int
    ) -> KvWorkspace:
        """Where up to ``room`` tokens of each can be put behind the computed ones of tables."""
        return KvWorkspace(self.runner.storage, tables, lengths, room, self.runner.lm.windows)

    def read(
        self, workspace: KvWorkspace, parts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Tensor:
        """Put known tokens, equally many of each sequence, behind strands.

        Args:
            strands: which end where the parts begin.
            parts: the tokens of each.
            starts: where they begin.

        Returns:
            float32 ``[B, V]``: the logits behind each.
        """
        tokens = [token for part in parts for token in part]
        positions = [
            start + place
            for start, part in zip(starts, parts, strict=True)
            for place in range(len(part))
        ]
        index = torch.tensor([tokens, positions], device=self.runner.lm.device)
        return self.advance(workspace.chain(index[0], index[1]))

    def advance(self, forward_pass: ForwardPass) -> Tensor:
        """float32 ``[R, V]`` over the target's vocabulary: the logits that a pass wants."""
        batch = forward_pass.batch
        if self._missing:
            fitting = batch.token_ids < self.runner.lm.vocab_size
            forward_pass.batch = replace(batch, token_ids=batch.token_ids.where(fitting, 0))
        return self._spoken(self.runner.lm.run(forward_pass))

    def compute(self, pasts: Sequence[Past]) -> Tensor:
        """Compute what is missing of several sequences, at least the last token of each.

        Returns:
            float32 ``[len(pasts), V]``: the logits behind each.
        """
        starts = [past.start for past in pasts]
        while sum(len(p.tokens) - s for p, s in zip(pasts, starts, strict=True)) > max(
            self._max_num_tokens, len(pasts)
        ):
            room, rows = self._max_num_tokens, list[Row]()
            for place, past in enumerate(pasts):  # parts of the pasts, nobody's last token
                stop = min(len(past.tokens) - 1, starts[place] + room)
                if stop > starts[place]:
                    rows.append(_row(past, starts[place], stop, wanted=0))
                    room -= stop - starts[place]
                    starts[place] = stop
            self.forward(rows)
        return self.forward(
            [
                _row(past, start, len(past.tokens), wanted=1)
                for past, start in zip(pasts, starts, strict=True)
            ]
        )


def _row(past: Past, start: int, stop: int, wanted: int) -> Row:
    tokens = list(past.tokens[start:stop])
    return Row(tokens, start, past.table.prefix(stop), logits_from=len(tokens) - wanted)


def _check_sizes(directory: Path, draft: CausalLM, target: CausalLM) -> None:
    """Widths may differ by padding, not by more."""
    most = max(draft.vocab_size, target.vocab_size)
    if abs(draft.vocab_size - target.vocab_size) > PADDING * most:
        raise ParameterError(
            f"the draft model {directory} has another vocabulary",
            f"{draft.vocab_size} tokens, the target has {target.vocab_size}",
            "Take a draft model of the target's family",
        )
