"""The types of tensors in GGUF files: blocks of weights that share scales.

Numbers, names and sizes are those of the format (``ggml_type`` in ggml.h).
"""

from __future__ import annotations

from enum import Enum


class BlockType(Enum):
    """A type of tensor: its number, the weights of a block, and the bytes of one."""

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17

    def __init__(self, number: int, num_weights: int, num_bytes: int) -> None:
        self.number, self.num_weights, self.num_bytes = number, num_weights, num_bytes

    @classmethod
    def numbered(cls, number: int) -> BlockType | None:
        """The type of a number; None: there is none of it here."""
        return next((kind for kind in cls if kind.number == number), None)

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of a row of ``num_inputs`` weights, a multiple of ``num_weights``."""
        return num_inputs // self.num_weights * self.num_bytes
