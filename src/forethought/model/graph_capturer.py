"""Graphs of a device: what it does in a forward, captured once and replayed by one launch.

What captures one is a function of the backend (``backends.cuda``); here is how many there are, and
what becomes of failures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

MAX_GRAPHS = 80
"""Graphs that an engine captures at most; other shapes are computed eagerly."""


class Graph(Protocol):
    """What was captured."""

    output: Tensor
    """Overwritten by each replay."""

    def replay(self) -> None:
        """Queue it once more."""


Capture = Callable[[Callable[[], Tensor]], Graph]
"""Captures what a function queues on the device, without running it."""


class GraphCapturer:
    """Captures up to ``max_graphs`` graphs by ``capture``; counts them and their replays."""

    def __init__(self, capture: Capture, max_graphs: int = MAX_GRAPHS) -> None:
        self._capture, self._max_graphs = capture, max_graphs
        self.num_graphs = self.num_replays = 0

    def capture(self, compute: Callable[[], Tensor]) -> Graph:
        """Run ``compute`` once and capture it; raises what one of these raises."""
        with torch.inference_mode():
            compute()
            graph = self._capture(compute)
        self.num_graphs += 1
        return graph

    def try_capture(self, what: Hashable, compute: Callable[[], Tensor]) -> Graph | None:
        """The same; None if there are enough, or it fails, after which none is captured."""
        if self.num_graphs >= self._max_graphs:
            return None
        try:
            return self.capture(compute)
        except Exception:
            log.exception("no CUDA graph could be captured for %s; no others will be", what)
            self.stop()
            return None

    def split(self, max_graphs: int) -> GraphCapturer:
        """A capturer of a part of these graphs, whose failures are its own."""
        max_graphs = min(max_graphs, self._max_graphs)
        self._max_graphs -= max_graphs
        return GraphCapturer(self._capture, max_graphs)

    def stop(self) -> None:
        """Capture no more."""
        self._max_graphs = 0

    def replay(self, graph: Graph) -> Tensor:
        """Queue a graph; its output."""
        self.num_replays += 1
        graph.replay()
        return graph.output
