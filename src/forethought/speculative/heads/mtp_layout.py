"""How MTP modules are named in checkpoints: those of DeepSeek-V3 and GLM-4.5, MiMo, Qwen3-Next.

The modules are mostly stored among the target's own tensors, where transformers ignores them; only
they are read here, by name, from any number of safetensors files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Size, Tensor

from forethought.errors import ModelError
from forethought.model.loaded_weights import check_values
from forethought.model_dir import tensor_shapes
from forethought.speculative.heads.checkpoint import TOKEN_MAP, pop_token_map, refused

PARTS = ("enorm", "hnorm", "eh_proj", "norm")
"""Parts of a module beside its decoder block: the norms of the token's embedding and of the state,
the projection of both together, and the norm after the block."""


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names and variant of one family's modules.

    Attributes:
        block: prefix of module n's decoder block.
        parts: prefix of each of ``PARTS``; with ``{n}``, or shared by all modules.
        known: pattern of a tensor that exists if module n, its first group, does.
        root: prefix of names that only the modules have; empty: there is none.
        copies: prefixes of tensors that repeat the target's: its embedding and its output
            projection, which are used instead.
        hidden_first: the projection reads the state, then the embedding; else the other way.
        zero_first: the embedding at position 0, which no state of a token before explains, is zero.
    """

    block: str
    parts: Mapping[str, str]
    known: str
    root: str
    copies: tuple[str, ...]
    hidden_first: bool
    zero_first: bool

    def part(self, name: str, number: int) -> str:
        """Prefix of a part of module ``number``."""
        return self.parts[name].format(n=number)

    def outside_block(self, number: int) -> tuple[str, ...]:
        """Prefixes of what belongs to module ``number`` and is not of its block."""
        names = [self.part(name, number) for name in PARTS]
        return (*names, *(copy.format(n=number) for copy in self.copies))


LAYOUTS: Mapping[str, MtpLayout] = {
    "deepseek": MtpLayout(
        block="model.layers.{n}.",
        parts={
            "enorm": "model.layers.{n}.enorm.",
            "hnorm": "model.layers.{n}.hnorm.",
            "eh_proj": "model.layers.{n}.eh_proj.",
            "norm": "model.layers.{n}.shared_head.norm.",
        },
        known=r"model\.layers\.(\d+)\.(?:enorm|hnorm|eh_proj|shared_head)\.",
        root="",
        copies=("model.layers.{n}.embed_tokens.", "model.layers.{n}.shared_head.head."),
        hidden_first=False,
        zero_first=True,
    ),
    "mimo": MtpLayout(
        block="model.mtp_layers.{n}.",
        parts={
            "enorm": "model.mtp_layers.{n}.token_layernorm.",
            "hnorm": "model.mtp_layers.{n}.hidden_layernorm.",
            "eh_proj": "model.mtp_layers.{n}.input_proj.",
            "norm": "model.mtp_layers.{n}.final_layernorm.",
        },
        known=r"model\.mtp_layers\.(\d+)\.",
        root="model.mtp_layers.",
        copies=(),
        hidden_first=True,
        zero_first=True,
    ),
    "qwen": MtpLayout(
        block="mtp.layers.{n}.",
        parts={
            "enorm": "mtp.pre_fc_norm_embedding.",
            "hnorm": "mtp.pre_fc_norm_hidden.",
            "eh_proj": "mtp.fc.",
            "norm": "mtp.norm.",
        },
        known=r"mtp\.layers\.(\d+)\.",
        root="mtp.",
        copies=("mtp.embed_tokens.", "mtp.lm_head."),
        hidden_first=False,
        zero_first=False,
    ),
}
"""By name: DeepSeek-V3, R1 and GLM-4.5 (n counts on from the target's layers); MiMo; Qwen3-Next."""


@dataclass(frozen=True, slots=True)
class StoredModule:
    """One module as stored on disk.

    Attributes:
        number: n of its names.
        parts: the tensors of each of ``PARTS``, named ``enorm.weight`` and so on.
        block: those of its decoder block, named as in a layer.
    """

    number: int
    parts: dict[str, Tensor]
    block: dict[str, Tensor]


def read_modules(
    directory: Path, max_modules: int | None = None
) -> tuple[MtpLayout, list[StoredModule]]:
    """The modules in a directory, in order, on the host.

    Args:
        directory: of a target, or of modules alone.
        max_modules: the maximum to read; None: all.

    Raises:
        ModelError: there are none, or a part of one is missing.
    """
    files = _names(directory)
    for layout in LAYOUTS.values():
        matches = (re.match(layout.known, name) for name in files)
        numbers = sorted({int(match[1]) for match in matches if match})
        if numbers:
            _expect_no_strays(directory, layout, numbers, files)
            tensors = _Tensors(directory, files)
            return layout, [_module(tensors, layout, number) for number in numbers[:max_modules]]
    raise refused(
        directory,
        "it holds no MTP modules under the names of DeepSeek, GLM-4.5, MiMo or Qwen3-Next",
        "Choose a target that ships them, or train one: forethought train mtp",
    )


