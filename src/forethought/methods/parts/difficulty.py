"""The difficulty of questions, and policies that choose a method by it.

The difficulty is predicted from some samples, the probes: 1 - (votes of the most frequent answer) /
(number of probes), or where there is a reward 1 - (their mean score). A ``Policy`` says which
method answers a question of that difficulty. ``fit`` makes one from a calibration file: questions
are sorted into bins of difficulty, each with about as many, and of all ways to give each bin a
method the most accurate one is taken whose tokens stay within a limit on average. The file is the
journal that ``forethought eval`` writes::

    forethought eval ... --methods plain,majority_vote@8,majority_vote@32 --samples 4 --out DIR
    fit("DIR/...", max_tokens=2000).save("policy.json")
    methods.create("compute_optimal", policy="policy.json")
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from forethought.answers import answer_spaces
from forethought.answers.answer_spaces import AnswerSpace
from forethought.answers.answers import AnswerPool
from forethought.errors import ParameterError
from forethought.saved_file import save_text
from forethought.scaffolding.settings import POSITIVE_INT, validated
from forethought.scaffolding.task import GenerationTask
from forethought.strict_json import read_json

PROBES = "probes"
"""Stands for the probes' own vote, where a method is named."""
_MOST_POLICIES = 10**6
Predictor = Literal["agreement", "score"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Which method answers a question, by its difficulty.

    Raises:
        ParameterError: there is not one method more than there are edges, or edges do not rise.
    """

    num_probes: int
    edges: tuple[float, ...]
    """Highest difficulty of each bin but the last."""
    methods: tuple[str, ...]
    """The method of each bin: ``"probes"``, or a method as in ``majority_vote@8``."""
    accuracy: float | None = None
    """On the calibration file; None: it is not known."""
    tokens: float | None = None
    """Tokens per question there, those of the probes included."""
    difficulty: Predictor = "agreement"
    """What it is predicted by: how the probes agree, or the scores of a reward controller."""

    def __post_init__(self) -> None:
        validated("num_probes", self.num_probes, POSITIVE_INT)
        rises = list(self.edges) == sorted({*self.edges})
        if len(self.methods) != len(self.edges) + 1 or not rises:
            raise ParameterError(
                "invalid policy",
                f"{len(self.edges)} edges {self.edges} and {len(self.methods)} methods",
                "Give rising edges, and one method more than edges",
            )

    def method(self, difficulty: float) -> str:
        """The method for a question of this difficulty, 0 to 1."""
        return self.methods[bisect_left(self.edges, difficulty)]

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        save_text(path, json.dumps(asdict(self), indent=2) + "\n", "policy")

    @classmethod
    def load(cls, source: Policy | Mapping[str, Any] | str | Path) -> Policy:
        """The policy itself, or the one of a mapping or of a JSON file; else raises
        ``ParameterError``.
        """
        try:
            if isinstance(source, str | Path):
                source = read_json(Path(source).read_text(encoding="utf-8"))
            return _POLICY.validate_python(source)
        except (OSError, ValueError, ValidationError) as error:
            if isinstance(error, ParameterError):
                raise
            raise ParameterError(
                "invalid policy", f"{source!r}: {error}", "Give what Policy.save has written"
            ) from error


_POLICY = TypeAdapter(Policy)


def score_difficulty(scores: Sequence[float], num_probes: int) -> float:
    """1 - the mean score of the probes; one that has not ended has none."""
    return 1.0 - sum(scores) / num_probes


def difficulty_of(pool: AnswerPool, num_probes: int) -> float:
    """1 - the share of the probes that give the most frequent answer."""
    votes = 0 if pool.winner is None else len(pool.winner.members)
    return 1.0 - votes / num_probes


def fit(
    journal: str | Path | Sequence[str | Path],
    max_tokens: float,
    *,
    num_probes: int = 4,
    num_bins: int = 5,
    probe: str = "plain",
    answer_space: AnswerSpace | str = "math",
    score: Callable[[Mapping[str, Any]], float] | None = None,
) -> Policy:
    """The most accurate policy on a calibration file, within a limit of tokens.

    Args:
        journal: of an evaluation with ``num_probes`` or more samples per problem, or several, on
            the same problems; the first attempts with ``probe`` are its probes, those of the first
            journal that has them.
        max_tokens: decoded tokens per question on average, those of the probes included.
        num_probes: probes per question.
        num_bins: bins of difficulty; fewer, where many questions are equally difficult.
        probe: the method whose attempts are the probes.
        answer_space: as of the controller that takes the policy.
        score: what the reward controller will give a probe, from 0 to 1, by its record in the
            journal: of an exact checker, ``lambda attempt: attempt["correct"]``. None: difficulty
            is predicted by agreement.

    Raises:
        ParameterError: the file has no probes of some problem, a method was not run on all of them,
            or the probes alone take more than ``max_tokens``.
    """
    journals = [journal] if isinstance(journal, str | Path) else journal
    attempts = _distinct([attempt for path in journals for attempt in _attempts(path)])
    predict = _by_agreement(answer_spaces.answer_space(answer_space))
    if score is not None:
        predict = _by_score(score)
    questions = _questions(attempts, probe, num_probes, predict)
    ordered = sorted(question.difficulty for question in questions)
    cuts = {ordered[len(ordered) * n // num_bins - 1] for n in range(1, num_bins)}
    edges = tuple(sorted(cuts - {ordered[-1]}))
    bins = [list[_Question]() for _ in range(len(edges) + 1)]
    for question in questions:
        bins[bisect_left(edges, question.difficulty)].append(question)
    correct, tokens, chosen = _best_choice(bins, max_tokens * len(questions))
    count = len(questions)
    predictor: Predictor = "agreement" if score is None else "score"
    return Policy(num_probes, edges, chosen, correct / count, tokens / count, predictor)


@dataclass(frozen=True, slots=True)
class _Question:
    difficulty: float
    outcomes: Mapping[str, tuple[float, float]]
    """Method -> (share of right attempts, tokens); those of the probes are in all of the tokens."""


_Predict = Callable[[Sequence[Mapping[str, Any]]], tuple[int, float]]
"""Attempts with the probes -> which of them is the answer, and the difficulty."""


def _attempts(path: str | Path) -> list[dict[str, Any]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        records = [json.loads(line) for line in lines if line.strip()]
        attempts = [record["attempt"] for record in records if "attempt" in record]
        for attempt in attempts:
            _key(attempt)
        return attempts
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ParameterError(
            "the calibration file cannot be read",
            f"{path}: {error}",
            "Give the journal that forethought eval has written",
        ) from error


def _distinct(attempts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    first: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for attempt in attempts:
        first.setdefault(_key(attempt), attempt)
    return list(first.values())


def _key(attempt: Mapping[str, Any]) -> tuple[Any, ...]:
    return attempt["number"], attempt["method"], attempt["sample"]


def _questions(
    attempts: Sequence[Mapping[str, Any]], probe: str, num_probes: int, predict: _Predict
) -> list[_Question]:
    """The questions of a journal; raises if one has too few probes, or lacks a method."""
    by_number: dict[int, dict[str, list[Mapping[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for attempt in sorted(attempts, key=lambda attempt: attempt["sample"]):
        by_number[attempt["number"]][attempt["method"]].append(attempt)
    names = {name for by_method in by_number.values() for name in by_method} - {probe}
    for number, by_method in by_number.items():
        missing = sorted(names - by_method.keys())
        if len(by_method[probe]) < num_probes or missing:
            raise ParameterError(
                f"problem {number} of the calibration file is not complete",
                f"{len(by_method[probe])} attempts with {probe!r}, and none with {missing}",
                f"Evaluate all methods, and {probe!r} with {num_probes} samples per problem",
            )
    if not by_number:
        raise ParameterError("the calibration file is empty", "no attempts", "Run forethought eval")
    return [_question(by, by[probe][:num_probes], probe, predict) for by in by_number.values()]


def _by_agreement(space: AnswerSpace) -> _Predict:
    """The most frequent answer of the probes, and the difficulty."""

    def predict(probes: Sequence[Mapping[str, Any]]) -> tuple[int, float]:
        pool = AnswerPool(space.equivalence)
        for number, attempt in enumerate(probes):
            task = GenerationTask()
            task.output_str = attempt["text"]
            answer = space.answer_of(task)
            if answer is not None:
                pool.add(number, answer)
        first = 0 if pool.winner is None else pool.winner.first
        return first, difficulty_of(pool, len(probes))

    return predict


def _by_score(score: Callable[[Mapping[str, Any]], float]) -> _Predict:
    """The probe with the highest score, and the difficulty."""

    def predict(probes: Sequence[Mapping[str, Any]]) -> tuple[int, float]:
        scores = [float(score(probe)) for probe in probes]
        best = max(range(len(scores)), key=scores.__getitem__)
        return best, score_difficulty(scores, len(probes))

    return predict


def _question(
    by_method: Mapping[str, Sequence[Mapping[str, Any]]],
    probes: Sequence[Mapping[str, Any]],
    probe: str,
    predict: _Predict,
) -> _Question:
    chosen, difficulty = predict(probes)
    cost = float(sum(attempt["tokens"]["decoded"] for attempt in probes))
    outcomes = {PROBES: (float(probes[chosen]["correct"]), cost)}
    for name, attempts in by_method.items():
        if name != probe:
            right = sum(attempt["correct"] for attempt in attempts) / len(attempts)
            tokens = sum(attempt["tokens"]["decoded"] for attempt in attempts) / len(attempts)
            outcomes[name] = right, cost + tokens
    return _Question(difficulty, outcomes)


def _best_choice(
    bins: Sequence[Sequence[_Question]], max_tokens: float
) -> tuple[float, float, tuple[str, ...]]:
    """The methods of the bins with the most right answers within the tokens, fewer tokens first.

    Returns:
        Right answers, tokens, and the method of each bin.
    """
    names = sorted(bins[0][0].outcomes)
    if len(names) ** len(bins) > _MOST_POLICIES:
        raise ParameterError(
            "there are too many policies to compare",
            f"{len(names)} methods in {len(bins)} bins",
            "Give fewer methods or bins",
        )
    totals = [
        {
            name: tuple(sum(q.outcomes[name][part] for q in questions) for part in (0, 1))
            for name in names
        }
        for questions in bins
    ]
    best: tuple[float, float, tuple[str, ...]] | None = None
    for choice in itertools.product(names, repeat=len(bins)):
        right, tokens = (sum(t[n][p] for t, n in zip(totals, choice, strict=True)) for p in (0, 1))
        if tokens <= max_tokens and (best is None or (right, -tokens) > (best[0], -best[1])):
            best = right, tokens, choice
    if best is None:
        raise ParameterError(
            "no policy is within max_tokens",
            "the probes alone take more tokens per question",
            "Raise max_tokens, or lower num_probes",
        )
    return best
