"""What is asked of a model about answers, with the replies that it is trained on.

Each ``Dialogue`` is what one method's prompts and a right reply make: continuations of an attempt
(``self_refine``, ``sequential_revision``, ``genrm``, ``adaptive_compute``, ``tree_of_thoughts``)
and chats about answers (``judge``, ``compare``, ``spct``, ``archon``). The prompts are those of the
methods themselves.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forethought.evaluation.generated.countdown import (
    BACK,
    FOUND,
    QUESTIONS,
    question_text,
    reachable,
)
from forethought.evaluation.generated.countdown import sample_problem as _sample_problem
from forethought.methods.adaptive_compute import RESTART_PROMPT
from forethought.methods.parts.archon_prompts import PROMPTS
from forethought.methods.self_refine import FEEDBACK_PROMPT, REFINE_PROMPT
from forethought.methods.sequential_revision import REVISE_PROMPT
from forethought.methods.spct import CRITIQUE_PROMPT
from forethought.methods.tree_of_thoughts import VALUE
from forethought.rewards.genrm_controller import VERIFY_PROMPT, YES_NO_PROMPT
from forethought.rewards.judge import COMPARE_PROMPT, SCORE_PROMPT, filled
from forethought.training.chat_tokenizer import END, THINK_END, prompt_text
from instruct.attempts import (
    Attempt,
    Check,
    attempt_at,
    check,
    checks,
    sample_answer,
    sample_attempt,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A text, which is tokenised alone, and whether it is trained on."""

    text: str
    trained: bool


Dialogue = list[Turn]
_LEFT = re.compile(r".*, left (\d+(?: \d+)*)")


def asked(text: str) -> Turn:
    """A text that a method puts there."""
    return Turn(text, False)


def said(text: str) -> Turn:
    """A text that the model is to write."""
    return Turn(text, True)


# ---- continuations of an attempt -----------------------------------------------------------------


def plain(rng: random.Random) -> Dialogue:
    """A problem and an attempt."""
    attempt = sample_attempt(rng)
    return [asked(prompt_text(attempt.question)), said(attempt.trace.text + END)]


def revised(rng: random.Random) -> Dialogue:
    """An attempt and up to two revisions."""
    attempt = sample_attempt(rng)
    dialogue = [asked(prompt_text(attempt.question)), said(attempt.trace.text)]
    for _ in range(rng.randint(1, 2)):
        attempt = attempt.again(rng)
        dialogue += [asked(REVISE_PROMPT), said(attempt.trace.text)]
    return [*dialogue[:-1], said(dialogue[-1].text + END)]


def refined(rng: random.Random) -> Dialogue:
    """An attempt, feedback, and better attempts with feedback until one is right."""
    attempt = sample_attempt(rng)
    dialogue = [asked(prompt_text(attempt.question)), said(attempt.trace.text)]
    for last in (False, True):
        result = check(attempt.problem, attempt.trace.answer)
        dialogue += [asked(FEEDBACK_PROMPT), said(_feedback(result) + END)]
        if result.is_right or last:
            break
        attempt = attempt.again(rng)
        dialogue += [asked(REFINE_PROMPT), said(attempt.trace.text)]
    return dialogue


def _feedback(result: Check) -> str:
    return f"{result.text}{result.finding}" + (" It is correct." if result.is_right else "")


def verified(rng: random.Random) -> Dialogue:
    """An attempt, its verification, and the question whether it is correct."""
    attempt = sample_attempt(rng)
    result = check(attempt.problem, attempt.trace.answer)
    return [
        asked(prompt_text(attempt.question) + attempt.trace.text),
        asked(VERIFY_PROMPT),
        said(f"{result.text}{result.finding}{END}"),
        asked(YES_NO_PROMPT),
        said(f" {'Yes' if result.is_right else 'No'}{END}"),
    ]


def restarted(rng: random.Random) -> Dialogue:
    """An unfinished attempt, and whether a new one would be better."""
    attempt = sample_attempt(rng)
    text = attempt.trace.text
    if rng.random() < 0.6:
        text = text[: rng.randint(1, len(attempt.trace.search))]
    better = "No" if attempt.is_right else "Yes"
    prompt = prompt_text(attempt.question)
    return [asked(prompt + text), asked(RESTART_PROMPT), said(better + END)]


def valued(rng: random.Random) -> Dialogue:
    """An attempt up to the end of a line, and whether it can still succeed."""
    attempt = sample_attempt(rng)
    lines = attempt.trace.search.splitlines(keepends=True)
    first_lines = lines[: rng.randint(1, len(lines))]
    text = "".join(first_lines)
    value = value_of(attempt, first_lines)
    if len(first_lines) == len(lines) and rng.random() < 0.5:
        text = attempt.trace.text
        value = "sure" if attempt.is_right else "impossible"
    return [asked(prompt_text(attempt.question) + text), asked(VALUE), said(f" {value}{END}")]


def value_of(attempt: Attempt, lines: Sequence[str]) -> str:
    """``sure`` at a hit, ``likely`` where the target can be made of what is left, else
    ``impossible``."""
    last = lines[-1].strip()
    if last.endswith(FOUND):
        return "sure"
    remaining = attempt.problem.numbers
    for line in lines:
        if line.strip() == BACK:
            remaining = attempt.problem.numbers
        elif named := _LEFT.match(line):
            remaining = tuple(map(int, named[1].split()))
    return "likely" if attempt.problem.target in reachable(remaining) else "impossible"


# ---- chats about answers -------------------------------------------------------------------------


