"""``generate`` of transformers, what every other engine is compared with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.peers.worker import DRAFT_MODEL, LOOKUP, PLAIN, Answer, Request, Settings
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria


class FirstToken(StoppingCriteria):
    """Stops nothing; keeps the time of the first token."""

    def __init__(self) -> None:
        self.time: float | None = None

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self.time is None:
            self.time = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class PeerEngine:
    """See :class:`~benchmarks.peers.worker.Engine`."""

    caches_prefixes = False

    def prepare(self, source: Path, folder: Path, settings: Settings) -> Path:
        return source

    def load(self, settings: Settings) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(settings.threads)
        self.module = self._load(settings.model, settings.dtype)
        self.max_batch = settings.max_batch
        self.extras: dict[str, dict[str, Any]] = {
            PLAIN: {},
            LOOKUP: {"prompt_lookup_num_tokens": settings.num_looked_up},
        }
        if settings.draft:
            assistant = self._load(settings.draft, settings.dtype)
            self.extras[DRAFT_MODEL] = {"assistant_model": assistant}

    def _load(self, path: str, dtype: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def generate(self, request: Request) -> Answer:
        """In batches of neighbours, each padded on the left and as long as its longest answer."""
        tokens: list[list[int]] = []
        first = None
        for begin in range(0, len(request.prompts), self.max_batch):
            neighbours = slice(begin, begin + self.max_batch)
            answer = self._batch(request, request.prompts[neighbours], request.lengths[neighbours])
            tokens += answer.tokens
            first = first or answer.first
        return Answer(tokens, first)

    def _batch(self, request: Request, prompts: list[list[int]], lengths: list[int]) -> Answer:
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        fixed = {} if request.eos is not None else {"min_new_tokens": max(lengths)}
        config = GenerationConfig(
            max_new_tokens=max(lengths),
            do_sample=False,
            eos_token_id=request.eos,
            pad_token_id=0,
            **fixed,
            **{k: v for k, v in self.extras[request.way].items() if k != "assistant_model"},
        )
        first = FirstToken()
        extra = {k: v for k, v in self.extras[request.way].items() if k == "assistant_model"}
        timing = {"stopping_criteria": [first]} if request.timed else {}
        with torch.inference_mode():
            output = self.module.generate(
                padded, attention_mask=mask, generation_config=config, **timing, **extra
            )
        rows = output[:, width:].tolist()
        cut = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return Answer([_until(row, request.eos) for row in cut], first.time)

    def version(self) -> str:
        return f"transformers {transformers.__version__}, torch {torch.__version__}"


def _until(row: list[int], eos: int | None) -> list[int]:
    """The row up to and with the token that ends it."""
    return row[: row.index(eos) + 1] if eos in row else row
