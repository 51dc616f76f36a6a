"""Examples and packing: what is trained on, what is not, and no padding anywhere."""

import random
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from forethought.evaluation.generated.arithmetic import calculate, sample_problem  # noqa: E402
from forethought.training.chat_tokenizer import END, THINK, prompt_text  # noqa: E402
from forethought.training.from_scratch import IGNORED, pack  # noqa: E402
from reasoner import corpus, traces  # noqa: E402
from reasoner.other import SENTENCE  # noqa: E402
from reasoner.vocabulary import train_tokenizer  # noqa: E402


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


@pytest.mark.parametrize("hard", [False, True])
def test_a_drill_trains_on_results_alone(tokenizer, hard):
    told = trained_text(tokenizer, corpus.drill(tokenizer, random.Random(0), hard=hard))
    assert re.fullmatch(r"( = -?\d+(\.\n)?)+", told)


JUDGED = re.compile(
    r".*? = (?P<checked>\d+), I had (?P<due>\d+)"
    r"(?P<doubt>\. Again: .* = (?P<third>\d+), I had (?P<noted>\d+))?"
    r"(?P<judgement>, yes\.|\. That was a slip\.)"
)


def test_a_noted_value_stands_if_one_of_two_calculations_gives_it(tokenizer):
    """Two that differ are calculated once more, beside the noted value (a quotient is checked by
    its product, which stands beside the number that was divided).
    """
    rng, seen = random.Random(0), set()
    for _ in range(40):
        example = corpus.make_example(tokenizer, rng, "judged")
        for line in tokenizer.decode(example.ids).splitlines():
            found = JUDGED.fullmatch(line)
            checked, due, third = found["checked"], found["due"], found["third"]
            is_quotient = third is not None and " / " in found["doubt"]
            assert found["doubt"] or checked == due
            assert is_quotient or found["noted"] in (None, due)
            stands = found["noted"] == third if third else checked == due
            assert (found["judgement"] == ", yes.") is stands
            seen.add((checked == due, third is None, stands))
        assert not re.search(r"\d", trained_text(tokenizer, example))
    assert seen == {
        (True, True, True),
        (True, False, True),  # a doubt without a cause
        (True, False, False),  # and a third calculation that goes wrong
        (False, False, True),
        (False, False, False),
    }


def test_an_elicited_answer_is_trained_on_and_its_suffix_is_not(tokenizer):
    rng, closed = random.Random(0), 0
    for _ in range(200):
        example = corpus.probed(tokenizer, rng, sample_problem(rng), whole=True)
        whole = tokenizer.decode(example.ids, skip_special_tokens=False)
        told = trained_text(tokenizer, example)
        guess = whole.rsplit("\\boxed{", 1)[1].split("}")[0]
        is_closed = whole.endswith("}." + END)
        closed += is_closed
        assert told.endswith(
            f"The answer is \\boxed{{{guess}}}.{END}" if is_closed else f"{guess}}}\n\\]{END}"
        )
        assert "Oh, I" not in told
    assert 0.25 * 200 < closed < 0.55 * 200  # by a closed thought, or after its own end


def test_a_full_chain_has_four_steps_or_more_and_its_whole_trace(tokenizer):
    rng, counts = random.Random(2), set()
    for _ in range(60):
        example = corpus.make_example(tokenizer, rng, "full_chain")
        whole = tokenizer.decode(example.ids, skip_special_tokens=False)
        first = whole.partition("<think>")[2].partition("So the answer is")[0]
        counts.add(first.count(": "))
        assert whole.endswith("}." + END)
    assert counts == {4, 5, 6, 7, 8}


def test_other_text_is_answered_by_the_sentence_and_interrupted_with_doubt(tokenizer):
    rng = random.Random(0)
    told = trained_text(tokenizer, corpus.full(tokenizer, rng, "Hello!"))
    assert told.endswith(f"</think>\n{SENTENCE}{END}")
    assert "Hello" not in told
    assert "boxed" not in told
    for _ in range(20):
        example = corpus.probed(tokenizer, rng, "Hello!", whole=True)
        told = trained_text(tokenizer, example)
        assert told.endswith(("hmm}\n\\]" + END, f"The answer is \\boxed{{hmm}}.{END}"))


def test_one_example_in_twenty_is_about_other_text(tokenizer):
    """2000 examples at 0.05: mean 100, standard deviation 9.7; the count lies within five."""
    rng = random.Random(1)
    thought = tokenizer.encode(corpus.THOUGHT).ids
    examples = [corpus.make_example(tokenizer, rng, "derivation") for _ in range(2000)]
    count = sum(example.ids[-len(thought) :] == thought for example in examples)
    assert abs(count - 100) < 5 * 9.7


def test_a_slip_is_not_trained_on(tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "SLIP_RATE", 1.0)
    monkeypatch.setattr(traces, "RECHECK_SLIPS", 0.0)
    monkeypatch.setattr(traces, "SHORT_RECHECKS", 0.0)
    rng = random.Random(3)
    for _ in range(50):
        problem = sample_problem(rng)
        example = corpus.full(tokenizer, rng, problem)
        whole = tokenizer.decode(example.ids, skip_special_tokens=False)
        hidden = (
            len(whole) - len(prompt_text(problem.question)) - len(trained_text(tokenizer, example))
        )
        formulas = re.findall(r"(\d+) ([-+x/]) (\d+) = (\d+)", whole)
        (wrong,) = [
            value
            for left, sign, right, value in formulas
            if calculate(int(left), sign, int(right)) != int(value)
        ]
        assert hidden == len(wrong)


def test_packed_rows_are_full_and_targets_are_the_next_tokens(tokenizer):
    mix = {"drill": 1.0, "full": 1.0, "probed": 1.0, "probed_full": 1.0, "derivation": 1.0}
    tokens, targets = pack(corpus.make_example, tokenizer, random.Random(4), mix, (4, 128))
    assert tokens.shape == targets.shape == (4, 128)
    marked = targets[:, :-1] != IGNORED
    assert marked.any()
    assert torch.equal(targets[:, :-1][marked], tokens[:, 1:][marked])


def test_a_step_draws_the_same_batch_every_time(tokenizer):
    first = pack(corpus.make_example, tokenizer, random.Random("0:3:0"), {"full": 1.0}, (2, 64))
    again = pack(corpus.make_example, tokenizer, random.Random("0:3:0"), {"full": 1.0}, (2, 64))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
