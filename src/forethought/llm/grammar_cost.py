"""What a grammar may cost to compile: what is refused, and what is tried first.

llguidance has limits of its own, some of which it counts only when most of the work is done.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from forethought.config.guided import GuidedDecodingParams

MAX_INTERSECTIONS = 16
"""Uses of ``&`` in one definition of a grammar. The time to compile doubles with each."""
MANY_PATTERNS = 8
"""Of a schema that is tried first. Those that one string has to match are intersected."""
MANY_PARTS = 500
"""Parts that may be empty, of an expression or a terminal, above which it is tried first. The time
to compile grows with the square of how many follow each other."""
MAX_ENUM_VALUES = 50_000
"""Objects, lists and what they hold in ``enum`` and ``const`` of a schema; each is a symbol of
llguidance, which has 65,534."""
MAX_ROW_ITEMS = 2_000
"""Alternatives that a grammar may have open at once. The time for a mask grows with them, and masks
are computed between the steps of all requests. A choice, and an enum of strings, count as one."""

_OPTIONAL = re.compile(r"[*?{|]")
"""What a part that may be empty has at least one of."""
_TERMINAL = re.compile(r"(?<![\w-])[A-Z_][A-Z0-9_]*(?![\w-])")
"""The name of a terminal."""
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')
"""Strings, comments and regular expressions of Lark's notation."""
_DEFINITION = re.compile(
    r"^[ \t]*[?!]?(?P<name>[A-Za-z_][\w-]*)(?:\[[^\]]*\])?(?:\.-?\d+)?[ \t]*:", re.MULTILINE
)
_INTERSECTION = re.compile(r"&(?!\s*~)")


def check_intersections(grammar: str) -> None:
    """Raises ValueError if a definition has too many ``&``: these take too long to compile. A
    negation, ``& ~``, costs little.
    """
    for definition in _DEFINITION.split(_LITERAL.sub(" ", grammar)):
        count = len(_INTERSECTION.findall(definition))
        if count > MAX_INTERSECTIONS:
            raise ValueError(
                f"a definition has {count} intersections (&), and at most {MAX_INTERSECTIONS} can "
                "be compiled"
            )


def check_enums(schema: Any) -> None:
    """Raises ValueError if ``enum`` and ``const`` have more objects and lists, or these hold more
    values, than can be compiled.
    """
    num_values, rest = 0, [(schema, False)]
    while rest:
        part, is_value = rest.pop()
        if isinstance(part, list):
            rest += [(item, is_value) for item in part]
        elif isinstance(part, dict):
            for word, item in part.items():
                values = item if word == "enum" and isinstance(item, list) else [item]
                in_value = is_value or word in ("enum", "const")
                _check_alternatives(values if in_value else [])
                rest += [(value, in_value) for value in values]
        if is_value and isinstance(part, dict | list):
            num_values += 1 + len(part)
    if num_values > MAX_ENUM_VALUES:
        raise ValueError(
            f"objects and lists in enum and const hold {num_values:,} values, and at most "
            f"{MAX_ENUM_VALUES:,} can be compiled"
        )


def _check_alternatives(values: Sequence[Any]) -> None:
    count = sum(isinstance(value, dict | list) for value in values)
    if count > MAX_ROW_ITEMS:
        raise ValueError(f"an enum has {count:,} objects and lists; max is {MAX_ROW_ITEMS}")


def may_take_for_ever(shape: GuidedDecodingParams, grammar: str) -> bool:
    """Whether it has what llguidance's own limits do not bound: an automaton of all remainders of
    ``multipleOf``, and those of intersected expressions, of all combinations of their states; names
    of properties, each of whose patterns it compares with each other; and many parts in a row that
    may be empty, each of which it looks at from each before it.
    """
    if shape.grammar is not None:  # a negated alternative of negations is an intersection, too
        signs = ("&", "~", "%json", "%regex")
        return any(sign in grammar for sign in signs) or _num_parts(grammar) > MANY_PARTS
    if shape.regex is not None:
        return len(_OPTIONAL.findall(shape.regex)) > MANY_PARTS
    if shape.choice is not None:
        return False
    num_patterns = grammar.count('"pattern"')
    return (
        any(word in grammar for word in ('"multipleOf"', '"patternProperties"'))
        or num_patterns >= MANY_PATTERNS
        or (num_patterns > 0 and len(_OPTIONAL.findall(grammar)) > MANY_PARTS)
    )


def _num_parts(grammar: str) -> float:
    """Literals of a grammar and their parts that may be empty, with those of the terminals that a
    definition names in their places: terminals of which each names the one before twice double
    them. Infinite if terminals name themselves.
    """
    starts = [*_DEFINITION.finditer(grammar)]
    ends = [*(start.start() for start in starts[1:]), len(grammar)]
    num_parts, names = dict[str, float](), dict[str, list[str]]()
    for start, end in zip(starts, ends, strict=True):
        body = grammar[start.end() : end]
        num_parts[start["name"]] = len(_LITERAL.findall(body)) + len(_OPTIONAL.findall(body))
        names[start["name"]] = _TERMINAL.findall(_LITERAL.sub(" ", body))
    try:
        order = [*TopologicalSorter(names).static_order()]
    except CycleError:
        return math.inf
    for name in order:
        named = [num_parts.get(terminal, 0.0) for terminal in names.get(name, ())]
        num_parts[name] = num_parts.get(name, 0.0) + sum(named)
    return sum(num_parts.values())