def _group(rng: random.Random, fewest: int = 2) -> tuple[str, list[Attempt]]:
    problem = _sample_problem(rng, 3 if rng.random() < 0.2 else 4)
    question = question_text(problem, rng.choice(QUESTIONS))
    count = rng.randint(fewest, 5)
    answers = [sample_answer(rng, problem, question) for _ in range(count)]
    return question, answers


def _chat(prompt: str, values: Mapping[str, str], thought: str, reply: str) -> Dialogue:
    shown = filled(prompt, values)
    return [asked(prompt_text(shown)), said(f"{thought}{THINK_END}\n{reply}{END}")]


def _listed(answers: Sequence[Attempt], form: str) -> str:
    texts = [form.format(n=n, text=attempt.answer) for n, attempt in enumerate(answers, start=1)]
    return "\n\n".join(texts)


def _thought(results: Sequence[Check]) -> str:
    return "".join(f"{n}. {result.text}" for n, result in enumerate(results, start=1))


def scored(rng: random.Random) -> Dialogue:
    """A judge's grade of an answer."""
    question, [answer, *_] = _group(rng)
    result = check(answer.problem, answer.trace.answer)
    values = {"{question}": question, "{answer}": answer.answer, "{highest}": "10"}
    return _chat(SCORE_PROMPT, values, result.text, f"{result.finding}\nScore: {result.score}")


def compared(rng: random.Random) -> Dialogue:
    """The best of a group, of equal ones the first."""
    question, answers = _group(rng)
    results = checks(answers[0].problem, answers)
    listed = _listed(answers, "Answer {n}:\n{text}")
    values = {"{question}": question, "{count}": str(len(answers)), "{answers}": listed}
    return _chat(COMPARE_PROMPT, values, _thought(results), f"Best: {_order(results)[0]}")


def criticised(rng: random.Random) -> Dialogue:
    """Principles and a score for each answer."""
    question, answers = _group(rng)
    results = checks(answers[0].problem, answers)
    listed = _listed(answers, "Answer {n}:\n{text}")
    values = {"{question}": question, "{count}": str(len(answers)), "{answers}": listed}
    reply = (
        "Principles: each number once, weight 5; the target, weight 5.\n"
        f"Scores: [{', '.join(str(result.score) for result in results)}]"
    )
    return _chat(CRITIQUE_PROMPT, values, _thought(results), reply)


def critique(result: Check) -> str:
    """Strengths and weaknesses, as the critic of a pipeline writes them."""
    if result.is_right:
        return f"Strengths: {result.finding}\nWeaknesses: none."
    strengths = "its numbers are right." if result.has_numbers else "none."
    return f"Strengths: {strengths}\nWeaknesses: {result.finding}"


def _order(results: Sequence[Check]) -> list[int]:
    numbers = range(1, len(results) + 1)
    return sorted(numbers, key=lambda n: -results[n - 1].score)


def _with_critiques(answers: Sequence[Attempt], results: Sequence[Check], shown: bool) -> str:
    texts = []
    for n, (attempt, result) in enumerate(zip(answers, results, strict=True), start=1):
        appendix = f"\n\nCritique of [{n}]: {critique(result)}" if shown else ""
        texts.append(f"[{n}] {attempt.answer}{appendix}")
    return "\n\n".join(texts)


def _pipeline(rng: random.Random, name: str) -> Dialogue:
    question, answers = _group(rng, 1)
    results = checks(answers[0].problem, answers)
    asked_about = {"{question}": question, "{answer}": answers[0].answer}
    if name == "critic":
        return _chat(PROMPTS[name], asked_about, results[0].text, critique(results[0]))
    if name == "verifier":
        conclusion = "[Correct]" if results[0].is_right else "[Incorrect]"
        return _chat(
            PROMPTS[name], asked_about, results[0].text, f"{results[0].finding}\n{conclusion}"
        )
    has_critiques = rng.random() < 0.6
    listed = _with_critiques(answers, results, has_critiques)
    values = {"{question}": question, "{count}": str(len(answers)), "{answers}": listed}
    thought = "" if has_critiques else _thought(results)
    if name == "ranker":
        ranking = " > ".join(f"[{n}]" for n in _order(results))
        return _chat(PROMPTS[name], values, thought, f"Ranking: {ranking}")
    return _fused(rng, answers, results, values, thought)


def _fused(
    rng: random.Random,
    answers: Sequence[Attempt],
    results: Sequence[Check],
    values: Mapping[str, str],
    thought: str,
) -> Dialogue:
    """The best answer; where none is right, a new attempt."""
    best = answers[_order(results)[0] - 1]
    if not best.is_right:
        best = attempt_at(best.problem, best.question, rng)
        thought += best.trace.search
    return _chat(PROMPTS["fuser"], values, thought, best.answer)


def ranked(rng: random.Random) -> Dialogue:
    """The ranker of a pipeline."""
    return _pipeline(rng, "ranker")


def fused(rng: random.Random) -> Dialogue:
    """The fuser of a pipeline."""
    return _pipeline(rng, "fuser")


def commented(rng: random.Random) -> Dialogue:
    """The critic of a pipeline."""
    return _pipeline(rng, "critic")


def approved(rng: random.Random) -> Dialogue:
    """The verifier of a pipeline."""
    return _pipeline(rng, "verifier")


KINDS: Mapping[str, Callable[[random.Random], Dialogue]] = {
    "plain": plain,
    "revised": revised,
    "refined": refined,
    "verified": verified,
    "restarted": restarted,
    "valued": valued,
    "scored": scored,
    "compared": compared,
    "criticised": criticised,
    "ranked": ranked,
    "fused": fused,
    "commented": commented,
    "approved": approved,
}
"""Kinds of dialogue about attempts and answers."""
