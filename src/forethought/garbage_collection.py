"""Python's garbage collection, which is rarer while much is generated.

A generation makes some objects for each token that stay until its end. With Python's own thresholds
a collection of all objects follows every few thousand tokens and visits those of torch's modules,
too: a tenth of the time of a large batch on a small model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (5_000, 5, 200)
"""Objects made and not yet freed between two collections (Python's own default is 700), such
collections between two of the middle generation, and those between two of all objects."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collections are rarer inside, unless the program has made them rarer itself.

    Blocks in several threads may overlap: the thresholds are those before the first one once that
    has ended.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < RARE[0]:
        yield
        return
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        if gc.get_threshold() == RARE:
            gc.set_threshold(*before)


@contextmanager
def left_out_of_collections() -> Iterator[None]:
    """Collections inside leave out what exists already. A program that has frozen objects itself
    keeps them so.
    """
    keeps_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not keeps_frozen:
            gc.unfreeze()
