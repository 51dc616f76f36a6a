"""vLLM's CPU build: its engine in this process, compiled as it is by default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import DRAFT_MODEL, LOOKUP, Answer, Request, Settings

NUM_DRAFTED = 5
"""Draft tokens of a draft model."""
CACHE_GIB = 1


class PeerEngine:
    """See :class:`~benchmarks.peers.worker.Engine`. An engine for each way of speculation."""

    caches_prefixes = True

    def prepare(self, source: Path, folder: Path, settings: Settings) -> Path:
        return source

    def load(self, settings: Settings) -> None:
        # Before the import: one process, whose memory is measured, and the threads as given.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{settings.threads - 1}")
        os.environ["HF_HUB_OFFLINE"] = "1"
        import vllm

        self.vllm = vllm
        self.llms = {}
        for way in settings.ways:
            self.llms[way] = self._engine(settings, way)
            self._keep_kernels()

    def _engine(self, settings: Settings, way: str) -> Any:
        speculation: dict[str, Any] = {}
        if way == LOOKUP:
            speculation = {
                "method": "ngram",
                "num_speculative_tokens": settings.num_looked_up,
                "prompt_lookup_max": 3,
            }
        if way == DRAFT_MODEL:
            speculation = {
                "method": "draft_model",
                "model": settings.draft,
                "num_speculative_tokens": NUM_DRAFTED,
            }
        return self.vllm.LLM(
            settings.model,
            dtype=settings.dtype,
            max_model_len=settings.max_len,
            max_num_seqs=settings.max_batch,
            skip_tokenizer_init=True,
            speculative_config=speculation or None,
        )

    @staticmethod
    def _keep_kernels() -> None:
        """Register C++ kernels once per process: vLLM 0.32 fails when a second engine does."""
        from vllm.platforms import current_platform

        if hasattr(current_platform, "register_triton_kernel_overrides"):
            current_platform.register_triton_kernel_overrides = lambda: None

    def generate(self, request: Request) -> Answer:
        engine = self.llms[request.way].llm_engine
        for number, (prompt, length) in enumerate(
            zip(request.prompts, request.lengths, strict=True)
        ):
            params = self.vllm.SamplingParams(
                temperature=0.0,
                max_tokens=length,
                ignore_eos=request.eos is None,
                stop_token_ids=None if request.eos is None else [request.eos],
                detokenize=False,
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        done = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
        return Answer([done[number] for number in range(len(request.prompts))])

    def version(self) -> str:
        return f"vllm {self.vllm.__version__}"
