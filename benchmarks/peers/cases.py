"""What is measured: requests to all contestants in turns, and the figures of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.peers.contestant import Contestant, Failed
from benchmarks.peers.worker import Request

FIRST_PROMPT = 512
"""Tokens of the prompt whose first token is timed."""
MIXED_PROMPTS, MIXED_LENGTHS = (16, 256), (16, 192)
"""Requests at once, and the bounds of their prompts' and answers' tokens."""
NUM_BEHIND = 33
"""Tokens decoded after a long context."""


@dataclass(frozen=True)
class Figure:
    """One contestant in one case; medians over the rounds."""

    model: str
    case: str
    contestant: str
    value: float
    """In the case's unit."""
    ratio: float
    """Of speeds to ``transformers`` in the same round."""
    agreement: float
    """Share of the tokens up to the first that differs from those of ``transformers``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "model": self.model,
            "case": self.case,
            "contestant": self.contestant,
            "value": round(self.value, 2),
            "ratio": round(self.ratio, 3),
            "agreement": round(self.agreement, 4),
        }


class Prompts:
    """Random tokens; none comes twice."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._source, self._vocab_size = random.Random(seed), vocab_size

    def of(self, lengths: Iterable[int]) -> list[list[int]]:
        """Prompts of this many tokens."""
        return [[self._source.randrange(3, self._vocab_size) for _ in range(n)] for n in lengths]

    def fixed(self, batch: int, prompt: int, new: int, *, timed: bool = False) -> Request:
        """``batch`` prompts of one length."""
        return Request(self.of([prompt] * batch), [new] * batch, timed=timed)

    def mixed(self, num_requests: int) -> Request:
        """Requests of different lengths."""
        prompts = self.of(self._source.randint(*MIXED_PROMPTS) for _ in range(num_requests))
        return Request(prompts, [self._source.randint(*MIXED_LENGTHS) for _ in prompts])


Measure = Callable[[Request, dict[str, Any]], dict[str, float]]
"""Request and answer -> figures, larger being faster."""


def throughput(request: Request, answer: dict[str, Any]) -> dict[str, float]:
    """Tokens per second from the first prompt token to the last answer."""
    return {"tokens/s": sum(map(len, answer["tokens"])) / answer["seconds"]}


def first_token(request: Request, answer: dict[str, Any]) -> dict[str, float]:
    """Prompts per second; a request for one token ends with it."""
    return {"first": 1 / answer["seconds"]}


def behind_context(request: Request, answer: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of the prompts, and of decoding after them."""
    if answer["first"] is None:
        return {}
    num_prompt, num_new = sum(map(len, request.prompts)), sum(request.lengths)
    decoding = answer["seconds"] - answer["first"]
    return {
        "prefill": num_prompt / answer["first"],
        "decode": (num_new - len(request.prompts)) / decoding,
    }


def run(
    contestants: Sequence[Contestant],
    requests: Sequence[Request],
    measure: Measure,
    on_failure: Callable[[Contestant, Failed], None],
    *,
    num_warm: int = 1,
) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Ask every contestant each request in turn: figure -> contestant -> value, ratio, agreement.

    Who fails is not asked again. The order changes from round to round.

    Args:
        contestants: ratios and agreement are to the first.
        requests: of the rounds.
        measure: figures of an answer.
        on_failure: told of who fails.
        num_warm: rounds at the beginning that count for agreement alone.
    """
    remaining, base = list(contestants), contestants[0].label
    figures: dict[str, dict[str, list[float]]] = {}
    agreed: dict[str, list[float]] = {}
    for number, request in enumerate(requests):
        answers: dict[str, dict[str, Any]] = {}
        turn = number % len(remaining)
        for contestant in remaining[turn:] + remaining[:turn]:
            try:
                answers[contestant.label] = contestant.generate(request)
            except Failed as failure:
                remaining.remove(contestant)
                on_failure(contestant, failure)
        for label, answer in answers.items():
            agreed.setdefault(label, []).append(agreement(answer, answers[base]))
            if number >= num_warm:
                for name, value in measure(request, answer).items():
                    figures.setdefault(name, {}).setdefault(label, []).append(value)
    return {
        name: {
            label: _summary(speeds, by_label[base], agreed[label])
            for label, speeds in by_label.items()
        }
        for name, by_label in figures.items()
    }


def _summary(
    mine: list[float], base: list[float], agreed: list[float]
) -> tuple[float, float, float]:
    ratio = median(a / b for a, b in zip(mine, base[: len(mine)], strict=True))
    return median(mine), ratio, sum(agreed) / len(agreed)


def agreement(answer: dict[str, Any], base: dict[str, Any]) -> float:
    """Share of the base's tokens that stand before the first difference."""
    same = total = 0
    for mine, theirs in zip(answer["tokens"], base["tokens"], strict=True):
        total += len(theirs)
        same += next(
            (n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
            min(len(mine), len(theirs)),
        )
    return same / max(1, total)


def with_way(requests: Sequence[Request], way: str) -> list[Request]:
    """The same, asked with a drafter."""
    return [replace(request, way=way) for request in requests]
