"""Training examples of the reasoner.

The kinds of example: ``drill`` and ``hard_drill`` (bare calculations), ``judged`` (lines of
re-checks, of which only the judgement is trained), ``derivation`` (a problem and its first
derivation), ``full`` (with re-checks and the answer; ``full_chain``: of a chain of four steps or
more), and the two latter cut at a random token and followed by an elicited answer (``probed``,
``probed_full``), that of a probe or of a thought that is closed there. Loss is taken only where the
solver has something to decide: never on the question, the operands of a drill, an elicitation
suffix or the wrong value of a slip. Some examples are about text that is no problem, with the
sentence that answers it. The batch of a step is a function of seed and step alone, so a resumed run
has the batches of an uninterrupted one.
"""

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from forethought.evaluation.generated.arithmetic import (
    MOST_STEPS,
    Problem,
    Step,
    sample_calculation,
    sample_hard_calculation,
)
from forethought.evaluation.generated.arithmetic_questions import sample_chain
from forethought.methods.no_thinking import FINISHED
from forethought.training.chat_tokenizer import END, THINK_END, prompt_text
from forethought.training.from_scratch import Example, Span, encode
from forethought.training.texts import probe_suffix
from reasoner.other import SENTENCE, THOUGHT
from reasoner.questions import sample_question
from reasoner.traces import (
    MOST_RECHECKED,
    UNSURE,
    Formula,
    Piece,
    Trace,
    derived,
    expected,
    had,
    rechecked,
    slip,
    write_trace,
)

SLIP_RATE = 0.35
DRILL_LINES, JUDGED_LINES = 10, 8
CLOSED = 0.35
"""Share of the cut traces whose thought is closed, as a thinking budget does, and not probed."""
CLOSINGS = (f"{THINK_END}\n", f"{THINK_END}\n\n", FINISHED)


def drill(tokenizer: Tokenizer, rng: random.Random, *, hard: bool = False) -> Example:
    """Bare calculations, a line each, at once or by parts; only the results are trained on."""
    spans = []
    for _ in range(DRILL_LINES):
        for index, formula in enumerate(_drilled(rng, hard)):
            calculation = f"{formula.left} {formula.sign} {formula.right}"
            spans.append(Span(", " + calculation if index else calculation, False))
            spans.append(Span(f" = {formula.value}", True))
        spans.append(Span(".\n", True))
    return encode(tokenizer, spans)


def _drilled(rng: random.Random, hard: bool) -> list[Formula]:
    if hard:
        left, sign, right = sample_hard_calculation(rng)
    elif rng.random() < 0.2:
        left, sign, right = rng.randint(0, 20), rng.choice("+-x"), rng.randint(0, 20)
    else:
        left, sign, right = sample_calculation(rng)
    step = Step("", left, sign, right)
    return derived(step) if rng.random() < 0.6 else rechecked(step, step.value)


def judged(tokenizer: Tokenizer, rng: random.Random) -> Example:
    """Steps calculated again beside a value noted before, many of them with a slip somewhere.

    Only what follows two values is trained on: whether they agree. Where they do not, the step is
    calculated a third time, and judged again.
    """
    spans = []
    for _ in range(JUDGED_LINES):
        left, sign, right = sample_calculation(rng)
        step = Step("", left, sign, right)
        place = rng.choices(("nowhere", "noted", "checked"), (4, 3, 3))[0]
        first = derived(step)
        noted = (_slipped(first, rng) if place == "noted" else first)[-1].value
        again = rechecked(step, noted)
        again = _slipped(again, rng) if place == "checked" else again
        third = _slipped(first, rng) if rng.random() < 0.15 else first
        checked, last = again[-1].value, third[-1].value
        spans.append(Span(f"{_joined(again)}{had(expected(step, noted))}", False))
        stands = checked == expected(step, noted)
        if not stands or rng.random() < 0.15:
            spans.append(Span(". Again: ", not stands))
            spans.append(Span(f"{_joined(third)}{had(noted)}", False))
            stands = last == noted
        spans.append(Span(", yes.\n" if stands else ". That was a slip.\n", True))
    return encode(tokenizer, spans)


def _slipped(formulas: list[Formula], rng: random.Random) -> list[Formula]:
    """With one value wrong; as they are where that would make one less than one."""
    wrong = slip(formulas, rng)
    return wrong if min(formula.value for formula in wrong) > 0 else formulas


