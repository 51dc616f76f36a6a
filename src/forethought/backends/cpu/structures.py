"""The structures that C++ reads, as ``structures.h`` declares them.

Their fields are declared there alone: the classes here take names, order and types from it. Values
are given by name, so that the order of fields is no business of the caller's.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

HEADER = Path(__file__).parent / "cpp" / "structures.h"
SCALARS = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def declared_fields(header: str) -> dict[str, list[tuple[str, str, bool]]]:
    """The fields of each structure: name, type without ``const``, whether it is a pointer to it."""
    code = re.sub(r"//.*", "", header)
    return {
        name: [field for line in body.split(";") if line.strip() for field in _fields(line)]
        for name, body in re.findall(r"struct (\w+) \{(.*?)\};", code, re.DOTALL)
    }


def _fields(declaration: str) -> list[tuple[str, str, bool]]:
    """Of one declaration, such as ``const float *first, *second``."""
    parts = [re.findall(r"\w+|\*", part) for part in declaration.split(",")]
    kind = next(word for word in parts[0] if word != "const")
    return [(words[-1], kind, "*" in words) for words in parts]


_DECLARED = declared_fields(HEADER.read_text())


class CStruct(ctypes.Structure):
    """A structure of ``structures.h``, given by the names of its fields; others are 0."""

    __slots__ = ()

    if TYPE_CHECKING:  # no code of each call

        def __init__(self, **fields: Any) -> None: ...


class LinearStruct(CStruct):
    """A product ``y = x W^T + b``."""

    __slots__ = ()


class StoredExpertStruct(CStruct):
    """An expert in a file."""

    __slots__ = ()


class WeightPlaceStruct(CStruct):
    """A tensor of a layer in a file."""

    __slots__ = ()


class StoredLayerStruct(CStruct):
    """A layer in a file."""

    __slots__ = ()


class ExpertsStruct(CStruct):
    """A mixture of experts."""

    __slots__ = ()


class JoinStruct(CStruct):
    """How a draft module joins the embedding of a token and a hidden state."""

    __slots__ = ()


class LayerStruct(CStruct):
    """A decoder layer."""

    __slots__ = ()


class LowRankStruct(CStruct):
    """What an adapter adds to a product."""

    __slots__ = ()


class AdapterLayerStruct(CStruct):
    """What an adapter adds to the products of a layer."""

    __slots__ = ()


class ModelStruct(CStruct):
    """The packed weights of a network."""

    __slots__ = ()


class RowStruct(CStruct):
    """The new tokens of one sequence."""

    __slots__ = ()


class CallStruct(CStruct):
    """A forward of a batch."""

    __slots__ = ()


class ChainsStruct(CStruct):
    """Chains of drafted tokens."""

    __slots__ = ()


class BeamsStruct(CStruct):
    """A beam search."""

    __slots__ = ()


class SamplingStruct(CStruct):
    """What the distribution of a token depends on beside the logits."""

    __slots__ = ()


class DrawsStruct(CStruct):
    """Rows of logits to sample from."""

    __slots__ = ()


class ChainRowStruct(CStruct):
    """A sequence that is decoded with drafts."""

    __slots__ = ()


class TargetStatesStruct(CStruct):
    """Where the target's hidden states are stored."""

    __slots__ = ()


class ChainStepsStruct(CStruct):
    """Decode steps with drafts."""

    __slots__ = ()


class RecurrentStruct(CStruct):
    """A recurrent layer."""

    __slots__ = ()


class TokenStateStruct(CStruct):
    """Where the state before a token is, and where the one after it goes."""

    __slots__ = ()


class RecurrentCallStruct(CStruct):
    """A recurrent layer over a batch."""

    __slots__ = ()


class ProjectionStruct(CStruct):
    """One of the products that enter a layer."""

    __slots__ = ()


class ModuleAttentionStruct(CStruct):
    """The attention of a module whose other parts torch computes."""

    __slots__ = ()


class ModuleAttentionCallStruct(CStruct):
    """The attention of a module over a batch."""

    __slots__ = ()


class MlpStruct(CStruct):
    """The MLP of a module whose other parts torch computes."""

    __slots__ = ()


class MixtureStruct(CStruct):
    """Experts that a router chooses, and a shared MLP."""

    __slots__ = ()


class MixtureCallStruct(CStruct):
    """A mixture of experts over a batch."""

    __slots__ = ()


class SublayerStruct(CStruct):
    """A sublayer of a decoder and its residual connection."""

    __slots__ = ()


class SublayersCallStruct(CStruct):
    """Sublayers over a batch."""

    __slots__ = ()


class ModuleDecoderStruct(CStruct):
    """What a module computes in the place of layers, and around it."""

    __slots__ = ()


class ExpertsCallStruct(CStruct):
    """Experts of tokens whose choice is the caller's."""

    __slots__ = ()


class RouteCallStruct(CStruct):
    """The choice of experts alone."""

    __slots__ = ()


class TreesStruct(CStruct):
    """Dynamic draft trees."""

    __slots__ = ()


STRUCTURES = {cls.__name__.removesuffix("Struct"): cls for cls in CStruct.__subclasses__()}


def _type_of(kind: str, is_pointer: bool) -> Any:
    """The type in ctypes; addresses of scalars are integers."""
    if kind in STRUCTURES:
        return ctypes.POINTER(STRUCTURES[kind]) if is_pointer else STRUCTURES[kind]
    return ctypes.c_void_p if is_pointer else SCALARS[kind]


for _name, _cls in STRUCTURES.items():
    _cls._fields_ = [
        (field, _type_of(kind, is_pointer)) for field, kind, is_pointer in _DECLARED[_name]
    ]
