"""Distillation: it learns, it resumes without a trace, and it leaves a model directory."""

import argparse
import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from forethought.assets import reasoner_dir  # noqa: E402
from forethought.training.drafter import corpus, train  # noqa: E402
from forethought.training.reasoner.network import Network, NetworkShape  # noqa: E402
from forethought.training.recipes.draft_model import distillation_loss  # noqa: E402

TINY = NetworkShape(
    vocab_size=512, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1
)


def make_samples(count, generator):
    samples = []
    for _ in range(count):
        tokens = torch.randint(512, (40,), dtype=torch.int32, generator=generator)
        choices = torch.randint(512, (40, corpus.TOP), dtype=torch.int32, generator=generator)
        probs = torch.rand(40, corpus.TOP, generator=generator).softmax(-1).half()
        probs[:10] = probs[-1] = 0
        samples.append(corpus.Sample(tokens, choices, probs))
    return samples


@pytest.fixture
def samples():
    return make_samples(12, torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small_and_uncompiled(monkeypatch, samples):
    def refuse(function, **_):
        def broken(*_):
            raise RuntimeError("no compiler here")

        return broken

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(train, "write_corpus", lambda *_, **__: samples)
    monkeypatch.setattr(train, "held_out_samples", lambda _: samples[:2])


def run(out):
    out.mkdir(exist_ok=True)
    train.train(
        argparse.Namespace(
            seed=0, out=out, target=reasoner_dir(), shards=1, problems=1,
            layers=1, hidden=16, intermediate=32, heads=1, kv_heads=1,
            steps=4, rate=1e-3, batch=256, check_every=2,
        )
    )  # fmt: skip
    return torch.load(out / "checkpoint.pt", weights_only=True)["network"]


def test_the_loss_is_the_cross_entropy_of_the_laws_and_skips_what_has_none(samples):
    torch.manual_seed(0)
    network = Network(TINY)
    batch = corpus.pad(samples, 48)
    distributions = network(batch.tokens).log_softmax(-1).detach()
    total = mass = 0.0
    for row, sample in enumerate(samples):
        for place in range(len(sample)):
            for choice, prob in zip(
                sample.choices[place], sample.probs[place].float(), strict=True
            ):
                total -= float(prob * distributions[row, place, int(choice)])
                mass += float(prob)
    loss = distillation_loss(network, batch.tokens, batch.choices, batch.probs)
    assert loss.item() == pytest.approx(total / mass, rel=1e-4)


def test_a_step_lowers_the_loss(samples):
    torch.manual_seed(0)
    network = Network(TINY)
    batch = corpus.pad(samples, 48)
    optimizers = train.make_optimizers(network, 1e-3)
    before = distillation_loss(network, batch.tokens, batch.choices, batch.probs)
    before.backward()
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        after = distillation_loss(network, batch.tokens, batch.choices, batch.probs)
    assert after < before


def test_a_run_that_was_interrupted_and_resumed_ends_with_the_same_weights(tmp_path, monkeypatch):
    straight = run(tmp_path / "straight")
    calls, draw = [], corpus.Batches.__call__

    def interrupted(self, step):
        calls.append(step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return draw(self, step)

    monkeypatch.setattr(corpus.Batches, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed")
    resumed = run(tmp_path / "resumed")
    assert calls == [0, 1, 2, 3, 2, 3]
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_finished_run_leaves_a_float32_model_of_bf16_weights_with_the_targets_tokenizer(tmp_path):
    run(tmp_path / "out")
    model = tmp_path / "out" / "model"
    assert (model / "tokenizer.json").read_bytes() == (
        reasoner_dir() / "tokenizer.json"
    ).read_bytes()
    config = json.loads((model / "config.json").read_text())
    assert (config["vocab_size"], config["max_position_embeddings"]) == (512, 1024)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    assert loaded.dtype == torch.float32
    assert all(torch.equal(w, w.bfloat16().float()) for w in loaded.parameters())
