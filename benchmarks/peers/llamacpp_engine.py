"""llama.cpp through the C interface that llama-cpp-python binds: all sequences in one batch."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np
from benchmarks.peers.gguf_file import TYPES, write_gguf
from benchmarks.peers.worker import Answer, Request, Settings
from llama_cpp import _ggml

BATCH, MICRO_BATCH = 2048, 512
"""Tokens that one call takes, and that one pass through the network takes; llama.cpp's own."""


@dataclass
class Row:
    """A sequence in progress."""

    number: int
    """Of its prompt."""
    sequence: int
    """In the KV cache."""
    waiting: list[int]
    """Tokens to compute: what is left of the prompt, or the last token."""
    position: int = 0
    tokens: list[int] = field(default_factory=list)


def quantise(source: Path, path: Path, kind: str) -> None:
    """Write ``path``, a GGUF file with the weights of ``source`` in llama.cpp's mixture ``kind``,
    such as ``q4_k_m``.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    params.allow_requantize = True
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(path).encode(), ctypes.byref(params)
    )
    assert not failed, failed


class PeerEngine:
    """See :class:`~benchmarks.peers.worker.Engine`."""

    caches_prefixes = False

    def prepare(self, source: Path, folder: Path, settings: Settings) -> Path:
        if source.suffix == ".gguf" and not settings.form:
            return source
        kind = settings.form or settings.dtype
        path = folder / f"{kind}.gguf"
        if path.exists():
            return path
        if source.suffix == ".gguf":
            quantise(source, path, kind)
        else:
            write_gguf(source, path, kind)
        return path

    def load(self, settings: Settings) -> None:
        if plugins := os.environ.get("LLAMA_CPP_LIB_PATH"):  # kernels of each processor apart
            _ggml.libggml.ggml_backend_load_all_from_path(plugins.encode())
        llama_cpp.llama_backend_init()
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, None)
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(settings.model.encode(), params)
        assert self.model, settings.model
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        context_params = llama_cpp.llama_context_default_params()
        context_params.n_ctx = settings.max_len * settings.max_batch
        context_params.n_batch, context_params.n_ubatch = BATCH, MICRO_BATCH
        context_params.n_seq_max = settings.max_batch
        context_params.n_threads = context_params.n_threads_batch = settings.threads
        if not settings.form and settings.dtype == "float32":
            context_params.type_k = context_params.type_v = TYPES["float32"].value
        self.context = llama_cpp.llama_init_from_model(self.model, context_params)
        assert self.context
        self.max_batch = settings.max_batch
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def generate(self, request: Request) -> Answer:
        """Decodes first, then as many tokens of prompts as a batch takes."""
        done: dict[int, list[int]] = {}
        queue = list(range(len(request.prompts)))
        free = list(range(self.max_batch))
        rows: list[Row] = []
        first = None
        while queue or rows:
            while queue and free:
                number = queue.pop(0)
                rows.append(Row(number, free.pop(0), list(request.prompts[number])))
            begun = not queue and all(row.tokens for row in rows)
            if request.timed and first is None and begun:
                first = time.perf_counter()
            waits = request.timed and first is None  # until all prompts are read
            for row, token in self._step([r for r in rows if not (waits and r.tokens)]):
                row.tokens.append(token)
                row.waiting = [token]
                if len(row.tokens) == request.lengths[row.number] or token == request.eos:
                    done[row.number] = row.tokens
                    rows.remove(row)
                    free.append(row.sequence)
                    self._forget(row.sequence)
        return Answer([done[number] for number in range(len(request.prompts))], first)

    def _step(self, rows: list[Row]) -> list[tuple[Row, int]]:
        """Compute waiting tokens; the rows that have a next one, with it."""
        batch, count = self.batch, 0
        last: list[tuple[Row, int]] = []
        for row in sorted(rows, key=lambda row: len(row.waiting)):
            chunk = row.waiting[: BATCH - count]
            for token in chunk:
                batch.token[count] = token
                batch.pos[count] = row.position
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = row.sequence
                batch.logits[count] = 0
                row.position += 1
                count += 1
            row.waiting = row.waiting[len(chunk) :]
            if chunk and not row.waiting:
                batch.logits[count - 1] = 1
                last.append((row, count - 1))
        batch.n_tokens = count
        failed = llama_cpp.llama_decode(self.context, batch)
        assert not failed, failed
        return [(row, self._greedy(index)) for row, index in last]

    def _greedy(self, index: int) -> int:
        """The most probable token after token ``index`` of the batch."""
        logits = llama_cpp.llama_get_logits_ith(self.context, index)
        size = ctypes.POINTER(ctypes.c_float * self.vocab_size)
        return int(np.frombuffer(ctypes.cast(logits, size).contents, np.float32).argmax())

    def _forget(self, sequence: int) -> None:
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_seq_rm(memory, sequence, 0, -1)

    def version(self) -> str:
        system = llama_cpp.llama_print_system_info().decode()
        return f"llama-cpp-python {llama_cpp.__version__} ({system})"
