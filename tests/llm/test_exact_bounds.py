"""Integers of schemas beyond 2**53, which llguidance reads as doubles."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from forethought.llm.exact_bounds import EXACT, with_exact_bounds

llguidance = pytest.importorskip("llguidance")
LARGEST = 2**63 - 1
TOKENIZER = llguidance.LLTokenizer("byte")


def accepts(schema: Any, text: str) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(with_exact_bounds(schema)))
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), (schema, matcher.get_error())
    ids = TOKENIZER.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def is_within(schema: dict[str, Any], value: int) -> bool:
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and schema.get("exclusiveMinimum", value - 1) < value
        and value < schema.get("exclusiveMaximum", value + 1)
    )


def drawn(draw: random.Random, kind: str | list[str] | None) -> dict[str, Any]:
    """A schema with large bounds of some size, apart enough for a double between them."""
    size = 2 ** draw.randrange(54, 63)
    first = draw.choice((-1, 1)) * draw.randrange(size // 2, size)
    second = min(first + draw.choice((2048, 2**20, 2**40)) + draw.randrange(2048), LARGEST)
    schema: dict[str, Any] = {
        draw.choice(("minimum", "exclusiveMinimum")): first,
        draw.choice(("maximum", "exclusiveMaximum")): second,
    }
    return schema if kind is None else {"type": kind, **schema}


@pytest.mark.parametrize("kind", ["integer", ["integer", "null"]])
def test_each_integer_that_can_be_written_is_within_the_bounds(kind: Any) -> None:
    draw = random.Random(7)
    for _ in range(60):
        schema = drawn(draw, kind)
        bounds = [value for value in schema.values() if isinstance(value, int)]
        near = [bound + step for bound in bounds for step in (-2, -1, 0, 1, 2, -1024, 1024, 2048)]
        for value in near:
            assert is_within(schema, value) or not accepts(schema, str(value)), (schema, value)
        middle = sum(bounds) // 2
        assert accepts(schema, str(middle)), (schema, middle)


def test_decimals_stay_within_large_bounds_too() -> None:
    draw = random.Random(8)
    for _ in range(60):
        first = draw.randrange(EXACT, 2**62)
        second = first * 3 // 2
        schema = {"type": "number", "minimum": first, "maximum": second}
        for bound in (first, second):
            for step in (-1500, -100, -1, 1, 100, 1500):
                value = bound + step
                assert is_within(schema, value) or not accepts(schema, str(value)), (schema, value)
        assert accepts(schema, str((first + second) // 2))


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "maximum": LARGEST}, [LARGEST, 0, -5], [LARGEST + 1]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 2**62], [-1, 2**64]),
        ({"type": "integer", "minimum": -(2**63), "maximum": LARGEST}, [0, -(2**62)], [2**63]),
        ({"type": "integer", "minimum": 2**60}, [2**60, 2**61], [2**60 - 1, 5]),
        ({"type": "integer", "exclusiveMaximum": 2**60}, [2**60 - 128, 0], [2**60, 2**60 - 1 + 2]),
        ({"type": "integer", "minimum": EXACT + 1, "maximum": EXACT + 3}, [EXACT + 2], [EXACT]),
        ({"type": "integer", "minimum": 3, "maximum": 10**30}, [3, 2**62], [2, -5]),
        ({"type": "integer", "minimum": -(10**400), "maximum": 5} | {"minimum": -1e300}, [5], [6]),
        ({"enum": [2**60, 1]}, [2**60, 1], [2**60 + 1]),
    ],
)
def test_ranges_of_usual_integers_are_kept(
    schema: Any, inside: list[int], outside: list[int]
) -> None:
    assert all(accepts(schema, str(value)) for value in inside)
    assert not any(accepts(schema, str(value)) for value in outside)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"const": EXACT + 1}, "const"),
        ({"properties": {"id": {"enum": [1, {"a": [2**64]}]}}}, "properties.id.enum"),
        ({"items": {"type": "integer", "minimum": 2**70}}, "items"),
        ({"anyOf": [{}, {"type": "integer", "maximum": -(2**70)}]}, "anyOf.1"),
        ({"$defs": {"x": {"type": "integer", "maximum": 10**400}}}, "maximum"),
        ({"type": "integer", "minimum": EXACT + 1, "maximum": EXACT + 1}, "the schema"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_its_path(schema: Any, path: str) -> None:
    with pytest.raises(ValueError, match=path.replace("$", r"\$")):
        with_exact_bounds(schema)


def test_names_of_properties_and_small_numbers_are_left_alone() -> None:
    schema = {
        "properties": {"minimum": {"type": "integer"}, "const": {"const": 1, "default": 2**80}},
        "maximum": 2**53 - 1,
    }
    assert with_exact_bounds(schema) == schema
    small = {"type": "integer", "minimum": 0.5, "maximum": 9}
    assert with_exact_bounds(small) is small
