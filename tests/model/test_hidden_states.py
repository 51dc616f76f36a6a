"""Captured hidden states are those that transformers reports."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model import causal_lm, loader
from forethought.model.batch import Batch, Row
from forethought.model.hidden_states import FINAL
from models import prompts, tiny, transformers_model


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    "architecture",
    ["llama", "qwen3", "gemma2", "deepseek_v3", "gpt_oss", "gpt2", "gpt_neox", "opt", "phi"],
)
def test_states_of_every_layer_are_those_of_transformers(architecture: str, fuse: bool) -> None:
    lm = loader.load(tiny(architecture), dtype="float32", fuse=fuse)
    storage = KvStorage(lm.layer_shapes, 16, 4)
    pool, rows = PagePool(16, 4), []
    texts = prompts((9, 5))
    for text in texts:
        table = PageTable(pool)
        table.append(len(text))
        rows.append(Row(text, 0, table, logits_from=len(text) - 1))
    layer_ids = frozenset([0, 1, 2, FINAL])
    logits, states = lm.forward_with_hidden_states(Batch.build(rows), storage, layer_ids)
    assert set(states) == layer_ids
    begin = 0
    for number, text in enumerate(texts):
        with torch.inference_mode():
            expected = transformers_model(tiny(architecture))(
                torch.tensor([text]), output_hidden_states=True
            )
        for layer_id in layer_ids:
            there = expected.hidden_states[layer_id][0]
            here = states[layer_id][begin : begin + len(text)]
            assert here.shape == there.shape
            assert (here - there).abs().max() < 1e-3 * max(1, float(there.abs().max()))
        assert (logits[number] - expected.logits[0, -1]).abs().max() < 1e-3
        begin += len(text)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "norm"),
        ("gpt2", "ln_f"),
        ("gpt_neox", "final_layer_norm"),
        ("opt", "final_layer_norm"),
        ("phi", "final_layernorm"),
    ],
)
def test_the_state_that_leaves_the_last_layer_becomes_the_final_one_by_the_norm(
    architecture: str, name: str
) -> None:
    text = prompts((7,))[0]
    found = []
    for fuse in (True, False):
        lm = loader.load(tiny(architecture), dtype="float32", fuse=fuse)
        table = PageTable(PagePool(4, 4))
        table.append(len(text))
        batch = Batch.build([Row(text, 0, table, logits_from=7)])
        storage = KvStorage(lm.layer_shapes, 4, 4)
        _, states = lm.forward_with_hidden_states(batch, storage, frozenset([3, FINAL]))
        norm = getattr(transformers_model(tiny(architecture)).get_decoder(), name)
        with torch.inference_mode():
            assert (norm(states[3]) - states[FINAL]).abs().max() < 1e-5
        found.append(states[3])
    assert (found[0] - found[1]).abs().max() < 1e-4


def test_the_decoder_layers_are_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loader.load(tiny("gpt2"), dtype="float32", fuse=False)
    storage, table = KvStorage(lm.layer_shapes, 16, 4), PageTable(PagePool(16, 4))
    searches: list[nn.Module] = []
    search = causal_lm.decoder_layers

    def counted(model: PreTrainedModel) -> list[nn.Module]:
        searches.append(model)
        return search(model)

    monkeypatch.setattr(causal_lm, "decoder_layers", counted)
    for token in range(3):
        table.append(1)
        batch = Batch.build([Row([token], token, table, logits_from=0)])
        assert lm.forward_with_hidden_states(batch, storage, frozenset([1]))[1]
    assert len(searches) == 1
