"""Which answers mean the same: ``1/2``, ``0.5`` and ``\frac{1}{2}`` do.

Answers of one canonical form do (``canonical_form``). That makes classes, whatever is compared with
what and in which order. A function of two answers may take its place; ``AnswerClasses`` says what
classes it makes.

Also here: pooling the answers of samples for a vote. ``answer_extraction`` finds them in texts.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import math
import re
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from forethought.answers import canonical_form as forms
from forethought.answers.answer_extraction import (
    extract_answer_from_boxed as extract_answer_from_boxed,
)
from forethought.answers.answer_extraction import (
    extract_answer_with_regex as extract_answer_with_regex,
)
from forethought.answers.sympy_pool import Forms, SympyPool
from forethought.answers.sympy_process import STEPS_PER_SECOND
from forethought.errors import DependencyError, EngineStopped, ForethoughtError, ParameterError
from forethought.scaffolding.base_task import ComputeTask
from forethought.scaffolding.execution_scope import current_scope

_logger = logging.getLogger(__name__)


@runtime_checkable
class Equivalence(Protocol):
    """Decides which answers mean the same, by a key."""

    def canonical_form(self, answer: str) -> Hashable:
        """A key that is equal for two answers if, and only if, they mean the same. May be slow."""


PairwiseEquivalence = Callable[[str, str], bool]
"""Whether two answers mean the same, for instance by asking a model. May take a while."""


@dataclass(frozen=True)
class TextEquivalence:
    """Answers are the same if their texts are, but for spaces around them."""

    def canonical_form(self, answer: str) -> Hashable:
        """The text without spaces around it."""
        return answer.strip()


@dataclass(frozen=True)
class MathEquivalence:
    """Answers are the same if they are mathematically equal, in the sense of ``canonical_form``.

    Exact arithmetic, polynomials, words, and lists, sets and intervals of them take no process.
    Other formulas are evaluated by sympy in one: in a request that of the ``ScaffoldingLlm``,
    elsewhere one for the call.

    Args:
        time_limit: work for one formula, in nominal seconds of a million steps (calls and returns
            of functions) each. Steps are counted, so neither the clock nor what else runs on the
            machine changes a form. A formula that takes more is compared as text.

    Raises:
        ParameterError: ``time_limit`` is no number above zero.
    """

    time_limit: float = 3.0

    def __post_init__(self) -> None:
        seconds = self.time_limit
        if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ParameterError(
                "invalid time_limit", f"got {seconds!r}", "Give a number of seconds above zero"
            )

    @property
    def steps(self) -> int:
        """Steps of work for one formula."""
        return math.ceil(self.time_limit * STEPS_PER_SECOND)

    def canonical_form(self, answer: str) -> Hashable:
        """The form of ``answer``; slow if there is a formula in it, which needs ``math-verify``."""
        classes = AnswerClasses(self)
        classes.find([answer])
        return classes.of(answer)

    def __call__(self, one: str, other: str) -> bool:
        """Whether two answers have the same form; raises as ``canonical_form`` does."""
        classes = AnswerClasses(self)
        classes.find([one, other])
        return classes.of(one) == classes.of(other)


def checked_equivalence(value: Any) -> Equivalence | PairwiseEquivalence:
    """``value`` if it decides which answers mean the same; None: mathematical equality.

    Raises:
        ParameterError: it has no method ``canonical_form``, and is no function of two answers.
    """
    if value is None:
        return MathEquivalence()
    by_key = callable(getattr(value, "canonical_form", None))
    if isinstance(value, type) or not (by_key or callable(value)):
        raise ParameterError(
            "invalid equivalence",
            f"got {value!r}",
            "Give a function of two answers, or an object with a method canonical_form(answer)",
        )
    decides = value.canonical_form if by_key else value
    call = getattr(type(decides), "__call__", None)  # noqa: B004  # that of an object
    if inspect.iscoroutinefunction(decides) or inspect.iscoroutinefunction(call):
        raise ParameterError(
            "invalid equivalence", f"got {value!r}", "It runs in a thread: give a plain function"
        )
    rule: Equivalence | PairwiseEquivalence = value
    return rule


class AnswerClasses:
    """The classes of the answers of one vote, or of one chain of thought.

    A class is identified by something hashable, equal for the answers in it: their canonical form.
    Where a function of two answers decides, that need not be transitive: an answer joins the
    earliest class whose first answer it equals, by ``function(first, answer)``, or else makes a new
    one. So the classes are a function of the answers in the order in which they are looked up.

    Args:
        equivalence: decides which answers mean the same; by default equal text does.
        pool: evaluates formulas; None: that of the request, or one for as long as it is used.

    Attributes:
        in_order: whether the classes depend on the order in which answers are looked up.
    """

    def __init__(
        self,
        equivalence: Equivalence | PairwiseEquivalence | None = None,
        pool: SympyPool | None = None,
    ) -> None:
        self._equivalence, self._own_pool = equivalence or TextEquivalence(), pool
        self.in_order = not isinstance(self._equivalence, Equivalence)
        self._known: dict[str, Hashable] = {}
        self._firsts: list[str] = []
        self._unfinished: dict[str, forms.Form] = {}
        self._uncompared: set[str] = set()

    def of(self, answer: str) -> Hashable:
        """The class of an answer that is not among the ``unknown``."""
        return self._known[answer]

    def is_uncompared(self, answer: str) -> bool:
        """Whether ``answer`` has a formula that took too much work and is compared as text."""
        return answer in self._uncompared

    def unknown(self, answers: Sequence[str]) -> list[str]:
        """The answers whose classes ``find`` has to compute first; each once."""
        return [answer for answer in dict.fromkeys(answers) if not self._is_quick(answer)]

    def find(self, answers: Sequence[str]) -> None:
        """Compute the classes of ``answers``. Slow: not for an event loop."""
        unknown = self.unknown(answers)
        if unknown and self._math is not None:
            with self._pool() as pool:
                try:
                    result = self._working_out(unknown, pool, self._math).result()
                except ForethoughtError as error:
                    result = self._not_worked_out(unknown, error)
                self._complete(unknown, result)
        else:
            for answer in unknown:
                self._known[answer] = self._class(answer)

    def finding(self, answers: Sequence[str]) -> list[ComputeTask]:
        """``find`` for a controller: the tasks that it has to yield first, if any."""
        unknown = self.unknown(answers)
        if not unknown:
            return []
        shared = self._math is not None and _shared_pool() is not None
        return [ComputeTask(self._find_formulas if shared else self.find, unknown)]

    # ---- canonical forms ------------------------------------------------------------------------

    def _is_quick(self, answer: str) -> bool:
        """Whether the class of ``answer`` is known, or takes no time to compute."""
        if answer in self._known:
            return True
        if type(self._equivalence) is TextEquivalence:
            self._known[answer] = answer.strip()
        elif self._math is not None:
            if answer in self._unfinished:
                return False
            form = forms.canonical_form(answer)
            if any(forms.formulas(form)):
                self._unfinished[answer] = form
                return False
            self._set(answer, form)
        return answer in self._known

    @property
    def _math(self) -> MathEquivalence | None:
        """The equivalence, if formulas are evaluated."""
        rule = self._equivalence
        return rule if type(rule) is MathEquivalence else None

    def _working_out(
        self, answers: Sequence[str], pool: SympyPool, rule: MathEquivalence
    ) -> Future[Forms]:
        return pool.forms(self._formulas(answers), rule.steps)

    def _formulas(self, answers: Iterable[str]) -> list[str]:
        """The formulas in unknown answers, each once."""
        texts = (sorted(forms.formulas(self._unfinished[answer])) for answer in answers)
        return list(dict.fromkeys(itertools.chain.from_iterable(texts)))

    def _not_worked_out(self, answers: Iterable[str], error: ForethoughtError) -> Forms:
        """The forms of the formulas where no process can be started; raises other errors."""
        if isinstance(error, DependencyError | EngineStopped):
            raise error
        _logger.warning("formulas are compared as text: %s", error)
        return Forms({}, frozenset(self._formulas(answers)))

    async def _find_formulas(self, answers: Sequence[str]) -> None:
        """``find`` on the event loop of a request, and cancelled with it."""
        assert self._math is not None, "other equivalences have no formulas"
        with self._pool() as pool:
            try:
                result = await asyncio.wrap_future(self._working_out(answers, pool, self._math))
            except ForethoughtError as error:
                result = self._not_worked_out(answers, error)
            self._complete(answers, result)

    def _complete(self, answers: Sequence[str], result: Forms) -> None:
        values = {text: forms.uncompared(text) for text in result.uncompared} | dict(
            result.by_formula
        )
        for answer in answers:
            self._set(answer, forms.completed(self._unfinished.pop(answer), values))

    def _set(self, answer: str, form: Hashable) -> None:
        self._known[answer] = form
        if forms.is_uncompared(form):
            self._uncompared.add(answer)

    def _pool(self) -> AbstractContextManager[SympyPool]:
        shared = self._own_pool or _shared_pool()
        return SympyPool() if shared is None else nullcontext(shared)

    # ---- functions of users ---------------------------------------------------------------------

    def _class(self, answer: str) -> Hashable:
        if isinstance(self._equivalence, Equivalence):
            return self._equivalence.canonical_form(answer)
        for number, first in enumerate(self._firsts):
            if self._equivalence(first, answer):
                return number
        self._firsts.append(answer)
        return len(self._firsts) - 1


def _shared_pool() -> SympyPool | None:
    scope = current_scope()
    if scope is None or scope.resources is None:
        return None
    return scope.resources.get(SympyPool)


_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(slots=True)
class Group:
    """Samples whose answers mean the same."""

    answer: str
    """As the sample with the lowest number wrote it."""
    members: list[int] = field(default_factory=list)
    """Numbers of the samples, in the order in which they came."""

    @property
    def first(self) -> int:
        """The lowest number of its samples."""
        return min(self.members)


class AnswerPool:
    """Votes, pooled by what the answers mean.

    The largest group wins; of two that are equally large, the one that holds the sample with the
    lowest number: the first seen, whatever the order in which samples finish.

    Args:
        equivalence: decides which answers mean the same, see ``AnswerClasses``; by default equal
            text does.

    Attributes:
        classes: of the answers.
        groups: by class, in the order in which they came.
    """

    def __init__(self, equivalence: Equivalence | PairwiseEquivalence | None = None) -> None:
        self.classes = AnswerClasses(equivalence)
        self.groups: dict[Hashable, Group] = {}
        self._uncompared: dict[int, bool] = {}

    def add(self, number: int, answer: str) -> Group:
        """Count the vote of sample ``number``; returns the group that it joins.

        Slow if the class of ``answer`` is still ``unknown``.
        """
        self.classes.find([answer])
        group = self.groups.setdefault(self.classes.of(answer), Group(answer))
        if group.members and number < group.first:
            group.answer = answer
        group.members.append(number)
        self._uncompared[number] = self.classes.is_uncompared(answer)
        return group

    def adding(self, votes: Mapping[int, str | None]) -> Generator[Any, Any, None]:
        """``add`` for a controller, which does ``yield from`` it.

        Args:
            votes: answers by the numbers of their samples; None: the sample does not vote.
        """
        answers = {number: answer for number, answer in votes.items() if answer is not None}
        finding = self.classes.finding(list(answers.values()))
        if finding:
            yield finding
        for number, answer in answers.items():
            self.add(number, answer)

    def adding_in_order(
        self, votes: dict[int, str | None], pending: Collection[int]
    ) -> Generator[Any, Any, dict[int, str | None]]:
        """``adding`` of the votes that can be counted by now, which are taken out of ``votes``.

        Where the classes depend on the order of the answers, a vote waits for those before it.

        Args:
            votes: answers by the numbers of their samples, in any order.
            pending: numbers of the samples whose votes may still come.

        Returns:
            The counted votes, in the order of the numbers.
        """
        last = min(pending) if pending and self.classes.in_order else math.inf
        counted = {number: votes[number] for number in sorted(votes) if number < last}
        yield from self.adding(counted)
        for number in counted:
            del votes[number]
        return counted

    def heaviest(self, weights: Mapping[int, float]) -> tuple[Group | None, float]:
        """The group whose members have the largest sum of weights; ties as for ``winner``.

        Args:
            weights: by number of the sample, not negative; samples that are missing weigh 0.

        Returns:
            The group, and its share of all weight; ``(None, 0.0)`` where no member has a weight.
        """
        totals = [
            (math.fsum(weights.get(number, 0.0) for number in group.members), group)
            for group in self.groups.values()
            if any(number in weights for number in group.members)
        ]
        if not totals:
            return None, 0.0
        weight, group = min(totals, key=lambda total: (-total[0], total[1].first))
        total = math.fsum(weight for weight, _ in totals)
        return group, weight / total if total > 0 else 1.0 / len(totals)

    @property
    def winner(self) -> Group | None:
        """The winning group so far; None without votes."""
        return min(self.groups.values(), key=lambda g: (-len(g.members), g.first), default=None)

    @property
    def tally(self) -> dict[str, int]:
        """The number of votes by answer, the largest first."""
        groups = sorted(self.groups.values(), key=lambda g: (-len(g.members), g.first))
        return {group.answer: len(group.members) for group in groups}

    @property
    def num_voters(self) -> int:
        """Samples that have an answer."""
        return sum(len(group.members) for group in self.groups.values())

    @property
    def num_uncompared(self) -> int:
        """Votes with a formula that took too much work, and is compared as text."""
        return sum(self._uncompared.values())

    def info(self, rule: str | None = None) -> dict[str, Any]:
        """The details of the vote for a result; a vote without voters is logged, too.

        Args:
            rule: that extracted the answer of the winning sample.
        """
        info = {
            "answer": None if self.winner is None else self.winner.answer,
            "answer_rule": rule,
            "num_voters": self.num_voters,
            "num_uncompared": self.num_uncompared,
        }
        warning = ""
        if self.winner is None:
            warning = "no sample has an answer, so there was no vote"
        elif self.num_uncompared:
            warning = f"{self.num_uncompared} answers take too much work and are compared as text"
        if warning:
            info["warning"] = warning
            _logger.warning("%s", warning)
        return info

    @property
    def lead_probability(self) -> float:
        """Probability that the largest group leads the second in the long run.

        See ``lead_probability``; 0.5 without votes.
        """
        sizes = sorted((len(group.members) for group in self.groups.values()), reverse=True)
        return lead_probability(*[*sizes, 0, 0][:2])

    def decided(self, pending: Iterable[int]) -> bool:
        """Whether no votes of the ``pending`` samples can make another group win.

        Exact in both directions. A rival does best if all pending votes go to it::

            |rival| + |pending| > |winner|                                         it overtakes
            |rival| + |pending| = |winner| and min(rival, pending) < first(winner) it wins the tie
        """
        outstanding, winner = list(pending), self.winner
        if not outstanding:
            return True
        if winner is None:
            return False
        rivals = [group.members for group in self.groups.values() if group is not winner]
        for members in [*rivals, []]:  # the empty one: an answer that no sample has given yet
            max_votes = len(members) + len(outstanding)
            if max_votes > len(winner.members):
                return False
            if max_votes == len(winner.members) and min([*members, *outstanding]) < winner.first:
                return False
        return True


def lead_probability(votes: int, others: int) -> float:
    """Probability that an answer is given more often than another one, by their votes so far.

    Of samples that give one of the two, a share p gives the first. With a uniform prior its
    posterior is Beta(votes + 1, others + 1), and the probability is that of p > 1/2::

        P = sum over j = 0 .. votes of C(n, j) / 2^n        n = votes + others + 1

    Adaptive consistency (Aggarwal et al. 2023, arXiv 2305.11860) stops at 0.95.
    """
    n = votes + others + 1
    favourable: int = sum(math.comb(n, j) for j in range(votes + 1))
    return favourable / (1 << n)


class Agreement:
    """Dynasor's certainty: how many answers in a row mean the same.

    Args:
        needed: number of equal answers in a row.
        uncertain_words: an answer that has one of them, as a word, does not count.
        equivalence: decides which answers mean the same, see ``AnswerClasses``.

    Attributes:
        answers: all so far, in order.
        count: length of the present run.
    """

    def __init__(
        self,
        needed: int,
        uncertain_words: Sequence[str],
        equivalence: Equivalence | PairwiseEquivalence,
    ) -> None:
        self.needed, self.count, self.answers = needed, 0, list[str]()
        self._classes = AnswerClasses(equivalence)
        self._class: Hashable = None
        words = "|".join(re.escape(word.lower()) for word in uncertain_words)
        # A word that begins or ends with a sign needs no border there.
        pattern = rf"(?:(?<!\w)|(?!\w))(?:{words})(?:(?<!\w)|(?!\w))"
        self._uncertain = re.compile(pattern) if words else None

    @property
    def reached(self) -> bool:
        """Whether the run is long enough."""
        return self.count >= self.needed

    def add(self, answer: str) -> Generator[Any, Any, None]:
        """Count the next answer; a generator, as the comparison may be slow."""
        self.answers.append(answer)
        if not self._counts(answer):
            self.count = 0
            return
        finding = self._classes.finding([answer])
        if finding:
            yield finding
        answer_class = self._classes.of(answer)
        self.count = self.count + 1 if answer_class == self._class else 1
        self._class = answer_class

    def _counts(self, answer: str) -> bool:
        uncertain = self._uncertain is not None and self._uncertain.search(answer.lower())
        return bool(answer) and not uncertain


def get_majority_result(
    results: Sequence[str],
    result_extractor: Callable[[str], str | None] = lambda result: result,
    result_validator: Callable[[str], bool] = lambda result: True,
) -> tuple[int | None, str | None]:
    """The most common answer, and the index of the first result that gives it.

    Args:
        results: texts.
        result_extractor: extracts the answer of a text; None: it has none.
        result_validator: whether an answer may vote.

    Returns:
        ``(index, answer)``; ``(None, None)`` if nothing voted. Ties go to the earliest.
    """
    pool = AnswerPool()
    for index, result in enumerate(results):
        answer = result_extractor(result)
        if answer is not None and result_validator(answer):
            pool.add(index, answer)
    winner = pool.winner
    return (None, None) if winner is None else (winner.first, winner.answer)


def get_digit_majority_vote_result(results: Sequence[str]) -> tuple[int, str | None]:
    r"""Vote over texts that end in ``\boxed{...}``; only whole numbers count.

    Returns:
        ``(index, answer)`` of the first text that gives the winning answer, ``(0, None)`` if no
        text has a whole number in its box.
    """
    index, answer = get_majority_result(
        results, extract_answer_from_boxed, lambda answer: bool(_INTEGER.fullmatch(answer))
    )
    return (0, None) if index is None else (index, answer)
