"""How long forwards take, on a CPU and on a GPU."""

from __future__ import annotations

import time
from collections import deque

import torch


class ForwardTimer:
    """Measures what runs in its context, one forward at a time.

    On a CPU that is wall time. On CUDA a call returns when its work is queued, so two events of the
    stream are compared, once the GPU has passed them; reading them waits for nothing.

    Args:
        device: where the forwards run.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began = self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> None:
        if self._on_gpu:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events.append(pair)
            pair[0].record()
        else:
            self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """Seconds of the forwards that were finished since the last call."""
        while self._events and self._events[0][1].query():
            first, last = self._events.popleft()
            self._seconds += first.elapsed_time(last) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def wait(self) -> None:
        """Wait until the last forward is done, which on a CPU it is."""
        if self._events:
            self._events[-1][1].synchronize()
