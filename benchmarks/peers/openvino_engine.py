"""OpenVINO GenAI's pipeline with continuous batching, on a model exported by optimum-intel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from benchmarks.peers.worker import DRAFT_MODEL, LOOKUP, Answer, Request, Settings

NUM_DRAFTED = 5
"""Draft tokens of a draft model."""
CACHE_GB = 2
FORMATS = {"int8": "int8", "int4": "int4"}


class PeerEngine:
    """See :class:`~benchmarks.peers.worker.Engine`. A pipeline for each way of speculation."""

    caches_prefixes = True

    def prepare(self, source: Path, folder: Path, settings: Settings) -> Path:
        if source.suffix == ".gguf":
            return source
        target = folder / (settings.form or "float32")
        if not (target / "openvino_model.xml").exists():
            command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
            command += ["--model", str(source), "--task", "text-generation-with-past"]
            command += ["--weight-format", FORMATS.get(settings.form, "fp32"), str(target)]
            subprocess.run(command, check=True, stdout=sys.stderr)
        return target

    def load(self, settings: Settings) -> None:
        self.properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings.threads}
        if not settings.form:  # quantised models with the cache as OpenVINO has it, in 8 bits
            short = {"float32": "f32", "bfloat16": "bf16"}[settings.dtype]
            self.properties |= {"INFERENCE_PRECISION_HINT": short, "KV_CACHE_PRECISION": short}
        self.pipelines = {way: self._pipeline(settings, way) for way in settings.ways}
        self.number, self.num_looked_up = 0, settings.num_looked_up

    def _pipeline(self, settings: Settings, way: str) -> Any:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = settings.max_batch
        scheduler.enable_prefix_caching = True
        extra: dict[str, Any] = {}
        if way == LOOKUP:
            extra["prompt_lookup"] = True
        if way == DRAFT_MODEL:
            extra["draft_model"] = openvino_genai.draft_model(
                settings.draft, "CPU", **self.properties
            )
        return openvino_genai.ContinuousBatchingPipeline(
            settings.model, scheduler, "CPU", {**self.properties, **extra}
        )

    def generate(self, request: Request) -> Answer:
        pipeline, handles = self.pipelines[request.way], []
        for prompt, length in zip(request.prompts, request.lengths, strict=True):
            self.number += 1
            tensor = openvino.Tensor(np.array([prompt], dtype=np.int64))
            config = self._config(length, request)
            handles.append(pipeline.add_request(self.number, tensor, config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return Answer([list(handle.read_all()[0].generated_ids) for handle in handles])

    def _config(self, length: int, request: Request) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = length
        config.do_sample = False
        config.ignore_eos = request.eos is None
        if request.eos is not None:
            config.eos_token_id = request.eos
            config.stop_token_ids = {request.eos}
        if request.way == LOOKUP:
            config.num_assistant_tokens, config.max_ngram_size = self.num_looked_up, 3
        if request.way == DRAFT_MODEL:
            config.num_assistant_tokens = NUM_DRAFTED
        return config

    def version(self) -> str:
        return f"openvino-genai {openvino_genai.__version__}"
