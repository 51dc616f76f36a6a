"""The target of a training run: it generates texts, and reads texts for a drafter to learn from.

One copy of the model serves for generating through the engine, with a drafter or without, and for
forward passes that return hidden states and next-token distributions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine
from forethought.engine.resolve import build_drafter_entry
from forethought.engine.scheduler import Limits
from forethought.engine.sequence import Sequence as Live
from forethought.kv.pool import PagePool
from forethought.kv.table import PageTable
from forethought.llm.tokenizer import Tokenizer
from forethought.model import loader
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM, TransformersNetwork
from forethought.model.device import find_device
from forethought.model.runner import ModelRunner
from forethought.outputs import SpeculationMetrics
from forethought.speculative.drafter import Target

_PAGE_SIZE = 16
_FORWARD_TOKENS = 2048
"""Tokens in one forward pass: bounds the memory of logits."""
_BATCH_SIZE = 32
"""Number of sequences that are generated concurrently."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Hidden states and probabilities at the T tokens of some texts, concatenated."""

    states: Mapping[int, Tensor]
    """By layer index (see ``model.hidden_states``): [T, hidden] in the model's dtype."""
    choices: Tensor
    """int64 [T, K]: the most probable next tokens at each."""
    probs: Tensor
    """float32 [T, K]: their probabilities at temperature 1."""

    def split(self, lengths: Sequence[int]) -> list[Observed]:
        """Of each text, their lengths being ``lengths``; views."""
        sizes = list(lengths)
        states = {layer_id: all_.split(sizes) for layer_id, all_ in self.states.items()}
        pairs = zip(self.choices.split(sizes), self.probs.split(sizes), strict=True)
        return [
            Observed({layer_id: parts[n] for layer_id, parts in states.items()}, choices, probs)
            for n, (choices, probs) in enumerate(pairs)
        ]


class Teacher:
    """A target model with its tokenizer, both from ``directory``."""

    def __init__(self, lm: CausalLM, tokenizer: Tokenizer, directory: Path) -> None:
        self.lm, self.tokenizer, self.directory = lm, tokenizer, directory
        self._runner: ModelRunner | None = None

    @classmethod
    def load(
        cls, directory: Path, dtype: str = "auto", device: str = "auto", fuse: bool = True
    ) -> Teacher:
        """Load a local Hugging Face directory; raises ModelError if that fails.

        With ``fuse``, the native or the fused forward is used where there is one, and ``module`` is
        not available.
        """
        lm = loader.load(
            directory,
            dtype=dtype,
            device=find_device(device),
            fuse=fuse,
            forward="auto" if fuse else "torch",
        )
        return cls(lm, Tokenizer.load(directory), directory)

    @property
    def module(self) -> PreTrainedModel:
        """The transformers module that runs; the model was loaded with ``fuse=False``."""
        assert isinstance(self.lm.network, TransformersNetwork)
        return self.lm.network.module

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        return self.lm.hidden_size

    def observe(
        self, texts: Sequence[Sequence[int]], layer_ids: Sequence[int], width: int = 8
    ) -> Observed:
        """Hidden states of ``layer_ids`` and the top ``width`` probabilities at every token; each
        text fits the context.
        """
        reader = _Reader(layer_ids)
        top_k: list[tuple[Tensor, Tensor]] = []
        for logits in self._read(texts, reader):
            top = logits.softmax(dim=-1).topk(min(width, logits.shape[-1]))
            top_k.append((top.indices, top.values))
        return Observed(
            {layer_id: torch.cat(states) for layer_id, states in reader.states.items()},
            torch.cat([indices for indices, _ in top_k]),
            torch.cat([values for _, values in top_k]),
        )

    def distributions(self, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Log-probabilities of the next token at temperature 1 in nats, float32 ``[T, vocab]``, at
        every token of some whole texts at a time; how many depends on the texts alone.
        """
        for logits in self._read(texts, _Reader(())):
            yield logits.log_softmax(dim=-1)

    def _read(self, texts: Sequence[Sequence[int]], reader: _Reader) -> Iterator[Tensor]:
        """Logits ``[T, vocab]`` of some texts at a time."""
        runner = self._reading(sum(-(-len(text) // _PAGE_SIZE) for text in texts))
        pool = PagePool(runner.storage.num_pages, _PAGE_SIZE)
        for part in _parts(texts):
            rows = []
            for text in part:
                table = PageTable(pool)
                table.append(len(text))
                rows.append(Row(list(text), 0, table))
            yield runner.forward(rows, [reader] if reader.layer_ids else [])

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        drafter: DecodingBaseConfig | None = None,
    ) -> Answers:
        """Continue prompts through the engine, with one of ``params`` each, speculatively if
        ``drafter``.

        Raises:
            UsageError: a prompt does not fit, or the drafter cannot be loaded.
            RequestError: a request failed.
        """
        machine = self._engine(drafter)
        began = time.perf_counter()
        live = [
            machine.add(ids, sampling)[0] for ids, sampling in zip(prompts, params, strict=True)
        ]
        while machine.has_work:
            for event in machine.step():
                if event.error is not None:
                    raise event.error
        seconds = time.perf_counter() - began
        machine.shutdown()
        return Answers(live, seconds)

    def _engine(self, drafter: DecodingBaseConfig | None) -> Engine:
        lm = self.lm
        pages = _BATCH_SIZE * -(-lm.max_positions // _PAGE_SIZE)
        runner = ModelRunner(lm, lm.storage(pages, _PAGE_SIZE))
        limits = Limits(_BATCH_SIZE, _FORWARD_TOKENS, lm.max_positions)
        drafters = []
        if drafter is not None:
            drafters = [build_drafter_entry(drafter, Target(runner, _FORWARD_TOKENS), _BATCH_SIZE)]
        return Engine(runner, limits, drafters=drafters)

    def _reading(self, pages: int) -> ModelRunner:
        """A runner with at least ``pages`` pages, kept for the next call."""
        if self._runner is None or self._runner.storage.num_pages < pages:
            lm = self.lm
            storage = lm.storage(pages, _PAGE_SIZE)
            self._runner = ModelRunner(lm, storage)
        return self._runner


class Answers:
    """Generated tokens and metrics of some prompts."""

    def __init__(self, live: Sequence[Live], seconds: float) -> None:
        self.token_ids = [list(sequence.output) for sequence in live]
        self.metrics = sum((sequence.metrics for sequence in live), SpeculationMetrics())
        """Summed over the prompts."""
        self.seconds = seconds
        """Wall time."""


class _Reader:
    """Keeps all hidden states that the runner passes to it."""

    def __init__(self, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self.states: dict[int, list[Tensor]] = {layer_id: [] for layer_id in layer_ids}

    def write(self, slots: Tensor, states: Mapping[int, Tensor]) -> None:
        for layer_id in self.layer_ids:
            self.states[layer_id].append(states[layer_id].clone())  # out of inference mode

    def mark_stored(self, slots: object) -> None:
        """Nothing is stored by slot here."""


def _parts(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Consecutive texts that share a forward pass."""
    part: list[Sequence[int]] = []
    for text in texts:
        if part and sum(map(len, part)) + len(text) > _FORWARD_TOKENS:
            yield part
            part = []
        part.append(text)
    if part:
        yield part
