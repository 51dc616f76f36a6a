"""Adapters: the original stays as it is, whatever the architecture, and merging loses nothing."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from forethought.assets import reasoner_dir
from forethought.errors import ModelError
from forethought.llm.tokenizer import Tokenizer
from forethought.model import auto_dtype, loader
from forethought.training.backbone import Backbone, LoraAdapters
from forethought.training.run import Divergence
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from models import ARCHITECTURES, prompts, tiny, transformers_model

TEXTS = prompts((9, 14, 14))


def teacher_of(directory: Path) -> Teacher:
    """A tiny model; the tokenizer is only there to be written."""
    lm = loader.load(directory, dtype="float32", fuse=False)
    return Teacher(lm, Tokenizer.load(reasoner_dir()), directory)


def backbone_of(teacher: Teacher, moved: bool = True) -> Backbone:
    """With adapters that change something, or new ones."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        backbone = Backbone(teacher, rank=4, alpha=8.0)
        if moved:
            for weight in backbone.adapters.parameters():
                weight.data += 0.05 * torch.randn_like(weight)
    return backbone


def probabilities(logits: Tensor) -> Tensor:
    """Of the texts' tokens, one text after the other, from logits ``[R, W, vocab]``."""
    return torch.cat([row[: len(t)] for row, t in zip(logits, TEXTS, strict=True)]).softmax(-1)


def tokens() -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(text) for text in TEXTS], batch_first=True)


def distribution(teacher: Teacher) -> Tensor:
    return torch.cat(list(teacher.distributions(TEXTS))).exp()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_written_model_is_the_original_with_its_adapters(
    architecture: str, tmp_path: Path
) -> None:
    teacher = teacher_of(tiny(architecture))
    before, backbone = distribution(teacher), backbone_of(teacher)
    original = probabilities(backbone.original(tokens()).logits)
    assert torch.allclose(original, before, atol=1e-5)  # read with gradients, or by the engine
    adapted = probabilities(backbone.adapted(tokens()).logits).detach()
    scale = float((adapted - before).abs().max())  # cohere2 scales its logits down: it moves less
    assert scale > (1e-4 if architecture == "cohere2" else 1e-2)
    backbone.save(tmp_path)
    assert torch.allclose(distribution(teacher_of(tmp_path)), adapted, atol=1e-3 * scale)
    assert torch.equal(distribution(teacher), before)


@pytest.mark.parametrize("architecture", ["llama_tied_biased", "gemma2", "gpt2", "qwen3_moe"])
def test_gradients_reach_every_adapter_and_nothing_else(architecture: str) -> None:
    teacher = teacher_of(tiny(architecture))
    backbone = backbone_of(teacher)
    backbone.adapted(tokens()).logits.square().mean().backward()
    assert all(weight.grad is not None for weight in backbone.adapters.parameters())
    assert all(weight.grad is None for weight in teacher.module.parameters())
    assert not backbone.original(tokens()).logits.requires_grad


def test_new_adapters_change_nothing() -> None:
    backbone = backbone_of(teacher_of(tiny("llama")), moved=False)
    original, adapted = backbone.original(tokens()), backbone.adapted(tokens())
    assert torch.equal(original.logits, adapted.logits)
    assert torch.equal(original.states, adapted.states)


def test_the_projection_to_the_vocabulary_is_left_alone(tmp_path: Path) -> None:
    """It is the embedding, too, in a model whose weights are tied."""
    teacher = teacher_of(tiny("llama_tied_biased"))
    backbone = backbone_of(teacher)
    assert len(backbone.adapters.merged()) == 7 * 3
    backbone.save(tmp_path)
    written = teacher_of(tmp_path)
    assert written.lm.config.tie_word_embeddings
    ids = torch.arange(20)
    assert torch.equal(written.lm.embed(ids), teacher.lm.embed(ids))


def test_the_written_model_has_the_dtype_of_the_one_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_dtype, "has_fast_matmul", lambda *_: True)
    lm = loader.load(tiny("llama"), dtype="bfloat16", fuse=False)
    teacher = Teacher(lm, Tokenizer.load(reasoner_dir()), tiny("llama"))
    backbone_of(teacher).save(tmp_path)
    assert loader.load(tmp_path).dtype == torch.bfloat16


def test_the_written_tokenizer_is_the_targets(tmp_path: Path) -> None:
    backbone_of(Teacher.load(reasoner_dir(), "float32", "cpu", fuse=False)).save(tmp_path)
    turns = [{"role": "user", "content": "Tom has 3 pens."}]
    mine, written = Tokenizer.load(reasoner_dir()), Tokenizer.load(tmp_path)
    assert written.render(turns) == mine.render(turns)
    assert written.encode("Tom has 3 pens.") == mine.encode("Tom has 3 pens.")


@pytest.mark.parametrize("stated_by", ["layers", "config"])
def test_a_quantised_model_is_refused(stated_by: str) -> None:
    class Quantised(nn.Linear):
        pass

    module = copy.deepcopy(transformers_model(tiny("llama")))
    if stated_by == "config":
        module.config.quantization_config = {"quant_method": "awq"}
    else:
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = Quantised
    with pytest.raises(ModelError, match="cannot be adapted"):
        LoraAdapters(module, 4, 8.0)


def test_the_shift_is_the_divergence_over_the_answers() -> None:
    """Against transformers' own logits, position by position."""
    one, other = tiny("llama"), tiny("llama", seed=2)
    given = [Text(ids, 3) for ids in TEXTS]
    found = Divergence(teacher_of(one), given)(teacher_of(other))
    divergences, same = list[float](), 0
    for text in given:
        with torch.no_grad():
            p, q = (
                transformers_model(path)(torch.tensor([text.token_ids])).logits[0].softmax(-1)
                for path in (one, other)
            )
        for position in range(2, len(text) - 1):
            divergences.append(float((p[position] * (p[position] / q[position]).log()).sum()))
            same += int(p[position].argmax() == q[position].argmax())
    assert found["kl"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-4)
    assert found["same_choice"] == pytest.approx(same / len(divergences))
    assert Divergence(teacher_of(one), given)(teacher_of(one)) == {"kl": 0.0, "same_choice": 1.0}