def _joined(formulas: Sequence[Formula]) -> str:
    return ", ".join(f"{f.left} {f.sign} {f.right} = {f.value}" for f in formulas)


def trace_of(
    problem_or_text: Problem | str, rng: random.Random, slip_rate: float = 0.0
) -> tuple[str, Trace]:
    """The question, a problem's or another text, and what the reasoner is to write after it."""
    if isinstance(problem_or_text, Problem):
        return problem_or_text.question, write_trace(problem_or_text, rng, slip_rate)
    answer = Piece(f"</think>\n{SENTENCE}", UNSURE)
    return problem_or_text, Trace((Piece(THOUGHT, UNSURE),), (answer,))


def derivation(tokenizer: Tokenizer, rng: random.Random, problem_or_text: Problem | str) -> Example:
    """A problem with its first derivation; the text breaks off where re-checks would begin."""
    question, trace = trace_of(problem_or_text, rng)
    return encode(tokenizer, _spans(question, trace.derivation))


def full(tokenizer: Tokenizer, rng: random.Random, problem_or_text: Problem | str) -> Example:
    """A problem with its whole trace and the end token."""
    question, trace = trace_of(problem_or_text, rng, SLIP_RATE)
    return encode(tokenizer, [*_spans(question, trace.pieces), Span(END, True)])


def probed(
    tokenizer: Tokenizer, rng: random.Random, problem_or_text: Problem | str, *, whole: bool = False
) -> Example:
    """A derivation (or a whole trace) cut at a random token, and the answer elicited there."""
    question, trace = trace_of(problem_or_text, rng, SLIP_RATE if whole else 0.0)
    pieces = trace.pieces if whole else trace.derivation
    spans = _spans(question, pieces)
    text = "".join(span.text for span in spans)
    offsets = tokenizer.encode(text).offsets
    first = sum(start < len(spans[0].text) for start, _ in offsets)
    cut = rng.randint(first, len(offsets))
    length = offsets[cut - 1][1]
    beginning, guess = _keep(spans, length), guess_at(pieces, length - len(spans[0].text))
    elicited = _closed(guess, rng) if rng.random() < CLOSED else []
    if not elicited or THINK_END in text[:length]:
        suffix = probe_suffix(text[:length], rng)
        elicited = [Span(suffix, False), Span(guess + "}\n\\]" + END, True)]
    if rng.random() < 0.5:
        return encode(tokenizer, beginning + elicited)
    head, tail = encode(tokenizer, spans), encode(tokenizer, elicited)
    return Example(head.ids[:cut] + tail.ids, head.trained[:cut] + tail.trained)


def _closed(guess: str, rng: random.Random) -> list[Span]:
    """A thought that is closed from outside, and the answer that is spoken then."""
    answer = f"The answer is \\boxed{{{guess}}}."
    return [Span(rng.choice(CLOSINGS), False), Span(answer + END, True)]


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
    spans = [Span(prompt_text(problem.question), False)]
    pieces = write_trace(problem, rng).derivation
    spans += [Span(piece.text, piece.is_value) for piece in pieces if piece.text]
    return encode(tokenizer, spans)


def _spans(question: str, pieces: tuple[Piece, ...]) -> list[Span]:
    spans = [Span(prompt_text(question), False)]
    return spans + [Span(piece.text, piece.trained) for piece in pieces if piece.text]


def _keep(spans: list[Span], length: int) -> list[Span]:
    """The first ``length`` characters of a list of spans."""
    spans_kept: list[Span] = []
    for span in spans:
        if length <= 0:
            break
        spans_kept.append(Span(span.text[:length], span.trained))
        length -= len(span.text)
    return spans_kept


def make_example(tokenizer: Tokenizer, rng: random.Random, kind: str) -> Example:
    """A new example of the given kind, from a training problem or from other text."""
    if kind in ("drill", "hard_drill"):
        return drill(tokenizer, rng, hard=kind == "hard_drill")
    if kind == "judged":
        return judged(tokenizer, rng)
    if kind == "full_chain":
        return full(tokenizer, rng, sample_chain(rng, rng.randint(MOST_RECHECKED, MOST_STEPS)))
    problem_or_text = sample_question(rng)
    if kind == "derivation":
        return derivation(tokenizer, rng, problem_or_text)
    if kind == "full":
        return full(tokenizer, rng, problem_or_text)
    return probed(tokenizer, rng, problem_or_text, whole=kind == "probed_full")
