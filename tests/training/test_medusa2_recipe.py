"""Medusa-2: heads and target learn together; what comes out is measured against the original."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from forethought.assets import heads_dir, problems, reasoner_dir
from forethought.cli.main import main
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.llm.llm import LLM
from forethought.speculative.heads.medusa import WEIGHTS, MedusaHeads, MedusaShape
from forethought.training.backbone import BackboneOutput
from forethought.training.recipes.medusa import MedusaSettings
from forethought.training.recipes.medusa2 import (
    JointBatch,
    Medusa2Recipe,
    Medusa2Settings,
    backbone_loss,
)
from forethought.training.run import Divergence
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import DRAFTER, MODEL, Trainer, seeded
from models import greedy, prompts
from tokens import speaking

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TINY = Medusa2Settings(
    steps=6,
    rate=0.01,
    backbone_rate=0.01,
    batch_tokens=128,
    num_heads=2,
    heads_first=0.5,
    heads_weight=1.0,
    lora_rank=4,
    check_every=1000,
)


@functools.cache
def tiny_teacher() -> Teacher:
    return Teacher.load(speaking("byte_level"), "float32", "cpu", fuse=False)


@functools.cache
def tiny_texts() -> tuple[Text, ...]:
    """What the tiny model says, greedily."""
    return answers(tiny_teacher(), prompts((4, 7, 9, 5, 6, 8)), GREEDY)


@functools.cache
def reasoner() -> Teacher:
    return Teacher.load(reasoner_dir(), "float32", "cpu", fuse=False)


@functools.cache
def sums() -> tuple[Text, ...]:
    """What the reasoner says to some of its problems."""
    tokenizer = reasoner().tokenizer
    asked = [
        tokenizer.encode_more(tokenizer.render([{"role": "user", "content": each["question"]}]))
        for each in problems()[:12]
    ]
    return answers(reasoner(), asked, SamplingParams(temperature=0.0, max_tokens=60))


def answers(teacher: Teacher, asked: list[list[int]], params: SamplingParams) -> tuple[Text, ...]:
    said = teacher.generate(asked, [params] * len(asked)).token_ids
    return tuple(
        Text(prompt + answer, len(prompt)) for prompt, answer in zip(asked, said, strict=True)
    )


def made(
    settings: Medusa2Settings = TINY,
    texts: tuple[Text, ...] | None = None,
    teacher: Teacher | None = None,
) -> Medusa2Recipe:
    with seeded(settings.seed):
        return Medusa2Recipe.build(settings, texts or tiny_texts(), teacher or tiny_teacher())


def with_(**changes: object) -> Medusa2Settings:
    return Medusa2Settings(**(TINY.model_dump() | changes))


def weights(recipe: Medusa2Recipe, part: str = "") -> list[float]:
    named = recipe.module.named_parameters()
    return [x for name, w in named if name.startswith(part) for x in w.flatten().tolist()]


@pytest.mark.parametrize("backbone_labels", ["distributions", "tokens"])
@pytest.mark.parametrize("labels", ["distributions", "tokens"])
def test_a_step_of_both_lowers_their_loss(
    labels: str, backbone_labels: str, tmp_path: Path
) -> None:
    settings = with_(
        steps=1, heads_first=0.0, warm_up=0.0, labels=labels, backbone_labels=backbone_labels
    )
    recipe = made(settings)
    batch = JointBatch(tiny_texts(), 0.9)
    before = recipe.loss(batch).item()
    Trainer(recipe, settings, tmp_path).run()
    assert recipe.loss(batch).item() < before - 0.1


def test_heads_learn_alone_at_first_then_both_do(tmp_path: Path) -> None:
    recipe = made()
    recipe.loss(JointBatch(tiny_texts(), 0.4)).backward()
    assert all(weight.grad is None for weight in recipe.module["adapters"].parameters())
    recipe.module.zero_grad()
    heads, adapters = weights(recipe, "heads"), weights(recipe, "adapters")
    trainer = Trainer(recipe, TINY, tmp_path)
    trainer.run(until=3)
    assert weights(recipe, "adapters") == adapters
    assert weights(recipe, "heads") != heads
    heads = weights(recipe, "heads")
    trainer.run(until=5)
    assert weights(recipe, "adapters") != adapters
    assert weights(recipe, "heads") != heads


def test_each_part_has_its_own_rate_and_the_heads_loss_a_rising_weight() -> None:
    settings = with_(
        steps=100, rate=0.004, backbone_rate=0.001, heads_first=0.5, warm_up=0.1, heads_weight=0.2
    )
    recipe = made(settings)
    heads, backbone = recipe.groups()
    assert [heads.scale(progress) for progress in (0.0, 0.6)] == [1.0, 1.0]
    scales = [backbone.scale(step / 100) for step in range(100)]
    assert scales[:50] == [0.0] * 50
    assert scales[50] == pytest.approx(0.25 * 0.1)
    assert scales[60:] == [0.25] * 40
    rising = [recipe.heads_weight(step / 100) for step in range(100)]
    assert rising[:50] == [1.0] * 50
    assert rising[50] == pytest.approx(0.2 * math.sin(math.pi / 2 / 50))
    assert rising[74] == pytest.approx(0.2 * math.sin(math.pi / 4))
    assert rising[99] == pytest.approx(0.2)
    constant = made(settings.model_copy(update={"heads_weight_schedule": "constant"}))
    assert [constant.heads_weight(progress) for progress in (0.5, 0.99)] == [0.2, 0.2]


@pytest.mark.parametrize("backbone_labels", ["distributions", "tokens"])
def test_the_joint_loss_is_the_targets_and_the_weighted_heads(backbone_labels: str) -> None:
    """With adapters that change nothing, the divergence from the original is 0, and the cross
    entropy its own."""
    recipe, texts = made(with_(backbone_labels=backbone_labels)), tiny_texts()
    alone = recipe.loss(JointBatch(texts, 0.0)).item()
    joint = recipe.loss(JointBatch(texts, 0.75)).item()
    own = 0.0
    if backbone_labels == "tokens":
        distributions = torch.cat(
            list(tiny_teacher().distributions([text.token_ids for text in texts]))
        )
        ids = [(text.token_ids, text.prompt_length) for text in texts]
        ends = torch.tensor([len(text) for text in texts]).cumsum(0).tolist()
        chosen = [
            distributions[end - len(each) + position - 1, each[position]]
            for end, (each, prompt) in zip(ends, ids, strict=True)
            for position in range(prompt, len(each))
        ]
        own = -float(torch.stack(chosen).mean())
    assert joint == pytest.approx(own + recipe.heads_weight(0.75) * alone, rel=1e-5)
    assert 0.0 < recipe.heads_weight(0.75) < 1.0


def test_the_targets_loss_counts_chosen_tokens_only() -> None:
    source = torch.Generator().manual_seed(0)
    p, q = (torch.randn(1, 5, 7, generator=source) for _ in range(2))
    read, told = BackboneOutput(q, q), BackboneOutput(p, p)
    tokens = torch.tensor([[1, 2, 3, 4, 0]])
    taught = torch.tensor([[False, False, True, True, False]])  # the last one is padding
    distribution, own = p[0, 1:3].softmax(-1), q[0, 1:3].log_softmax(-1)
    expected = float((distribution * (distribution.log() - own)).sum(-1).mean())
    assert float(backbone_loss(read, tokens, taught, told)) == pytest.approx(expected)
    expected = -float(own[[0, 1], [3, 4]].mean())
    assert float(backbone_loss(read, tokens, taught, None)) == pytest.approx(expected)


@pytest.mark.parametrize("pause", [2, 3, 5])
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tmp_path: Path, pause: int) -> None:
    """In the first stage, between the two, in the second."""
    whole, begun = made(), made()
    Trainer(whole, TINY, tmp_path / "whole").run()
    Trainer(begun, TINY, tmp_path / "parts").run(until=pause)
    resumed = made()
    trainer = Trainer(resumed, TINY, tmp_path / "parts")
    assert trainer.step == pause
    trainer.run()
    assert weights(resumed) == weights(whole)
    for name in (f"{MODEL}/model.safetensors", f"{DRAFTER}/{WEIGHTS}"):
        written = [(tmp_path / run / name).read_bytes() for run in ("whole", "parts")]
        assert written[0] == written[1]


def test_a_seed_decides_the_weights_and_nothing_else_does(tmp_path: Path) -> None:
    first, second, other = made(), made(), made(with_(seed=1))
    Trainer(first, TINY, tmp_path / "a").run()
    torch.manual_seed(99)
    Trainer(second, TINY, tmp_path / "b").run()
    Trainer(other, with_(seed=1), tmp_path / "c").run()
    assert weights(first) == weights(second)
    assert weights(other, "heads") != weights(first, "heads")
    assert weights(other, "adapters") != weights(first, "adapters")


@pytest.mark.slow
def test_a_tiny_run_is_accepted_further_and_stays_near_the_original(tmp_path: Path) -> None:
    """On the very texts that are learned, from the shipped heads of Medusa-1: what is accepted
    rises above 3.5 tokens per step; the distributions change, by less than 0.005 nats."""
    settings = Medusa2Settings(
        steps=30,
        rate=3e-3,
        backbone_rate=1e-3,
        batch_tokens=1024,
        initial_heads=heads_dir("medusa"),
        num_heads=5,
        num_layers=2,
        heads_first=0.2,
        heads_weight_schedule="constant",
        check_every=1000,
    )
    recipe, asked = made(settings, sums(), reasoner()), [text.prompt for text in sums()]
    params = [SamplingParams(temperature=0.0, max_tokens=60)] * len(asked)

    def check(drafter: Path) -> dict[str, float]:
        adapted = Teacher.load(drafter.with_name(MODEL), "float32", "cpu")
        config = Medusa2Recipe.decoding(drafter)
        found = adapted.generate(asked, params, config)
        assert found.token_ids == adapted.generate(asked, params).token_ids
        length = found.metrics.mean_acceptance_length or 0.0
        return {"acceptance_length": length, **Divergence(reasoner(), sums())(adapted)}

    trainer = Trainer(recipe, settings, tmp_path, check)
    before, after = trainer._evaluate(), trainer.run()
    assert before["acceptance_length"] < 3.1
    assert before["kl"] < 1e-6
    assert after["acceptance_length"] > 3.5
    assert 1e-5 < after["kl"] < 0.005


def test_the_adapted_model_says_with_its_heads_what_it_says_without(tmp_path: Path) -> None:
    """Greedily, in float32, and as transformers has it; the original says something else."""
    settings = with_(heads_first=0.0, backbone_labels="tokens", steps=12, seed=3)
    Trainer(made(settings, tiny_texts()), settings, tmp_path).run()
    asked = prompts((6, 11, 3), seed=7)
    config = MedusaDecodingConfig(speculative_model=tmp_path / DRAFTER)
    with LLM(tmp_path / MODEL, dtype="float32", speculative_config=config) as llm:
        outputs = [each.outputs[0] for each in llm.generate(asked, GREEDY)]
    with LLM(tmp_path / MODEL, dtype="float32") as llm:
        plain = [each.outputs[0].token_ids for each in llm.generate(asked, GREEDY)]
    said = [output.token_ids for output in outputs]
    assert said == plain == greedy(tmp_path / MODEL, asked, 24)
    assert said != greedy(speaking("byte_level"), asked, 24)
    assert sum(output.metrics.drafted for output in outputs) > 0


def test_heads_to_start_from_keep_their_weights_and_their_tree(tmp_path: Path) -> None:
    settings = Medusa2Settings(initial_heads=heads_dir("medusa"), num_heads=5, num_layers=2)
    recipe = made(settings, sums(), reasoner())
    given = MedusaHeads.load(heads_dir("medusa"), 256, 512)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(
            recipe.module["heads"].parameters(), given.parameters(), strict=True
        )
    )
    recipe.save(tmp_path / DRAFTER)
    tree = MedusaDecodingConfig(speculative_model=heads_dir("medusa")).medusa_choices
    assert Medusa2Recipe.decoding(tmp_path / DRAFTER).medusa_choices == tree


def test_heads_that_the_run_cannot_start_from_are_refused(tmp_path: Path) -> None:
    settings = Medusa2Settings(initial_heads=heads_dir("medusa"), num_heads=3)
    with pytest.raises(ParameterError, match="num_heads and num_layers are 5 and 2"):
        made(settings, sums(), reasoner())
    with pytest.raises(ParameterError, match="initial_heads have their draft vocabulary"):
        Medusa2Settings(initial_heads=tmp_path, draft_vocab_size=50)


def test_heads_with_a_draft_vocabulary_are_trained_on(tmp_path: Path) -> None:
    ids = torch.arange(50) * 2
    MedusaHeads(MedusaShape(32, 50, 4), token_map=ids).save(tmp_path, "vllm")
    recipe = made(Medusa2Settings(initial_heads=tmp_path))
    recipe.loss(recipe.batch(0)).backward()
    recipe.save(tmp_path / DRAFTER)
    again = MedusaHeads.load(tmp_path / DRAFTER, 32, 100)
    assert again.token_map is not None
    assert torch.equal(again.token_map, ids)


def test_medusa_1_does_not_take_the_settings_of_medusa_2() -> None:
    with pytest.raises(ParameterError, match="MedusaSettings has no parameter 'lora_rank'"):
        MedusaSettings(lora_rank=4)  # type: ignore[call-arg]


def test_the_command_leaves_a_model_with_its_heads_and_says_that_it_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "prompts.txt"
    asked.write_text("".join(f"Hello {word} world\n" for word in "abcdefgh"), encoding="utf-8")
    config = tmp_path / "medusa.yaml"
    config.write_text(
        "{num_heads: 2, batch_tokens: 64, check_every: 2, max_tokens: 12, heads_first: 0.25, "
        "rate: 0.02, backbone_rate: 0.02, heads_weight: 2.0, lora_rank: 4}"
    )
    out, target = tmp_path / "out", speaking("byte_level")
    options = ["--target", str(target), "--self-distill", str(asked), "--out", str(out)]
    options += ["--config", str(config), "--steps", "5", "--held-out", "2", "--dtype", "float32"]
    assert main(["train", "medusa-2", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == str(out / MODEL)
    assert report["acceptance_length"] >= 1.0
    assert report["kl"] > 0.0
    assert 0.0 <= report["same_choice"] <= 1.0
    files = (out / DRAFTER / WEIGHTS, out / MODEL / "model.safetensors")
    written = [file.read_bytes() for file in files]
    assert main(["train", "medusa-2", *options]) == 0
    shown = capsys.readouterr().out
    assert f"{out / MODEL}: the model that it drafts for, which is not the original" in shown
    assert "nats (mean KL)" in shown
    assert f"--model {out / MODEL} --speculative medusa --draft-model {out / DRAFTER}" in shown
    assert [file.read_bytes() for file in files] == written
