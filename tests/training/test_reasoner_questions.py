"""Problems beside the shipped mix: answers read from the text alone, the split, and lengths."""

import random
import re
import sys
from fractions import Fraction

import pytest

pytest.importorskip("tokenizers")

from forethought.assets import problems as shipped_problems
from forethought.evaluation.generated.arithmetic import (
    LARGEST,
    SMALL,
    fixed_test_problems,
    is_held_out,
)
from forethought.evaluation.generated.arithmetic_questions import (
    KINDS,
    sample_chain,
    sample_larger,
    sample_mixed,
    sample_varied,
)
from forethought.training.chat_tokenizer import prompt_text
from reasoner import questions
from reasoner.other import HELD_OUT, SENTENCE, sample_other
from reasoner.traces import write_trace
from reasoner.vocabulary import train_tokenizer

WORDS = {
    "plus": "+", "minus": "-", "times": "*", "multiplied by": "*", "divided by": "/",
    "x": "*", "\u00d7": "*", "\u00f7": "/",
}  # fmt: skip
IN_WORDS = (
    (r"(?:add|the sum of) (\d+) (?:and|to) (\d+)", "{0}+{1}"),
    (r"difference of (\d+) and (\d+)", "{0}-{1}"),
    (r"(?:take|subtract) (\d+) (?:away )?from (\d+)", "{1}-{0}"),
    (r"(?:multiply|product of) (\d+) (?:by|and) (\d+)", "{0}*{1}"),
    (r"(?:divide|share) (\d+) (?:by|among) (\d+)", "{0}/{1}"),
)
CHANGES = (
    (r"(?:buys|finds|gets) (\d+) more", lambda pile, n: pile + n),
    (r"(?:uses|sells|loses|eats|gives away|lose) (\d+)\b(?! \w+ at)", lambda pile, n: pile - n),
    (r"has (\d+) more than", lambda pile, n: pile + n),
    (r"has (\d+) fewer than", lambda pile, n: pile - n),
    (r"now has (\d+) times as many", lambda pile, n: pile * n),
    (r"(\d+) friends share them", lambda pile, n: pile / n),
)


def value_of(expression):
    """Exact value of ``a+b*(c-d)``, by precedence; an evaluator of the tests' own."""
    while inner := re.search(r"\(([^()]*)\)", expression):
        expression = expression.replace(inner[0], str(value_of(inner[1])))
    for signs in ("+-", "*/"):
        for place in range(len(expression) - 1, 0, -1):
            if expression[place] in signs:
                left, right = value_of(expression[:place]), value_of(expression[place + 1 :])
                sign = expression[place]
                if sign in "+-":
                    return left + right if sign == "+" else left - right
                return left * right if sign == "*" else left / right
    return Fraction(expression)


def read_sum(question):
    """The value of a sum as typed."""
    text = question.lower()
    for pattern, form in IN_WORDS:
        if found := re.search(pattern, text):
            return value_of(form.format(*found.groups()))
    for word, sign in WORDS.items():
        text = re.sub(rf"(?<![a-z]){word}(?![a-z])", sign, text)
    expression = re.search(r"[(\d][\d+\-*/() ]*", text)[0].replace(" ", "")
    return value_of(expression)


def read_story(question):
    """The value that a story about one pile ends in."""
    if found := re.search(r"buys (\d+) (?:boxes with|\w+ at) (\d+)", question):
        pile = Fraction(int(found[1]) * int(found[2]))
    else:
        found = re.search(r"has (\d+)", question)
        pile = Fraction(found[1])
    for sentence in question[found.end() :].split("."):
        for pattern, change in CHANGES:
            if told := re.search(pattern, sentence):
                pile = change(pile, int(told[1]))
    return pile


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(samples=400)


@pytest.fixture(scope="module")
def varied():
    rng = random.Random(5)
    return {kind: [sample_varied(rng, kind) for _ in range(400)] for kind in KINDS}


@pytest.mark.parametrize("kind", ["sum", "sum chain"])
def test_a_sum_has_the_value_that_its_text_has(varied, kind):
    for problem in varied[kind]:
        assert read_sum(problem.question) == int(problem.answer), problem.question


@pytest.mark.parametrize("kind", ["long", "one step", "unasked"])
def test_a_story_has_the_answer_that_its_text_has(varied, kind):
    for problem in varied[kind]:
        assert read_story(problem.question) == int(problem.answer), problem.question


