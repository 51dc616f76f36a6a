"""A draft model: a smaller language model with the target's vocabulary, over a KV storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from forethought.errors import ParameterError
from forethought.model import backends, loader
from forethought.model.attention.base import ForwardPass
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM
from forethought.model.device import find_device
from forethought.model.runner import ModelRunner
from forethought.speculative.draft_module import (
    ChainDrafter,
    DraftNetwork,
    ModuleOutput,
    TokenRange,
    compute_in_chunks,
)
from forethought.speculative.drafter import Target

PADDING = 0.02
"""Share of the vocabulary that may be padding in one model and not in the other."""


class DraftModel(DraftNetwork):
    """A draft model over a KV storage, with logits over the target's vocabulary.

    Ids that only the target has are read as 0 and have no probability: they are padding, and where
    a request uses them nevertheless, only the acceptance rate suffers.

    Args:
        runner: model and storage.
        vocab_size: of the target.
        max_num_tokens: tokens in one forward.

    Attributes:
        native: drafts in C++; None: the model does not run there.
    """

    ids: Tensor | None = None
    draft_trees = None

    def __init__(self, runner: ModelRunner, vocab_size: int, max_num_tokens: int) -> None:
        self.runner, self.max_num_tokens, self.vocab_size = runner, max_num_tokens, vocab_size
        self.windows = runner.lm.windows
        self._padding = max(0, vocab_size - runner.lm.vocab_size)
        self.forward_path = runner.lm.path.kind
        self.native = backends.cpu().draft_network(runner.lm, vocab_size)

    @property
    @override
    def draft_chains(self) -> ChainDrafter | None:
        """Where it runs in C++."""
        return None if self.native is None else self._draft_chains

    def _draft_chains(
        self, states: Tensor, forward_pass: ForwardPass, slots: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        assert self.native is not None
        self._replace_unknown(forward_pass)
        return self.native.draft_chains(forward_pass, slots)

    @classmethod
    def load(
        cls,
        directory: Path,
        target: Target,
        device: str | None = None,
        quantization: loader.Quantization | None = None,
    ) -> DraftModel:
        """Load a model for ``target``, in its own dtype, with a storage of as many pages.

        Where the target attends over pages in place, so does a draft model on its device.

        Args:
            directory: local Hugging Face directory.
            target: the model to draft for.
            device: name of the draft model's; None: the target's.
            quantization: of its weights at load; None: as stored.

        Raises:
            ModelError: it cannot be loaded.
            ParameterError: its vocabulary is not the target's, or there is no such device.
        """
        lm, pages = target.runner.lm, target.runner.storage
        own_device = lm.device if device is None else find_device(device)
        forward: loader.Forward = "torch" if lm.path.requested == "torch" else "auto"
        is_paged = backends.cuda().reads_pages(lm) and own_device == lm.device
        model = loader.load(
            directory,
            dtype="auto",
            device=own_device,
            attention=lm.backend if is_paged else "auto",
            quantization=quantization,
            forward=forward,
        )
        _check_sizes(directory, model, lm)
        has_scratch_page = is_paged and pages.has_scratch_page
        storage = model.storage(pages.num_pages, pages.page_size, has_scratch_page=has_scratch_page)
        return cls(ModelRunner(model, storage), lm.vocab_size, target.max_num_tokens)

    @property
    def max_positions(self) -> int:
        """Tokens that a sequence may have."""
        return self.runner.lm.max_positions

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """float32 ``[R, V]``: the logits that the rows want."""
        if self._padding:
            vocab_size = self.runner.lm.vocab_size
            rows = [
                replace(row, tokens=[token if token < vocab_size else 0 for token in row.tokens])
                for row in rows
            ]
        return self._over_target_vocabulary(self.runner.forward(rows))

    def __call__(self, states: Tensor, forward_pass: ForwardPass) -> ModuleOutput:
        """Reads no hidden states, and feeds none back.

        Positions after the context are computed as its last one: a short draft takes part in the
        forwards of longer ones, and the outputs after its end are not used.
        """
        batch, lm = forward_pass.batch, self.runner.lm
        positions = batch.positions.clamp(max=lm.max_positions - 1)
        forward_pass.batch = replace(batch, positions=positions)
        self._replace_unknown(forward_pass)
        logits = self._over_target_vocabulary(lm.run(forward_pass))
        return ModuleOutput(logits.new_empty(len(logits), 0), logits)

    def _replace_unknown(self, forward_pass: ForwardPass) -> None:
        if self._padding:
            batch, vocab_size = forward_pass.batch, self.runner.lm.vocab_size
            token_ids = batch.token_ids.where(batch.token_ids < vocab_size, 0)
            forward_pass.batch = replace(batch, token_ids=token_ids)

    def _over_target_vocabulary(self, logits: Tensor) -> Tensor:
        if self._padding:
            return pad(logits, (0, self._padding), value=-torch.inf)
        return logits[:, : self.vocab_size]

    def compute(self, ranges: Sequence[TokenRange]) -> Tensor:
        """Compute token ranges of several sequences; returns the logits ``[len(ranges), V]`` after
        each.
        """

        def forward(parts: Sequence[TokenRange], num_logits: int) -> Tensor:
            return self.forward([part.row(num_logits) for part in parts])

        return compute_in_chunks(ranges, self.max_num_tokens, forward)


def _check_sizes(directory: Path, draft: CausalLM, target: CausalLM) -> None:
    larger = max(draft.vocab_size, target.vocab_size)
    if abs(draft.vocab_size - target.vocab_size) > PADDING * larger:
        raise ParameterError(
            f"the draft model {directory} has another vocabulary",
            f"{draft.vocab_size} tokens, the target has {target.vocab_size}",
            "Take a draft model of the target's family",
        )
