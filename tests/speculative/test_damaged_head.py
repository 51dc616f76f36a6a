"""A damaged head is refused with the tensor, the field or the file that is wrong, as a model is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eagle_heads
import medusa_heads
import mtp_modules
import redrafter_heads
from engines import load
from forethought.errors import ModelError
from forethought.model.loader import load as load_model
from forethought.speculative.heads.eagle import EagleHead
from forethought.speculative.heads.eagle3 import Eagle3Head
from forethought.speculative.heads.medusa import MedusaHeads
from forethought.speculative.heads.mtp import load_modules
from forethought.speculative.heads.redrafter import ReDrafterHead
from models import VOCAB, tiny

HIDDEN = 32

HEADS: Mapping[str, tuple[Callable[[], Path], Callable[[Path], object]]] = {
    "draft model": (lambda: tiny("llama"), lambda path: load_model(path, "float32")),
    "eagle": (lambda: eagle_heads.random_head("eagle"), EagleHead.load),
    "eagle3": (lambda: eagle_heads.random_head("eagle3"), Eagle3Head.load),
    "medusa": (
        medusa_heads.shared_heads,
        lambda path: MedusaHeads.load(path, HIDDEN, VOCAB),
    ),
    "mtp": (mtp_modules.saved, lambda path: load_modules(path, load("llama"))),
    "redrafter": (
        redrafter_heads.random_head,
        lambda path: ReDrafterHead.load(path, HIDDEN, VOCAB),
    ),
}


@pytest.fixture(params=HEADS)
def head(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[Path], object]]:
    """A directory of its own, to be damaged, and how it is loaded."""
    make, read = HEADS[request.param]
    directory = Path(shutil.copytree(make(), tmp_path / "head"))
    read(directory)
    return directory, read


def weights(directory: Path) -> Path:
    return next(directory.glob("*.safetensors"))


def expect_refusal(head: tuple[Path, Callable[[Path], object]], named: str) -> None:
    directory, read = head
    with pytest.raises(ModelError, match=re.escape(named)) as refused:
        read(directory)
    assert str(directory) in refused.value.what


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor], str], object]) -> str:
    """Changes the largest tensor; returns its name."""
    tensors = load_file(weights(directory))
    matrices = {name: x for name, x in tensors.items() if x.is_floating_point() and x.dim() == 2}
    name = max(matrices, key=lambda name: (matrices[name].numel(), name))
    edit(tensors, name)
    save_file({name: x.contiguous() for name, x in tensors.items()}, weights(directory))
    return name


@pytest.mark.parametrize("count", [0, 5, 40, 200, -1])
def test_weights_that_are_cut_short_are_named(count: int, head: Any) -> None:
    file = weights(head[0])
    file.write_bytes(file.read_bytes()[:count])
    expect_refusal(head, file.name)


def test_a_number_that_is_none_is_named(head: Any) -> None:
    name = change(head[0], lambda tensors, name: tensors[name][1, 1].fill_(torch.nan))
    expect_refusal(head, name.split(".")[-1])
    expect_refusal(head, "NaN or infinite")


def test_a_tensor_that_is_missing_is_named(head: Any) -> None:
    name = change(head[0], lambda tensors, name: tensors.pop(name))
    last = name.split(".")[-1]
    with pytest.raises(ModelError, match=rf"lacks .*{last}|has no |{last}"):
        head[1](head[0])


def test_a_tensor_of_another_shape_is_named(head: Any) -> None:
    change(head[0], lambda tensors, name: tensors.update({name: tensors[name][:-1, :-1]}))
    with pytest.raises(ModelError, match=r"wrong shape for|\d+"):
        head[1](head[0])


@pytest.mark.parametrize("content", ["", "{", "[]", "4"])
def test_a_config_that_is_no_object_is_named(content: str, head: Any) -> None:
    directory, read = head
    if not (directory / "config.json").is_file() or read is HEADS["mtp"][1]:
        pytest.skip("modules have no config of their own")
    (directory / "config.json").write_text(content)
    expect_refusal(head, "config.json ")


@pytest.mark.parametrize("value", ["big", -1, 10**9, 2**26])
@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_a_size_that_cannot_be_is_refused_before_memory_is_taken(
    field: str, value: Any, head: Any
) -> None:
    directory, read = head
    path = directory / "config.json"
    written = json.loads(path.read_text()) if path.is_file() else {}
    if field not in written or read is HEADS["mtp"][1]:
        pytest.skip("it is read from the weights")
    by_weights = {("medusa", "hidden_size"), ("medusa", "vocab_size"), ("eagle", "vocab_size")}
    kind = next(kind for kind, (_, reads) in HEADS.items() if reads == read)
    if value == 2**26 and (kind, field) in by_weights:
        pytest.skip("it is read from the weights, which are right")
    path.write_text(json.dumps(written | {field: value}))
    with pytest.raises(ModelError):
        read(directory)


@pytest.mark.parametrize("stored", [[], {"a": 1}, b"nonsense"])
def test_weights_of_torch_that_hold_no_tensors_are_named(stored: Any, head: Any) -> None:
    directory, read = head
    if read in (HEADS["mtp"][1], HEADS["draft model"][1]):
        pytest.skip("their weights are safetensors, or read by transformers")
    weights(directory).unlink()
    file = directory / "pytorch_model.bin"
    if isinstance(stored, bytes):
        file.write_bytes(stored)
    else:
        torch.save(stored, file)
    expect_refusal(head, file.name)
