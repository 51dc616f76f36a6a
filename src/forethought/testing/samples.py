"""The samples that ``check_method`` gives to a method: a pure function of the prompt and the seed.

They are the same in one request or in several: a prompt that ends within an answer is continued
with the rest of that answer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from forethought.outputs import Logprob, TokenLogprobs

Respond = Callable[[str, int], str]
"""What is generated after a prompt, given a seed; never empty."""

_MARKS = "~^@|&%$#"
"""The first character of an answer says which one it is."""
_JUDGEMENTS = ("sure", "likely", "impossible")


def sample_answer(prompt: str, seed: int) -> str:
    """The rest of the answer that ``prompt`` ends in; else one that prompt and seed draw.

    There are eight answers, of three steps with a blank line between them; two each agree. A prompt
    that ends with ``{`` is answered with the number of the last answer in it, as probes ask for
    one; one that ends with ``score:`` with a score from 0 to 9, and one that ends with
    ``(sure, likely or impossible):`` with one of these words.
    """
    last = max((prompt.rfind(mark), mark) for mark in _MARKS)
    if prompt.endswith("{"):
        return f"{_MARKS.index(last[1]) // 2}}}" if last[0] >= 0 else "0}"
    if last[0] >= 0:
        beginning, answer = prompt[last[0] :], _answer(_MARKS.index(last[1]))
        if answer.startswith(beginning) and beginning != answer:
            return answer[len(beginning) :]
    drawn = _drawn(prompt, seed)
    question = prompt.rstrip().lower()
    if question.endswith("score:"):
        return str(drawn % 10)
    if question.endswith("(sure, likely or impossible):"):
        return _JUDGEMENTS[drawn % len(_JUDGEMENTS)]
    return _answer(drawn % len(_MARKS))


def sample_score(question: str, answer: str) -> float:
    """A score from 0 to 1 that question and answer draw."""
    return _drawn(f"{question}\0{answer}", 0) % 1000 / 1000


def sample_logprobs(text: str) -> list[TokenLogprobs]:
    """Log-probabilities of the characters of a text, and of one other in the place of each."""
    logprobs = []
    for place, token in enumerate(text):
        share = 0.5 + _drawn(text[: place + 1], 0) % 400 / 1000
        other = "?" if token != "?" else "!"
        logprobs.append(
            {
                ord(token): Logprob(math.log(share), 1, token),
                ord(other): Logprob(math.log(1 - share), 2, other),
            }
        )
    return logprobs


def _answer(number: int) -> str:
    half = number // 2
    text = f"{_MARKS[number]} First, take {number}.\n\nHalf of it: the answer is {half}.\n\n"
    return f"{text}So it is \\boxed{{{half}}}."


def _drawn(prompt: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}\0{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
