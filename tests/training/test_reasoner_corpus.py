"""Examples and packing: what is trained on, what is not, and no padding anywhere."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from forethought.training.reasoner import corpus  # noqa: E402
from forethought.training.reasoner.problems import sample_problem  # noqa: E402
from forethought.training.reasoner.vocabulary import (  # noqa: E402
    END,
    THINK,
    prompt_text,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(samples=400)


def trained_text(tokenizer, example):
    ids = [t for t, mark in zip(example.ids, example.trained, strict=True) if mark]
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_every_digit_is_a_token_and_a_formula_is_eight(tokenizer):
    tokens = tokenizer.encode("23 + 15 = 38").ids
    assert [tokenizer.decode([t]) for t in tokens] == [*"23", " + ", *"15", " = ", *"38"]


def test_think_markers_stay_visible_and_turn_markers_do_not(tokenizer):
    ids = tokenizer.encode(prompt_text("Hi?") + "x</think>" + END).ids
    assert tokenizer.decode(ids) == f"Hi?{THINK}\nx</think>"


def test_text_outside_the_problems_survives_the_tokenizer(tokenizer):
    text = "naïve — 42 × π\n\n  “été”\t{}"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_question_is_never_trained_on_and_the_derivation_always_is(tokenizer):
    rng = random.Random(0)
    problem = sample_problem(rng)
    example = corpus.derivation(tokenizer, rng, problem)
    told = trained_text(tokenizer, example)
    assert problem.question not in told
    assert told.endswith(f"So the answer is {problem.answer}.\n")


def test_a_drill_trains_on_results_alone(tokenizer):
    told = trained_text(tokenizer, corpus.drill(tokenizer, random.Random(0)))
    assert all(line.isdigit() for line in told.replace(".", "").split())


def test_an_elicited_answer_is_trained_on_and_its_suffix_is_not(tokenizer):
    rng = random.Random(0)
    for _ in range(200):
        example = corpus.probed(tokenizer, rng, sample_problem(rng), whole=True)
        whole = tokenizer.decode(example.ids, skip_special_tokens=False)
        told = trained_text(tokenizer, example)
        guess = whole.rsplit("\\boxed{", 1)[1].split("}")[0]
        assert told.endswith(guess + "}\n\\]" + END)
        assert "Oh, I" not in told


def test_a_slip_is_not_trained_on(tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "SLIP_RATE", 1.0)
    rng = random.Random(3)
    for _ in range(50):
        problem = sample_problem(rng)
        example = corpus.full(tokenizer, rng, problem)
        whole = tokenizer.decode(example.ids, skip_special_tokens=False)
        hidden = (
            len(whole) - len(prompt_text(problem.question)) - len(trained_text(tokenizer, example))
        )
        wrong = whole.split("but I wrote ")[1].split(".")[0]
        assert hidden == len(wrong)


def test_packed_rows_are_full_and_targets_are_the_next_tokens(tokenizer):
    mix = {"drill": 1.0, "full": 1.0, "probed": 1.0, "probed_full": 1.0, "derivation": 1.0}
    tokens, targets = corpus.pack(tokenizer, random.Random(4), mix, rows=4, length=128)
    assert tokens.shape == targets.shape == (4, 128)
    marked = targets[:, :-1] != corpus.IGNORED
    assert marked.any()
    assert torch.equal(targets[:, :-1][marked], tokens[:, 1:][marked])


def test_a_step_draws_the_same_batch_every_time(tokenizer):
    first = corpus.pack(tokenizer, random.Random("0:3:0"), {"full": 1.0}, 2, 64)
    again = corpus.pack(tokenizer, random.Random("0:3:0"), {"full": 1.0}, 2, 64)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
