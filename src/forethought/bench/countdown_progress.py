"""How promising a search of the countdown model is, by the exact solver: an ideal process reward.

The score of a trace is that of its last line::

    9 - 4 = 5, left 7 3 5         .9 if the target can be made of what is left, else .05
    7 - 5 = 2, 3 * 2 = 6, back    the same of the moves that were not tried there
    back                          .3: the search begins again with all numbers
    3 * 5 = 15, 15 + 7 = 22, yes  .99 if that is the target, else .01
    the answer                    .99 if the exact checker accepts it, else .01

It knows what a learned reward model would have to guess, so a search by it says what the search
makes of a good reward, and nothing about how good rewards are.
"""

import re
from functools import lru_cache

from forethought.evaluation.generated.countdown import (
    BACK,
    FOUND,
    Numbers,
    moves,
    nearest,
    reachable,
)
from forethought.rewards.verifier import countdown, read_countdown

HIT, MISS = 0.99, 0.01
OPEN, CLOSED = 0.9, 0.05
AGAIN = 0.3

_LEFT = re.compile(r".* = \d+, left (\d+(?: \d+)*)")
_MOVE = re.compile(r"(\d+) [-+*/] (\d+) = (\d+)")
_VALUE = re.compile(r"= (\d+)")


def progress(question: str, text: str) -> float:
    """The score of an unfinished trace, in (0, 1).

    Raises:
        UsageError: the question does not name numbers and target.
    """
    numbers, target = read_countdown(question)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or lines[-1] == BACK:
        return AGAIN
    last = lines[-1]
    if last.endswith(FOUND) or last == "</think>":
        values = _VALUE.findall(lines[-2] if last == "</think>" and len(lines) > 1 else last)
        return HIT if values and int(values[-1]) == target else MISS
    if _LEFT.fullmatch(last) or last.endswith(BACK):
        return _state_score(numbers, target, lines)
    return HIT if countdown(question, text) else MISS


def _state_score(numbers: Numbers, target: int, lines: list[str]) -> float:
    """Whether the target can be made in the branch of the last line."""
    state, tried = numbers, set[Numbers]()
    for line in lines:
        if line == BACK:
            state, tried = numbers, set()
        elif match := _LEFT.fullmatch(line):
            state, tried = tuple(map(int, match[1].split())), set()
        elif line.endswith(BACK):
            tried.add(_tried(state, line))
    if state != numbers and not _follows(tuple(sorted(numbers)), tuple(sorted(state))):
        return CLOSED
    if not tried:
        return OPEN if target in reachable(state) else CLOSED
    return OPEN if _is_open(state, tried, target) else CLOSED


@lru_cache(maxsize=10_000)
def _follows(numbers: Numbers, state: Numbers) -> bool:
    """Whether one move leaves a state of the numbers; both sorted."""
    return any(tuple(sorted(remaining)) == state for _, remaining in moves(numbers))


def _tried(state: Numbers, line: str) -> Numbers:
    """What the first move of a line leaves of a state, sorted; empty if it is no move there."""
    first = _MOVE.match(line)
    if first is None:
        return ()
    one, other, value = map(int, first.groups())
    rest = list(state)
    for operand in (one, other):
        if operand not in rest:
            return ()
        rest.remove(operand)
    return tuple(sorted((*rest, value)))


def _is_open(state: Numbers, tried: set[Numbers], target: int) -> bool:
    """Whether a move that was not tried leads from three numbers to the target."""
    return any(
        len(remaining) == 2
        and tuple(sorted(remaining)) not in tried
        and nearest(remaining, target).value == target
        for _, remaining in moves(state)
    )