def test_sums_are_typed_in_the_forms_that_people_use(varied):
    typed = {re.sub(r"\d+", "N", problem.question) for problem in varied["sum"]}
    for form in (r"N \+ N", r"N-N", r"N ?[*x\u00d7] ?N", r"N ?[*+x-] ?N ?="):
        assert any(re.fullmatch(form, text) for text in typed), form
    for opening in ("What is N", "How much is N", "Compute N", "Calculate N", "what", "Add N"):
        assert any(text.startswith(opening) for text in typed), opening
    small = [p for p in varied["sum"] if max(p.steps[0].left, p.steps[0].right) <= SMALL]
    assert len(small) > 100


def test_zero_is_an_answer_and_only_a_difference_of_one_step_is_negative(varied):
    everything = [problem for problems in varied.values() for problem in problems]
    assert any(problem.answer == "0" for problem in everything)
    negative = [p for p in everything if any(step.value < 0 for step in p.steps)]
    assert negative
    assert all(len(p.steps) == 1 and p.family == "sum" for p in negative)
    assert all(abs(step.value) <= LARGEST for p in everything for step in p.steps)


def test_training_problems_are_held_in_but_for_sums_of_small_numbers():
    rng = random.Random(6)
    for _ in range(4000):
        problem = sample_mixed(rng)
        if is_held_out(problem.family, problem.steps):
            (step,) = problem.steps
            assert problem.family == "sum"
            assert max(step.left, step.right) <= SMALL or step.right <= 10


def test_the_shipped_problems_are_never_trained_on():
    """By the rule, whatever the seed: each of their chains is held out. And by trial."""
    fixed = fixed_test_problems()
    assert [p.question for p in fixed] == [p["question"] for p in shipped_problems()]
    assert all(is_held_out(p.family, p.steps) and p.family != "sum" for p in fixed)
    questions, rng = {p.question for p in fixed}, random.Random(7)
    assert not any(sample_mixed(rng).question in questions for _ in range(4000))


def test_held_out_problems_of_every_kind_can_be_drawn():
    rng = random.Random(8)
    for kind in KINDS:
        problem = sample_varied(rng, kind, held_out=True)
        assert is_held_out(problem.family, problem.steps)


@pytest.mark.parametrize("count", range(1, 9))
def test_a_chain_has_the_steps_asked_for_and_its_trace_fits_the_trained_context(count, tokenizer):
    rng = random.Random(count)
    for _ in range(60):
        problem = sample_chain(rng, count)
        assert len(problem.steps) == count
        assert read_story(problem.question) == int(problem.answer)
        trace = write_trace(problem, rng, slip_rate=0.35)
        assert len(tokenizer.encode(prompt_text(problem.question) + trace.text).ids) < 512


def test_larger_operands_are_larger_than_those_of_training(varied):
    rng = random.Random(9)
    larger = [sample_larger(rng) for _ in range(200)]
    assert all(read_story(p.question) == int(p.answer) for p in larger)
    assert not any(is_held_out(p.family, p.steps) for p in larger)
    added = [s.right for p in larger for s in p.steps if s.sign == "+"]
    trained = [s.right for p in varied["long"] for s in p.steps if s.sign == "+"]
    assert max(trained) <= 900 < sum(added) / len(added)


def test_other_text_varies_and_never_is_what_the_evaluation_asks():
    rng = random.Random(10)
    texts = [sample_other(rng) for _ in range(5000)]
    assert len(set(texts)) > 3000
    assert not set(texts) & set(HELD_OUT)
    assert not any(re.search(r"\{[navpmy]\}", text) for text in texts)
    assert "boxed" not in SENTENCE
    assert not re.search(r"\d", SENTENCE)


def test_the_program_writes_held_out_problems_first_then_training_questions(tmp_path, monkeypatch):
    drawn, draw = [], questions.sample_mixed

    def drawing(rng, *, held_out=False):
        drawn.append((draw(rng, held_out=held_out), held_out))
        return drawn[-1][0]

    monkeypatch.setattr(questions, "sample_mixed", drawing)
    for name in ("first", "again"):
        command = f"questions --seed 3 --train 100 --held-out 5 --out {tmp_path / name / 'p.txt'}"
        monkeypatch.setattr(sys, "argv", command.split())
        questions.main()
    lines = (tmp_path / "first" / "p.txt").read_text().splitlines()
    assert lines == (tmp_path / "again" / "p.txt").read_text().splitlines()
    assert lines[:5] == [problem.question for problem, held_out in drawn[:5] if held_out]
    asked = {problem.question for problem, _ in drawn}
    assert len(lines) == 105
    assert 0 < sum(line not in asked for line in lines[5:]) < 20
    assert not any(line.startswith("{") for line in lines)
