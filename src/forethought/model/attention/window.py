"""Windows: which of the positions before it a token of a layer attends to, as one number.

==========  ====================================================================================
``None``    all
``w > 0``   the last ``w``, its own included: sliding-window attention
``-c < 0``  those of its chunk, which are ``c`` positions from a multiple of ``c`` on: chunked
            attention (Llama 4)
==========  ====================================================================================
"""

from __future__ import annotations

from torch import Tensor

Window = int | None


def first_seen(position: int, window: Window) -> int:
    """The first position that a token attends to; below 0 where that is before the beginning."""
    if window is None:
        return 0
    return position - window + 1 if window > 0 else position // -window * -window


def is_seen(positions: Tensor, earlier: Tensor, window: int) -> Tensor:
    """bool: whether tokens at ``positions`` attend to those at ``earlier``, which are not after
    them; both int64, of shapes that broadcast.
    """
    if window > 0:
        return positions - earlier < window
    return positions // -window == earlier // -window


def most_seen(window: int) -> int:
    """Positions that a token attends to at most; sequences of this length are seen whole."""
    return abs(window)
