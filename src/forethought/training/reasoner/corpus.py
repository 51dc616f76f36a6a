"""Training examples and the packed batches made of them.

Five kinds of example: ``drill`` (bare calculations), ``derivation`` (a problem and its first
derivation), ``full`` (with re-checks and the answer), and the two latter cut at a random token and
followed by an elicited answer (``probed``, ``probed_full``). Loss is taken only where the solver
has something to decide: never on the question, the operands of a drill, an elicitation suffix or
the wrong value of a slip. The batch of a step is a function of seed and step alone, so a resumed
run has the batches of an uninterrupted one.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from forethought.training.reasoner.problems import (
    Problem,
    calculate,
    sample_calculation,
    sample_problem,
)
from forethought.training.reasoner.traces import Piece, write_trace
from forethought.training.reasoner.vocabulary import END, prompt_text
from forethought.training.texts import probe_suffix

IGNORED = -100
SLIP_RATE = 0.25
DRILL_LINES = 12


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and for each whether it counts in the loss."""

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of text that is trained on, or not."""

    text: str
    trained: bool


def encode(tokenizer: Tokenizer, spans: list[_Span]) -> Example:
    """Tokenise spans as one text; a token belongs to the span in which it begins."""
    encoding = tokenizer.encode("".join(span.text for span in spans))
    ends, position = [], 0
    for span in spans:
        position += len(span.text)
        ends.append(position)
    trained, index = [], 0
    for start, _ in encoding.offsets:
        while start >= ends[index]:
            index += 1
        trained.append(spans[index].trained)
    return Example(encoding.ids, trained)


def drill(tokenizer: Tokenizer, rng: random.Random) -> Example:
    """Bare calculations, a line each; only the results are trained on."""
    spans = []
    for _ in range(DRILL_LINES):
        left, sign, right = sample_calculation(rng)
        spans.append(_Span(f"{left} {sign} {right} = ", False))
        spans.append(_Span(f"{calculate(left, sign, right)}.\n", True))
    return encode(tokenizer, spans)


def derivation(tokenizer: Tokenizer, rng: random.Random, problem: Problem) -> Example:
    """A problem with its first derivation; the text breaks off where re-checks would begin."""
    return encode(tokenizer, _spans(problem, write_trace(problem, rng).derivation))


def full(tokenizer: Tokenizer, rng: random.Random, problem: Problem) -> Example:
    """A problem with its whole trace and the end token."""
    spans = _spans(problem, write_trace(problem, rng, SLIP_RATE).pieces)
    return encode(tokenizer, [*spans, _Span(END, True)])


def probed(
    tokenizer: Tokenizer, rng: random.Random, problem: Problem, *, whole: bool = False
) -> Example:
    """A derivation (or a whole trace) cut at a random token, and the answer elicited there."""
    trace = write_trace(problem, rng, SLIP_RATE if whole else 0.0)
    pieces = trace.pieces if whole else trace.derivation
    spans = _spans(problem, pieces)
    text = "".join(span.text for span in spans)
    offsets = tokenizer.encode(text).offsets
    first = sum(start < len(spans[0].text) for start, _ in offsets)
    cut = rng.randint(first, len(offsets))
    length = offsets[cut - 1][1]
    kept, guess = _keep(spans, length), guess_at(pieces, length - len(spans[0].text))
    suffix = probe_suffix(text[:length], rng)
    elicited = [_Span(suffix, False), _Span(guess + "}\n\\]" + END, True)]
    if rng.random() < 0.5:
        return encode(tokenizer, kept + elicited)
    head, tail = encode(tokenizer, spans), encode(tokenizer, elicited)
    return Example(head.ids[:cut] + tail.ids, head.trained[:cut] + tail.trained)


def guess_at(pieces: tuple[Piece, ...], length: int) -> str:
    """What a solver stopped after ``length`` characters of a trace answers."""
    guess = pieces[0].guess
    for piece in pieces:
        if length <= 0:
            break
        guess = piece.guess
        length -= len(piece.text)
    return guess


def values_only(tokenizer: Tokenizer, rng: random.Random, problem: Problem) -> Example:
    """A derivation marked at its computed values alone: the measure of arithmetic skill."""
    spans = [_Span(prompt_text(problem.question), False)]
    pieces = write_trace(problem, rng).derivation
    for piece, following in zip(pieces, (*pieces[1:], pieces[-1]), strict=True):
        spans.append(_Span(piece.text, piece.text.isdigit() and following.text == ".\n"))
    return encode(tokenizer, spans)


def _spans(problem: Problem, pieces: tuple[Piece, ...]) -> list[_Span]:
    spans = [_Span(prompt_text(problem.question), False)]
    return spans + [_Span(piece.text, not piece.is_slip) for piece in pieces if piece.text]


def _keep(spans: list[_Span], length: int) -> list[_Span]:
    """The first ``length`` characters of a list of spans."""
    kept: list[_Span] = []
    for span in spans:
        if length <= 0:
            break
        kept.append(_Span(span.text[:length], span.trained))
        length -= len(span.text)
    return kept


def make_example(tokenizer: Tokenizer, rng: random.Random, kind: str) -> Example:
    """A new example of the given kind, from a training problem."""
    if kind == "drill":
        return drill(tokenizer, rng)
    problem = sample_problem(rng)
    if kind == "derivation":
        return derivation(tokenizer, rng, problem)
    if kind == "full":
        return full(tokenizer, rng, problem)
    return probed(tokenizer, rng, problem, whole=kind == "probed_full")


def pack(
    tokenizer: Tokenizer, rng: random.Random, mix: Mapping[str, float], rows: int, length: int
) -> tuple[Tensor, Tensor]:
    """Rows packed with examples; each row begins with a new one, and its last one is cut.

    Returns tokens and targets, both int64 ``[rows, length]``; a target is the next token or
    ``IGNORED``.
    """
    kinds, weights = list(mix), list(mix.values())
    tokens, targets = [], []
    for _ in range(rows):
        ids: list[int] = []
        marks: list[bool] = []
        while len(ids) <= length:
            example = make_example(tokenizer, rng, rng.choices(kinds, weights)[0])
            ids += example.ids
            marks += example.trained
        tokens.append(ids[:length])
        shifted = zip(ids[1 : length + 1], marks[1 : length + 1], strict=True)
        targets.append([token if mark else IGNORED for token, mark in shifted])
    return torch.tensor(tokens), torch.tensor(targets)
