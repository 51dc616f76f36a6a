"""How a weight of a transformers module comes out of the tensors of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forethought.errors import ModelError
from forethought.gguf.file import GgufFile, TensorInfo


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Value heads of which several share a key head.

    A file has the first head of each key head, then the second of each, and so on; a module has the
    heads of a key head together.

    Attributes:
        begin: the row, or column, from which on the value heads are.
        num_groups: key heads.
        group_size: value heads of each.
    """

    begin: int
    num_groups: int
    group_size: int


@dataclass(frozen=True, slots=True)
class StoredName:
    """The tensor of a GGUF file that a weight of a module is made from.

    The steps are taken in the order of the attributes. Rows are along ``row_dimension``; whole rows
    move, so blocks stay whole.

    Attributes:
        name: in the file.
        shape: of the weight, as the module has it.
        permutes_heads: heads of ``size`` rows are stored as (size / 2, 2) where the module has
            (2, size / 2), and brought back: ``reshape(heads, size / 2, 2, ...).swapaxes(1, 2)``;
            None: the order is the module's.
        adds: what is added to each value.
        joined: a second tensor whose rows follow, for each of the experts.
        turns: the rows of each section that follow one another in the module, where the sections
            of the stored rows take turns; empty: the order is the module's.
        transposes: the two innermost dimensions change places, last of all.
        head_groups: the order of value heads; None: it is the module's, or there are none.
        groups_columns: ``head_groups`` is about columns instead of rows.
        is_decay: values are ``-exp(x)`` of those of the module.
    """

    name: str
    shape: tuple[int, ...]
    permutes_heads: int | None = None
    adds: float = 0.0
    joined: str | None = None
    turns: tuple[int, ...] = ()
    transposes: bool = False
    head_groups: HeadGroups | None = None
    groups_columns: bool = False
    is_decay: bool = False

    @property
    def row_dimension(self) -> int:
        """The dimension of a tensor along which its rows are: -2, and -1 of a bias."""
        return -1 if self.name.endswith(".bias") else -2

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that it is made from."""
        return (self.name,) if self.joined is None else (self.name, self.joined)

    @property
    def keeps_rows(self) -> bool:
        """Whether the weight has the rows of its tensors, in some order, and their values."""
        changes = self.adds or self.transposes or self.is_decay
        return not (changes or self.groups_columns)


class FileTensors:
    """The tensors of a file; those that are missing are refused."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def has(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return name in self._file.tensors

    def entry(self, name: str) -> StoredName:
        """A tensor as it is."""
        return StoredName(name, self._info(name).shape)

    def weight(self, name: str) -> StoredName:
        """A tensor ``name.weight``; converters leave the suffix out of some norms."""
        return self.entry(name if self.has(name) else f"{name}.weight")

    def joined(self, name: str, other: str, dimension: int = -2) -> StoredName:
        """Two tensors of one shape ``[..., rows, columns]``, or ``[..., rows]`` of biases."""
        shape, others = self._info(name).shape, self._info(other).shape
        if shape != others or len(shape) < -dimension:
            raise self._misfit(name, other)
        sizes = list(shape)
        sizes[dimension] *= 2
        return StoredName(name, tuple(sizes), joined=other)

    def taking_turns(
        self, name: str, other: str, sections: Sequence[int], count: int
    ) -> StoredName:
        """Two matrices whose rows are ``sections``, each ``count`` times as long; the last one is
        the second matrix.
        """
        (*before, last), shapes = sections, (self._info(name).shape, self._info(other).shape)
        rows = (count * sum(before), count * last)
        if tuple(shape[:-1] for shape in shapes) != ((rows[0],), (rows[1],)):
            raise self._misfit(name, other)
        shape = (sum(rows), shapes[0][-1])
        return StoredName(name, shape, joined=other, turns=tuple(sections))

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise unfit(self._file, f"it lacks {name}")
        return info

    def _misfit(self, name: str, other: str) -> ModelError:
        shape, others = list(self._info(name).shape), list(self._info(other).shape)
        return unfit(self._file, f"{name} {shape} and {other} {others} do not fit")


def unfit(file: GgufFile, why: str) -> ModelError:
    """The refusal of a file whose tensors are not those of its model."""
    return ModelError(
        f"cannot load the model in {file.path}",
        why,
        "Check that the file is of a whole model, converted by a recent llama.cpp",
    )
