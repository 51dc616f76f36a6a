"""ReDrafter's head: the published recurrence, in the published layout, read whole or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forethought.errors import ModelError
from forethought.speculative.heads.redrafter import DraftRecurrence, ReDrafterHead
from models import VOCAB
from redrafter_heads import HIDDEN, make_head

SIZES: list[dict[str, Any]] = [
    {},
    {"exit": 2 * HIDDEN},
    {"blocks": 0},
    {"exit": 2 * HIDDEN, "blocks": 1, "recurrent": False},
]


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def written_out(head: ReDrafterHead, context: Tensor, embedded: list[Tensor]) -> Tensor:
    """The logits behind some tokens as the paper's formulas have them; all of them vectors."""
    weights = head.state_dict()
    state = torch.zeros(HIDDEN)
    for e in embedded:
        if head.shape.recurrent:
            pushed = weights["rnn_w.weight"] @ e
            state = silu(pushed + weights["rnn_u.weight"] @ state + weights["rnn_u.bias"])
        else:
            state = state + e
    x = torch.cat([context, state])
    if head.shape.exit != 2 * HIDDEN:
        x = weights["input_proj.weight"] @ x + weights["input_proj.bias"]
    for block in range(head.shape.blocks):
        linear = f"lm_head.{block}.linear"
        x = x + silu(weights[f"{linear}.weight"] @ x + weights[f"{linear}.bias"])
    return weights[f"lm_head.{head.shape.blocks}.weight"] @ x


@pytest.mark.parametrize("sizes", SIZES)
def test_all_forwards_are_the_papers_formulas(sizes: dict[str, Any]) -> None:
    head = make_head(**sizes)
    fast = DraftRecurrence(head, torch.float32, torch.device("cpu"))
    contexts, embedded = torch.randn(4, HIDDEN), torch.randn(3, 4, HIDDEN)
    state = other = torch.zeros(4, HIDDEN)
    with torch.inference_mode():
        for count, each in enumerate(embedded, start=1):
            state, other = head.advance(each, state), fast.advance(each, other)
            expected = torch.stack(
                [written_out(head, contexts[n], list(embedded[:count, n])) for n in range(4)]
            )
            torch.testing.assert_close(head(contexts, state), expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(fast(contexts, other), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_head_comes_back_as_it_was_written(tmp_path: Path, sizes: dict[str, Any]) -> None:
    head = make_head(**sizes)
    head.save(tmp_path)
    again = ReDrafterHead.load(tmp_path, HIDDEN, VOCAB)
    assert again.shape == head.shape
    for name, weight in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_tensors_and_config_have_the_published_names(tmp_path: Path) -> None:
    make_head().save(tmp_path)
    assert {
        name: list(x.shape) for name, x in load_file(tmp_path / "model.safetensors").items()
    } == {
        "input_proj.weight": [48, 2 * HIDDEN],
        "input_proj.bias": [48],
        "lm_head.0.linear.weight": [48, 48],
        "lm_head.0.linear.bias": [48],
        "lm_head.1.linear.weight": [48, 48],
        "lm_head.1.linear.bias": [48],
        "lm_head.2.weight": [VOCAB, 48],
        "rnn_u.weight": [HIDDEN, HIDDEN],
        "rnn_u.bias": [HIDDEN],
        "rnn_w.weight": [HIDDEN, HIDDEN],
    }
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "model_type": "recurrent_drafting_drafter",
        "architectures": ["Drafter"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "exit_dim": 48,
        "num_draft_layers": 2,
        "rnn": True,
        "torch_dtype": "float32",
    }


def test_bfloat16_and_torchs_own_files_are_read_too(tmp_path: Path) -> None:
    head = make_head().to(torch.bfloat16)
    head.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    again = ReDrafterHead.load(tmp_path, HIDDEN, VOCAB)
    assert torch.equal(again.rnn_u.weight, head.rnn_u.weight.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("rnn_u.bias"), r"lacks rnn_u\.bias"),
        (lambda t: t.pop("lm_head.2.weight"), r"lacks lm_head\.2\.weight"),
        (lambda t: t.update({"rnn_v.weight": torch.zeros(1)}), r"unexpected rnn_v\.weight"),
        (
            lambda t: t.update({"rnn_w.weight": torch.zeros(HIDDEN, 7)}),
            r"wrong shape for rnn_w\.weight \[32, 7\], not \[32, 32\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    make_head().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        ReDrafterHead.load(tmp_path, HIDDEN, VOCAB)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"exit_dim": None}, "lacks exit_dim"),
        ({"rnn": False}, "unexpected rnn_u"),
        ({"hidden_size": 16}, "states of 16 values"),
        ({"vocab_size": VOCAB + 1}, f"has {VOCAB + 1} tokens"),
        ({"num_draft_layers": 3}, r"lacks .*lm_head\.2\.linear"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_head().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        ReDrafterHead.load(tmp_path, HIDDEN, VOCAB)
