"""Training examples of the countdown model.

Kinds: ``drill`` (bare calculations), ``three`` and ``four`` (a problem of that size with its
trace), ``probed`` (such a trace cut at a random token, and the answer elicited there). Loss is
never taken on the question, the operands of a drill or an elicitation suffix.
"""

import random

from tokenizers import Tokenizer

from countdown.traces import write_trace
from forethought.evaluation.generated.countdown import (
    LARGEST,
    QUESTIONS,
    SIZES,
    Problem,
    Step,
    combine,
    question_text,
    sample_problem,
)
from forethought.methods.parts.probe import ANSWER_SUFFIX, ANSWER_SUFFIX_WITH_MARKER, PROBE_SUFFIX
from forethought.training.chat_tokenizer import END, THINK_END, prompt_text, train_bpe
from forethought.training.from_scratch import Example, Span, encode
from forethought.training.texts import probe_suffix

VOCABULARY_SIZE = 384
WORDS = r"\d|[()]|,? ?[A-Za-z']+(?: (?=\d)|\n)?| ?[^\sA-Za-z\d'()]+(?: (?=\d)|\n)?|\s"
DRILL_LINES = 16


def train_tokenizer(seed: int = 0, samples: int = 2000) -> Tokenizer:
    """Learn the merges from fresh problems, traces and elicitation suffixes."""
    rng = random.Random(seed)
    suffixes = (PROBE_SUFFIX, ANSWER_SUFFIX, ANSWER_SUFFIX_WITH_MARKER.replace(THINK_END, ""))
    texts = [*suffixes] * (samples // 4)
    for _ in range(samples):
        problem = sample_problem(rng, rng.choice(SIZES))
        texts.append(question_text(problem, rng.choice(QUESTIONS)))
        texts.append(write_trace(problem, rng).text.replace(THINK_END, ""))
    return train_bpe(texts, VOCABULARY_SIZE, WORDS)


def drill(tokenizer: Tokenizer, rng: random.Random) -> Example:
    """Bare calculations, a line each; only the results are trained on."""
    spans = []
    for _ in range(DRILL_LINES):
        step = _sample_step(rng)
        spans.append(Span(f"{step.left} {step.sign} {step.right} = ", False))
        spans.append(Span(f"{step.value}\n", True))
    return encode(tokenizer, spans)


def _sample_step(rng: random.Random) -> Step:
    """A calculation with a sign drawn first, so that products and quotients are no rarer."""
    sign = rng.choice("+-**/")
    while True:
        highest = 20 if sign == "*" else LARGEST
        one, other = rng.randint(1, LARGEST), rng.randint(1, rng.choice((20, highest)))
        if sign == "/" and other > 1:
            one -= one % other
        if sign == "*":
            one = rng.randint(1, LARGEST // other)
        for step in combine(one, other) if one else ():
            if step.sign == sign:
                return step


def solved(tokenizer: Tokenizer, rng: random.Random, problem: Problem) -> Example:
    """A problem with its trace and the end token."""
    question = question_text(problem, rng.choice(QUESTIONS))
    spans = [Span(prompt_text(question), False), Span(write_trace(problem, rng).text + END, True)]
    return encode(tokenizer, spans)


def probed(tokenizer: Tokenizer, rng: random.Random, problem: Problem) -> Example:
    """A trace cut at a random token, and the answer elicited there: ``hmm`` within the search."""
    prompt = prompt_text(question_text(problem, rng.choice(QUESTIONS)))
    trace = write_trace(problem, rng)
    head = encode(tokenizer, [Span(prompt, False), Span(trace.text, True)])
    offsets = tokenizer.encode(prompt + trace.text).offsets
    first = head.trained.index(True)
    cut = rng.randint(first, len(offsets))
    length = offsets[cut - 1][1] - len(prompt)
    guess = trace.guess_at(length)
    suffix = probe_suffix(trace.text[:length], rng)
    tail = encode(tokenizer, [Span(suffix, False), Span(guess + "}\n\\]" + END, True)])
    return Example(head.ids[:cut] + tail.ids, head.trained[:cut] + tail.trained)


def make_example(tokenizer: Tokenizer, rng: random.Random, kind: str) -> Example:
    """A new example of the given kind, from a training problem."""
    if kind == "drill":
        return drill(tokenizer, rng)
    if kind == "probed":
        return probed(tokenizer, rng, sample_problem(rng, rng.choice(SIZES)))
    return solved(tokenizer, rng, sample_problem(rng, {"three": 3, "four": 4}[kind]))
