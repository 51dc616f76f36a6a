"""Medusa's heads: one forward, and every published layout read back to the same predictions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forethought.backends.cpu.heads import NativeDraftHeads, NativeHeads
from forethought.backends.cpu.library import find_compiler
from forethought.errors import ModelError
from forethought.speculative.heads.medusa import (
    WEIGHTS,
    DraftHeads,
    MedusaHeads,
    MedusaShape,
)
from medusa_heads import HIDDEN, make_heads
from models import VOCAB

STATES = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))


def write(directory: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: v.clone() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def load(directory: Path, most: int | None = None) -> MedusaHeads:
    return MedusaHeads.load(directory, HIDDEN, VOCAB, most)


def authors(heads: MedusaHeads, directory: Path) -> None:
    heads.save(directory)


def authors_older_file(heads: MedusaHeads, directory: Path) -> None:
    heads.save(directory)
    torch.save(load_file(directory / WEIGHTS), directory / "medusa_lm_head.pt")
    (directory / WEIGHTS).unlink()


def authors_prefixed(heads: MedusaHeads, directory: Path) -> None:
    tensors = {f"medusa_head.{name}": tensor for name, tensor in heads.state_dict().items()}
    write(directory, tensors, {"medusa_num_heads": len(heads)})


def vllm(heads: MedusaHeads, directory: Path) -> None:
    heads.save(directory, "vllm")


def vllm_prefixed(heads: MedusaHeads, directory: Path) -> None:
    heads.save(directory, "vllm")
    tensors = load_file(directory / "model.safetensors")
    tensors = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    write(directory, tensors, {"num_heads": len(heads)})


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize(
    "layout", [authors, authors_older_file, authors_prefixed, vllm, vllm_prefixed]
)
def test_every_layout_is_read_back_to_the_same_predictions(
    layout: Callable[[MedusaHeads, Path], None], blocks: int, tmp_path: Path
) -> None:
    heads = make_heads(3, blocks)
    layout(heads, tmp_path)
    assert torch.equal(load(tmp_path)(STATES), heads(STATES))


def test_the_names_written_are_those_that_are_published(tmp_path: Path) -> None:
    heads = make_heads(2, 2)
    heads.save(tmp_path / "authors")
    assert set(load_file(tmp_path / "authors" / WEIGHTS)) == {
        *(f"{i}.{j}.linear.{kind}" for i in (0, 1) for j in (0, 1) for kind in ("weight", "bias")),
        "0.2.weight",
        "1.2.weight",
    }
    heads.save(tmp_path / "vllm", "vllm")
    assert set(load_file(tmp_path / "vllm" / "model.safetensors")) == {
        *(
            f"blocks.{i}.layers.{j}.{kind}"
            for i in (0, 1)
            for j in (0, 1)
            for kind in ("weight", "bias")
        ),
        "lm_heads.0.weight",
        "lm_heads.1.weight",
    }


def test_blocks_may_lack_biases(tmp_path: Path) -> None:
    heads = make_heads(2)
    tensors = {name: x for name, x in heads.state_dict().items() if not name.endswith("bias")}
    write(tmp_path, tensors, {"medusa_num_heads": 2})
    for head in heads:
        torch.nn.init.zeros_(head[0].linear.bias)
    assert torch.equal(load(tmp_path)(STATES), heads(STATES))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_projection_may_serve_all_heads(name: str, tmp_path: Path) -> None:
    heads = make_heads(3)
    for head in heads:
        head[-1].weight.data.copy_(heads[0][-1].weight)
    heads.save(tmp_path, "vllm")
    tensors = load_file(tmp_path / "model.safetensors")
    shared = tensors["lm_heads.0.weight"]
    kept = {k: x for k, x in tensors.items() if not k.startswith("lm_heads")} | {name: shared}
    write(tmp_path, kept, {"num_heads": 3, "original_lm_head": True})
    assert torch.equal(load(tmp_path)(STATES), heads(STATES))


@pytest.mark.parametrize("rows", ["own", "whole"])
def test_a_token_map_gives_the_ids_of_fewer_rows(rows: str, tmp_path: Path) -> None:
    ids = torch.tensor([7, 3, 50, 90])
    heads = make_heads(2)
    heads.save(tmp_path, "vllm")
    tensors = load_file(tmp_path / "model.safetensors")
    if rows == "own":
        tensors |= {f"lm_heads.{i}.weight": tensors[f"lm_heads.{i}.weight"][ids] for i in (0, 1)}
    write(tmp_path, tensors | {"token_map": ids}, {"num_heads": 2})
    found = load(tmp_path)
    assert found.token_map is not None
    assert found.token_map.tolist() == ids.tolist()
    torch.testing.assert_close(found(STATES), heads(STATES)[..., ids])
    found.save(tmp_path / "again", "vllm")
    again = load(tmp_path / "again")
    assert torch.equal(again(STATES), found(STATES))
    assert torch.equal(again.token_map, found.token_map)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tensors = make_heads(2).state_dict()
    config: dict[str, object] = {"medusa_num_heads": 2}
    lacking = {name: x for name, x in tensors.items() if name != "1.0.linear.weight"}
    with pytest.raises(ModelError, match=r"lacks 1\.0\.linear\.weight"):
        load(write(tmp_path / "a", lacking, config))
    with pytest.raises(ModelError, match=r"unexpected rotary\.inv_freq"):
        load(write(tmp_path / "b", tensors | {"rotary.inv_freq": torch.ones(2)}, config))
    wrong = tensors | {"1.1.weight": torch.ones(VOCAB, HIDDEN + 1)}
    with pytest.raises(
        ModelError, match=r"wrong shape for 1\.1\.weight \[101, 33\], not \[101, 32"
    ):
        load(write(tmp_path / "c", wrong, config))
    with pytest.raises(ModelError, match="Give a head that was trained for this model"):
        MedusaHeads.load(tmp_path / "c", HIDDEN, VOCAB)
    with pytest.raises(ModelError, match=r"lacks 0\.0\.weight.*a head of this kind"):
        load(write(tmp_path / "d", {"something.else": torch.ones(2)}, config))
    with pytest.raises(ModelError, match="have 101 tokens, the target has 100"):
        MedusaHeads.load(write(tmp_path / "e", tensors, config), HIDDEN, 100)
    with pytest.raises(ModelError, match="token_map"):
        load(write(tmp_path / "f", tensors | {"token_map": torch.tensor([5, VOCAB])}, config))
    few = {f"{i}.1.weight": tensors[f"{i}.1.weight"][:2] for i in (0, 1)}
    with pytest.raises(ModelError, match=r"0\.1\.weight \[2, 32\], not \[3, 32\]"):
        load(write(tmp_path / "g", tensors | few | {"token_map": torch.arange(3)}, config))


def test_the_tensors_decide_how_many_heads_there_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, make_heads(5).state_dict(), {"medusa_num_heads": 2})
    with caplog.at_level(logging.WARNING):
        assert len(load(tmp_path)) == 5
    assert "says 2 heads, its tensors are those of 5" in caplog.text
    assert len(load(tmp_path, 3)) == 3
    assert load(tmp_path, 3)(STATES).shape == (5, 3, VOCAB)
    with caplog.at_level(logging.WARNING):
        assert len(load(tmp_path, 9)) == 5
    assert "holds 5 heads, not the 9 requested" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_the_fast_forward_is_the_obvious_one(blocks: int, dtype: torch.dtype) -> None:
    heads = make_heads(4, blocks)
    drafting = DraftHeads(heads, dtype, torch.device("cpu"))
    expected = heads.to(dtype)(STATES.to(dtype)).float()
    with torch.inference_mode():
        for count in (1, 3, 4):
            found = drafting(STATES.to(dtype), count).float()
            assert found.shape == (count, 5, VOCAB)
            close = 1e-5 if dtype == torch.float32 else 0.15
            assert (found - expected[:, :count].transpose(0, 1)).abs().max() < close


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_the_forward_in_cpp_is_the_obvious_one(blocks: int, dtype: torch.dtype, bias: bool) -> None:
    """For more states than one pass takes. With weights in bf16 AMX rounds its inputs."""
    heads = make_heads(4, blocks, bias=bias)
    native = NativeDraftHeads(heads, dtype)
    states = torch.randn(21, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = heads.to(dtype).float()(states)
    for count in (1, 3, 4):
        found = native(states, count)
        close = 1e-5 if dtype == torch.float32 else 5e-3
        wanted = expected[:, :count].transpose(0, 1)
        assert (found - wanted).norm() < close * wanted.norm(), (
            found - wanted
        ).norm() / wanted.norm()
    with torch.no_grad():
        heads[2][-1].weight[3] += 1
    wrong = heads(states)[:, :4].transpose(0, 1)
    assert (native(states, 4) - wrong).abs().max() > 0.1


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("width", [1, 10, VOCAB])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_the_most_probable_tokens_in_cpp_are_those_of_torch(width: int, is_mapped: bool) -> None:
    """Equals may change places, so the log-probabilities of each are compared."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    heads = make_heads(3, token_map=ids if is_mapped else None)
    reference = DraftHeads(heads, torch.float32, torch.device("cpu"))
    native = NativeDraftHeads(heads, torch.float32)
    with torch.inference_mode():
        every = reference(STATES, 2).log_softmax(-1)
        expected = reference.most_probable(STATES, 2, width)
    found = native.most_probable(STATES, 2, width)
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(expected.logprobs))
    columns = ids.argsort()[torch.tensor(found.tokens)] if is_mapped else torch.tensor(found.tokens)
    torch.testing.assert_close(every.gather(-1, columns), torch.tensor(found.logprobs))
    assert torch.equal(columns.sort(-1).values.unique_consecutive(dim=-1), columns.sort(-1).values)


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("num_states", [8, 9, 32])
def test_heads_on_two_threads_have_the_logits_of_one(num_states: int) -> None:
    """Of a width at which a thread can be a head ahead of another one (seen with AMX)."""
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        parts = [[nn.Linear(256, 256), nn.Linear(256, 512, bias=False)] for _ in range(4)]
        native = NativeHeads(parts, torch.bfloat16)
        states = torch.randn(num_states, 256, generator=generator)
        before, found = torch.get_num_threads(), []
        try:
            for num_threads in (1, *[2] * 20):
                torch.set_num_threads(num_threads)
                found.append(native(states, 4))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


def test_new_blocks_pass_the_state_on() -> None:
    heads = MedusaHeads(MedusaShape(HIDDEN, VOCAB, 2, 2))
    assert torch.equal(heads(STATES)[:, 1], STATES @ heads[1][-1].weight.T)
