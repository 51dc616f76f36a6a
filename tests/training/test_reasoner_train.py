"""The training run: resumable without a trace, and able to do without a compiler."""

import argparse

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forethought.training.reasoner import train  # noqa: E402


@pytest.fixture(autouse=True)
def small_and_uncompiled(monkeypatch):
    def refuse(function, **_):
        def broken(*_):
            raise RuntimeError("no compiler here")

        return broken

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(train, "_check", lambda *_: None)
    monkeypatch.setattr(
        train,
        "train_tokenizer",
        lambda seed, train_it=train.train_tokenizer: train_it(seed, samples=100),
    )


def run(out):
    out.mkdir(exist_ok=True)
    train.train(
        argparse.Namespace(
            seed=0, out=out, steps=4, minutes=None, rate=1e-3, batch=512, workers=1, check_every=2
        )
    )
    return torch.load(out / "checkpoint.pt", weights_only=True)["network"]


def test_a_run_that_was_interrupted_and_resumed_ends_with_the_same_weights(tmp_path, monkeypatch):
    straight = run(tmp_path / "straight")
    calls, pack = [], train.pack

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return pack(*arguments)

    monkeypatch.setattr(train, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed")
    resumed = run(tmp_path / "resumed")
    assert len(calls) == 4 + 2
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_finished_run_leaves_a_model_directory(tmp_path):
    run(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names


def test_the_learning_rate_warms_up_stays_and_falls_to_nothing():
    assert train.rate_at(0.0, 0) < 0.05
    assert train.rate_at(0.3, 1000) == 1.0
    assert train.rate_at(0.75, 1000) == pytest.approx(0.5)
    assert train.rate_at(1.0, 1000) == 0.0
