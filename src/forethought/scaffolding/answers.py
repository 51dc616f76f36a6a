"""Answers in texts: find them, pool those that mean the same, vote."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from forethought.scaffolding.equivalence import AnswerClasses, Equivalence, PairwiseEquivalence

_BOX = re.compile(r"\\f?boxed\s*\{|\\boxed\s+(?=[^\s{])")
_INTEGER = re.compile(r"[+-]?\d+")
FINAL_ANSWER = r"The final answer is (.+)$"


def extract_answer_from_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}``; None if there is none or it is not closed."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    begin = boxes[-1].end()
    if text[begin - 1] != "{":  # \boxed 7
        return text[begin:].split("$")[0].split()[0]
    end = unpaired_brace(text, begin)
    return None if end is None else text[begin:end].strip()


def extract_answer_with_regex(text: str, pattern: str = FINAL_ANSWER) -> str | None:
    """The first group of the last match of ``pattern`` (lines apart); None without a match."""
    found = list(re.finditer(pattern, text, re.MULTILINE))
    return found[-1].group(1).strip() if found else None


def unpaired_brace(text: str, begin: int = 0) -> int | None:
    r"""Where the first ``}`` without its ``{`` stands; None if there is none. ``\}`` is text."""
    depth = 0
    position = begin
    while position < len(text):
        match text[position]:
            case "\\":
                position += 1
            case "{":
                depth += 1
            case "}":
                if depth == 0:
                    return position
                depth -= 1
        position += 1
    return None


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

    def add(self, number: int, answer: str) -> Group:
        """Count the vote of sample ``number``; the group that it joins.

        May take a while if the class of ``answer`` is ``unknown`` as yet.
        """
        self.classes.find([answer])
        group = self.groups.setdefault(self.classes.of(answer), Group(answer))
        if group.members and number < group.first:
            group.answer = answer
        group.members.append(number)
        return group

    @property
    def winner(self) -> Group | None:
        """The winning group so far; None without votes."""
        return min(self.groups.values(), key=lambda g: (-len(g.members), g.first), default=None)

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
        for members in [*rivals, []]:  # the empty one: an answer that nobody has given yet
            most = len(members) + len(outstanding)
            if most > len(winner.members):
                return False
            if most == len(winner.members) and min([*members, *outstanding]) < winner.first:
                return False
        return True


def get_majority_result(
    results: Sequence[str],
    result_extractor: Callable[[str], str | None] = lambda result: result,
    result_validator: Callable[[str], bool] = lambda result: True,
) -> tuple[int | None, str | None]:
    """The answer that most results give, and the first result that gives it.

    Args:
        results: texts.
        result_extractor: finds the answer in a text; None: it has none.
        result_validator: says which answers may vote.

    Returns:
        ``(index, answer)``; ``(None, None)`` if nothing voted. Ties go to the first seen.
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