def read_token_map(directory: Path, vocab: int) -> Tensor | None:
    """The draft vocabulary of the modules in a directory: see ``checkpoint.pop_token_map``."""
    files = _names(directory)
    if TOKEN_MAP not in files:
        return None
    [token_map] = _Tensors(directory, files).under(TOKEN_MAP).values()
    return pop_token_map({TOKEN_MAP: token_map}, directory, vocab)


def find_modules(directory: Path) -> str | None:
    """Number and layout of the modules in a directory, in words, by the names of its tensors; None:
    there are none.
    """
    if not any(directory.glob("*.safetensors")):
        return None
    names = _names(directory)
    for name, layout in LAYOUTS.items():
        matches = (re.match(layout.known, tensor) for tensor in names)
        if numbers := {int(match[1]) for match in matches if match}:
            return f"{len(numbers)} MTP module{'s' * (len(numbers) > 1)}, named as of {name}"
    return None


def named(layout: MtpLayout, modules: Sequence[StoredModule]) -> dict[str, Tensor]:
    """The tensors of modules under the names of a layout."""
    tensors: dict[str, Tensor] = {}
    for module in modules:
        for name, tensor in module.parts.items():
            part, rest = name.split(".", 1)
            tensors[layout.part(part, module.number) + rest] = tensor
        prefix = layout.block.format(n=module.number)
        tensors |= {prefix + name: tensor for name, tensor in module.block.items()}
    return tensors


class _Tensors:
    """Reads single tensors of a directory.

    Args:
        directory: for errors.
        files: which file holds each tensor.
    """

    def __init__(self, directory: Path, files: Mapping[str, Path]) -> None:
        self.directory, self._files = directory, files

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors with names that begin with ``prefix``, by the rest of the name."""
        names = [name for name in self._files if name.startswith(prefix)]
        tensors: dict[str, Tensor] = {}
        for file in dict.fromkeys(self._files[name] for name in names):
            with safe_open(file, framework="pt") as stored:
                for name in names:
                    if self._files[name] == file:
                        tensors[name.removeprefix(prefix)] = stored.get_tensor(name)
        check_values(tensors.items(), self.directory, "MTP modules")
        return tensors


def _module(tensors: _Tensors, layout: MtpLayout, number: int) -> StoredModule:
    parts: dict[str, Tensor] = {}
    for part in PARTS:
        prefix = layout.part(part, number)
        part_tensors = tensors.under(prefix)
        if not part_tensors:
            raise refused(tensors.directory, f"its checkpoint lacks {prefix}weight")
        parts |= {f"{part}.{name}": tensor for name, tensor in part_tensors.items()}
    prefix, outside = layout.block.format(n=number), layout.outside_block(number)
    block = {
        name: tensor
        for name, tensor in tensors.under(prefix).items()
        if not (prefix + name).startswith(outside)
    }
    _expect_alike_experts(tensors.directory, prefix, block)
    return StoredModule(number, parts, block)


def _expect_alike_experts(directory: Path, prefix: str, block: Mapping[str, Tensor]) -> None:
    """Refuse a block whose experts, which transformers merges, do not all have the same tensors."""
    experts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in block.items():
        if match := re.fullmatch(r"(.*\.)(\d+)(\..*)", name):
            experts.setdefault(match[1] + match[2], {})[match[3]] = tensor
    alike = {kind for tensors in experts.values() for kind in tensors}
    shapes = {
        kind: _most_common(x[kind].shape for x in experts.values() if kind in x) for kind in alike
    }
    for expert, tensors in experts.items():
        for kind in sorted(alike):
            name = f"{prefix}{expert}{kind}"
            if kind not in tensors:
                raise refused(directory, f"its checkpoint lacks {name}")
            if tensors[kind].shape != shapes[kind]:
                raise refused(directory, f"its checkpoint has the wrong shape for {name}")


def _most_common(values: Iterable[Size]) -> Size:
    return Counter(values).most_common(1)[0][0]


def _expect_no_strays(
    directory: Path, layout: MtpLayout, numbers: Sequence[int], names: Iterable[str]
) -> None:
    claimed = [layout.block.format(n=number) for number in numbers]
    claimed += [prefix for number in numbers for prefix in layout.outside_block(number)]
    strays = [
        name
        for name in names
        if layout.root and name.startswith(layout.root) and not name.startswith(tuple(claimed))
    ]
    if strays:
        raise refused(directory, f"its checkpoint has unexpected {', '.join(sorted(strays)[:3])}")


def _names(directory: Path) -> dict[str, Path]:
    names: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        names |= dict.fromkeys(tensor_shapes(file, "MTP modules"), file)
    if not names:
        raise ModelError(
            f"no MTP modules at {directory}",
            "there are no safetensors files",
            "Give a local directory; nothing is downloaded",
        )
    return names
