"""Loading through transformers: one module at a time, without progress bars, which a local
directory does not need, and without advice on kernels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.RLock()


@contextmanager
def one_module_at_a_time() -> Iterator[None]:
    """Wait until no other thread makes a module of transformers inside this context manager.

    While it makes one, transformers puts other functions in the place of ``tie_weights``,
    ``init_weights`` and torch's initialisers, for the whole process, sets torch's default dtype,
    and afterwards puts back what it saw before (``transformers.initialization``,
    ``modeling_utils``). Of two threads that overlap, the second sees the replacements of the first
    and leaves them for good: the tied output projection of every later checkpoint stays random.
    """
    with _lock:
        yield


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Have transformers show no bars for what this thread does inside. Other threads keep theirs,
    and the user's settings are as they were afterwards.
    """
    from transformers.utils import logging as transformers_logging

    thread, inside = threading.get_ident(), True

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inside and threading.get_ident() == thread:
            return factory(*args, **{**kwargs, "disable": True})
        return factory(*args, **kwargs) if before is None else before(factory, args, kwargs)

    before = transformers_logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        inside = False  # another load that began meanwhile may put this hook back: it does nothing
        transformers_logging.set_tqdm_hook(before)


@contextmanager
def without_kernel_advice() -> Iterator[None]:
    """Transformers recommends packages with kernels, once for each function that lacks one, when it
    is first called. Of functions that are called inside it will not.
    """
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
