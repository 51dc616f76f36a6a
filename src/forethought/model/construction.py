"""Modules of transformers are made one at a time in a process.

While it makes a module, transformers puts other functions in the place of ``tie_weights``,
``init_weights`` and torch's initialisers, for the whole process, sets torch's default dtype, and
afterwards puts back what it saw before (``transformers.initialization``, ``modeling_utils``). Of
two threads that overlap, the second sees the replacements of the first and leaves them for good:
the tied output projection of every later checkpoint stays random.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()


@contextmanager
def one_module_at_a_time() -> Iterator[None]:
    """Wait until no other thread makes a module of transformers, by its configuration or from a
    checkpoint, through this context manager.
    """
    with _lock:
        yield
