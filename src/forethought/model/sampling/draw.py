"""A coin that depends on nothing but its place, and the draw that it decides.

Knows nothing about logits or laws' origins.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor


def coin(seed: int, stream: int, position: int, use: int = 0) -> float:
    """A uniform number in [0, 1) with 53 random bits: a pure function of the four integers.

    There is no generator to carry along: the coin of output token ``position`` of sample ``stream``
    is the same in any company, after preemption, fork or rewind, and coins may be asked for in any
    order. Each argument counts modulo 2**64.

    Args:
        seed: of the request.
        stream: the sample.
        position: the token that it helps to decide.
        use: 0 for the draw of the token itself; others where a token needs more coins than one. The
            low 8 bits say what for (1 drafting, 2 acceptance, 3 made-up acceptance), the rest
            number the coins of it.
    """
    place = struct.pack("<QQQ", seed & _WORD, stream & _WORD, position & _WORD)
    if use:
        place += struct.pack("<Q", use & _WORD)
    return (int.from_bytes(blake2b(place, digest_size=8).digest(), "little") >> 11) * 2.0**-53


_WORD = 2**64 - 1


def pick(probs: Tensor, coins: Sequence[float] | Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative law in float64.

    Args:
        probs: [N, V] with positive mass in every row; need not be normalised.
        coins: N numbers in [0, 1).

    Returns:
        [N] int64; never a token of probability zero, however close to 1 the coin.
    """
    mass = probs.cumsum(dim=-1, dtype=torch.float64)  # [N, V]
    coins = torch.as_tensor(coins, dtype=torch.float64, device=probs.device).unsqueeze(1)
    # A float64 below 1 times the total is below the total after rounding too, and the first token
    # whose cumulative mass exceeds that has mass of its own.
    return torch.searchsorted(mass, coins * mass[:, -1:], right=True).squeeze(1)
