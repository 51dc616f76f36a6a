"""Ours, through the public interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.worker import DRAFT_MODEL, LOOKUP, PLAIN, Answer, Request, Settings

import forethought
from forethought import (
    LLM,
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
    SpeculationParams,
)

NUM_DRAFTED = 16
"""Draft tokens of a draft model."""
WAYS = {
    PLAIN: SpeculationParams(enabled=False),
    LOOKUP: SpeculationParams(drafter="ngram"),
    DRAFT_MODEL: SpeculationParams(drafter="draft_target"),
}


class PeerEngine:
    """See :class:`~benchmarks.peers.worker.Engine`."""

    caches_prefixes = True

    def prepare(self, source: Path, folder: Path, settings: Settings) -> Path:
        return source

    def load(self, settings: Settings) -> None:
        fields: dict[str, Any] = {"dtype": settings.dtype, "num_threads": settings.threads}
        if settings.model.endswith(".gguf"):
            fields |= {"dtype": "auto"}
        elif settings.form:
            fields |= {"dtype": "auto", "quantization": settings.form}
        drafters: list[Any] = []
        if LOOKUP in settings.ways:
            drafters.append(
                NGramDecodingConfig(
                    max_draft_len=settings.num_looked_up,
                    max_matching_ngram_size=3,
                    is_use_oldest=False,
                )
            )
        if settings.draft:
            drafters.append(
                DraftTargetDecodingConfig(
                    max_draft_len=NUM_DRAFTED, speculative_model=settings.draft
                )
            )
        self.speculates = bool(drafters)
        self.llm = LLM(
            settings.model,
            max_batch_size=settings.max_batch,
            max_seq_len=settings.max_len,
            speculative_config=drafters,
            **fields,
        )

    def generate(self, request: Request) -> Answer:
        extra = {"speculation": WAYS[request.way]} if self.speculates else {}
        params = [
            SamplingParams(
                max_tokens=length, temperature=0.0, ignore_eos=request.eos is None, **extra
            )
            for length in request.lengths
        ]
        results = self.llm.generate(request.prompts, params)
        return Answer([list(result.outputs[0].token_ids) for result in results])

    def version(self) -> str:
        return f"forethought {forethought.__version__}, torch {torch.__version__}"
