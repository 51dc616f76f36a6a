"""The metadata of a GGUF file, read by key with the type and the range that the key has."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from forethought.errors import ModelError
from forethought.gguf.block_type import BlockType
from forethought.gguf.file import GgufFile, StringArray

_MAX_SIZE = 1 << 27
_SMALLEST, _LARGEST = 1e-38, 1e38
_MAX_FLOATS = 1 << 16
_MAX_DIGITS = 9
"""Decimal digits with which every float32 is told from the others."""


class Metadata:
    """Values of a file's metadata. Keys without a dot-separated owner, such as ``rope.freq_base``,
    are those of the architecture (``llama.rope.freq_base``).

    Attributes:
        file: whose metadata it is.
        architecture: as ``general.architecture`` names it.

    Every method raises ModelError, with the key, for a value that it cannot be.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = self.text("general.architecture")

    def get(self, key: str) -> Any:
        """The value of a setting of the architecture; None: the file has none."""
        return self.file.metadata.get(self.full_key(key))

    def full_key(self, key: str) -> str:
        """A setting of the architecture, as the file names it."""
        return f"{self.architecture}.{key}"

    def size(self, key: str, default: int | None = None) -> int:
        """A number from 1 to 2^27; of an array with one for each layer, which have to be equal."""
        full_key, value = self.full_key(key), self.get(key)
        if isinstance(value, Sequence) and len(set(value)) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value <= _MAX_SIZE:
            raise self.refused(full_key, value, f"a whole number from 1 to {_MAX_SIZE}")
        return value

    def layer_sizes(self, key: str) -> list[int]:
        """An array with a number up to 2^27, or a flag, for each layer: 0 where it has no such
        part.
        """
        full_key, value = self.full_key(key), self.get(key)
        num_layers = self.size("block_count")
        is_array = isinstance(value, tuple) and len(value) == num_layers
        if not is_array or any(not isinstance(n, int) or not 0 <= n <= _MAX_SIZE for n in value):
            raise self.refused(full_key, value, f"an array of {num_layers} whole numbers")
        return list(value)

    def optional_size(self, key: str) -> int | None:
        """As ``size``; None for 0 or where the file has none."""
        return self.size(key) if self.get(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero: the shortest of which the stored float32 is the nearest."""
        full_key, value = self.full_key(key), self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not _SMALLEST <= value <= _LARGEST:
            raise self.refused(full_key, value, "a number above zero")
        return shortest(float(value))

    def optional_number(self, key: str) -> float | None:
        """As ``number``; None for 0 or where the file has none."""
        return self.number(key) if self.get(key) else None

    def text(self, full_key: str, default: str | None = None) -> str:
        """A string, of a whole key."""
        value = self.file.metadata.get(full_key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refused(full_key, value, "a string")
        return value

    def flag(self, full_key: str) -> bool | None:
        """True or false, of a whole key; None: the file has none."""
        value = self.file.metadata.get(full_key)
        if value is not None and not isinstance(value, bool):
            raise self.refused(full_key, value, "true or false")
        return value

    def strings(self, full_key: str) -> StringArray:
        """An array of strings, of a whole key."""
        value = self.file.metadata.get(full_key)
        if not isinstance(value, StringArray):
            raise self.refused(full_key, value, "an array of strings")
        return value

    def numbers(self, full_key: str, count: int) -> tuple[Any, ...]:
        """An array of ``count`` numbers, of a whole key."""
        value = self.file.metadata.get(full_key)
        if not isinstance(value, tuple) or len(value) != count:
            raise self.refused(full_key, value, f"an array of {count} numbers")
        return value

    def has_part(self, part: str) -> bool:
        """Whether any layer has a tensor, such as ``attn_q.bias``."""
        return any(
            name.startswith("blk.") and name.split(".", 2)[-1] == part for name in self.file.tensors
        )

    def token_id(self, name: str) -> int | None:
        """``tokenizer.ggml.<name>_token_id``; None where the file has none, or one that is no
        token of the vocabulary.
        """
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.file.metadata.get(key)
        if value is None:
            return None
        if type(value) is not int:
            raise self.refused(key, value, "the id of a token")
        return value if 0 <= value < self.num_tokens else None

    @property
    def num_tokens(self) -> int:
        """Of the vocabulary, as the embeddings have them."""
        info = self.file.tensors.get("token_embd.weight")
        if info is None or len(info.shape) != 2:
            raise self.unsupported("it has no token_embd.weight")
        return info.shape[0]

    def floats(self, tensor: str) -> list[float]:
        """The values of a tensor of float32 ``[n]``, each as ``number`` has them."""
        info = self.file.tensors[tensor]
        is_vector = len(info.shape) == 1 and info.shape[0] <= _MAX_FLOATS
        if info.type is not BlockType.F32 or not is_vector:
            raise self.unsupported(f"its {tensor} is {info.type.name} {list(info.shape)}")
        values = struct.unpack(f"<{info.shape[0]}f", self.file.raw(tensor))
        return [shortest(value) for value in values]

    def refused(self, full_key: str, value: Any, allowed: str) -> ModelError:
        """The refusal of a value."""
        content = "missing" if value is None else f"{value!r:.60}"
        return ModelError(
            f"cannot read the GGUF file {self.file.path}",
            f"its {full_key} is {content}, not {allowed}",
            "Convert the model again",
        )

    def unsupported(self, why: str, fix: str = "") -> ModelError:
        """The refusal of a model that is not served here."""
        return ModelError(
            f"the model in {self.file.path} is not supported",
            why,
            fix or "Give the safetensors that it was made from, as a Hugging Face directory",
        )


def shortest(value: float) -> float:
    """The number with the fewest digits whose nearest float32 is that of ``value``."""
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return value
    for digits in range(1, _MAX_DIGITS + 1):
        number = float(f"{value:.{digits}g}")
        if struct.pack("<f", number) == stored:
            return number
    return value
