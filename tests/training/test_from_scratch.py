"""The loop of training from scratch: a function of the seed, resumable, able to do without a
compiler; with the curricula of both embedded models."""

import argparse
import dataclasses
import itertools
import random
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from countdown.train import CURRICULUM as COUNTDOWN  # noqa: E402
from forethought.errors import ParameterError  # noqa: E402
from forethought.evaluation.generated.arithmetic import sample_problem  # noqa: E402
from forethought.training import from_scratch  # noqa: E402
from forethought.training.llama import Llama, LlamaShape  # noqa: E402
from reasoner.samples import Sample  # noqa: E402
from reasoner.traces import write_trace  # noqa: E402
from reasoner.train import CURRICULUM as REASONER  # noqa: E402


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    def refuse(function, **_):
        def broken(*_):
            raise RuntimeError("no compiler here")

        return broken

    monkeypatch.setattr(torch, "compile", refuse)


def small(curriculum):
    tokenizer = partial(curriculum.train_tokenizer, samples=100)
    return dataclasses.replace(curriculum, train_tokenizer=tokenizer, check=lambda *_: {})


def options_of(tmp_path, **others):
    given = {"batch": 512, "workers": 1, "start": None, "share": 1.0, "samples": []}
    return argparse.Namespace(out=tmp_path, **given | others)


def run(out, curriculum=REASONER, seed=0, start=None, share=1.0, samples=()):
    out.mkdir(exist_ok=True)
    options = argparse.Namespace(
        seed=seed,
        out=out,
        start=start,
        share=share,
        samples=samples,
        steps=4,
        minutes=None,
        rate=1e-3,
        batch=512,
        workers=1,
        check_every=2,
    )
    from_scratch.train(small(curriculum), options)
    return torch.load(out / "checkpoint.pt", weights_only=True)["network"]


BOTH = [
    pytest.param(REASONER, id="reasoner"),
    pytest.param(COUNTDOWN, id="countdown", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("curriculum", BOTH)
@pytest.mark.slow
def test_a_run_is_a_function_of_its_seed_to_the_bit(curriculum, tmp_path):
    first, again, other = (
        run(tmp_path / name, curriculum, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]


def test_a_run_that_was_interrupted_and_resumed_ends_with_the_same_weights(tmp_path, monkeypatch):
    straight = run(tmp_path / "straight")
    calls, pack = [], from_scratch.pack

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return pack(*arguments)

    monkeypatch.setattr(from_scratch, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed")
    resumed = run(tmp_path / "resumed")
    assert len(calls) == 4 + 2
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.parametrize("curriculum", BOTH)
def test_a_finished_run_leaves_a_model_directory(curriculum, tmp_path):
    run(tmp_path / "out", curriculum)
    names = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names


@pytest.mark.slow
def test_a_run_begins_with_a_model_and_exports_a_share_of_what_it_became(tmp_path):
    run(tmp_path / "first")
    start = tmp_path / "first" / "model"
    tuned, again = (
        run(tmp_path / name, seed=1, start=start, share=share)
        for name, share in (("whole", 1.0), ("part", 0.25))
    )
    before, exported = Llama(LlamaShape()), Llama(LlamaShape())
    before.load(start)
    exported.load(tmp_path / "part" / "model")
    for name, weight in before.state_dict().items():
        assert torch.equal(tuned[name], again[name])
        assert 0 < (tuned[name] - weight).abs().max() < 0.01
        wanted = weight.lerp(tuned[name], 0.25)
        assert torch.allclose(exported.state_dict()[name], wanted, rtol=0.01)
    tokenizers = [path.read_bytes() for path in tmp_path.glob("*/model/tokenizer.json")]
    assert tokenizers == [tokenizers[0]] * 3


def test_a_share_without_a_model_to_begin_with_is_refused(tmp_path):
    with pytest.raises(ParameterError, match="--share"):
        from_scratch.train(REASONER, options_of(tmp_path, share=0.5))


@pytest.mark.parametrize(
    ("curriculum", "start"),
    [(REASONER, None), (COUNTDOWN, Path("model"))],
    ids=["new", "countdown"],
)
def test_samples_of_no_model_to_tune_are_refused(tmp_path, curriculum, start):
    with pytest.raises(ParameterError, match="samples"):
        from_scratch.train(curriculum, options_of(tmp_path, start=start, samples=[tmp_path]))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_on_samples_of_its_own_learns_from_them(tmp_path):
    run(tmp_path / "first")
    start, rng = tmp_path / "first" / "model", random.Random(0)
    files = [tmp_path / f"{n}.jsonl" for n in range(2)]
    for file in files:
        problems = [sample_problem(rng) for _ in range(16)]
        samples = [Sample(each, write_trace(each, rng, 0.5).text) for each in problems]
        file.write_text("".join(f"{sample.to_line()}\n" for sample in samples))
    without, first, again, others = (
        run(tmp_path / name, seed=1, start=start, samples=given)
        for name, given in (
            ("without", []),
            ("with", files),
            ("again", files),
            ("others", files[::-1]),
        )
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], without[name]) for name in first)
    assert any(not torch.equal(first[name], others[name]) for name in first)


def test_a_batch_without_a_row_for_every_worker_is_refused(tmp_path):
    with pytest.raises(ParameterError, match="at least 1024"):
        from_scratch.train(REASONER, options_of(tmp_path, workers=2))
    assert not list(tmp_path.iterdir())


def test_the_learning_rate_warms_up_stays_and_falls_to_nothing():
    assert from_scratch.rate_at(0.0, 0) < 0.05
    assert from_scratch.rate_at(0.3, 1000) == 1.0
    assert from_scratch.rate_at(0.75, 1000) == pytest.approx(0.5)
    assert from_scratch.rate_at(1.0, 1000) == 0.0


def test_the_share_predicted_counts_marked_tokens_alone():
    """A network without layers that predicts each token again: right where tokens repeat."""

    class Repeats(torch.nn.Module):
        cos = torch.zeros(1)

        def forward(self, tokens):
            return torch.nn.functional.one_hot(tokens, 10).float()

    example = from_scratch.Example
    right = example([1, 1, 2], [False, True, False])
    wrong = example([1, 1, 2], [False, False, True])
    assert from_scratch.share_predicted(Repeats(), [right, wrong]) == 0.5


def test_the_phases_of_the_reasoner_follow_each_other_and_their_shares_add_up():
    mixes = [REASONER.mix_at(progress / 100)[0] for progress in range(100)]
    phases = [mixes[0], mixes[50], mixes[99]]
    assert all(before != after for before, after in itertools.pairwise(phases))
    assert all(mix in phases for mix in mixes)
    assert all(sum(mix.values()) == pytest.approx(1.0) for mix in mixes)
