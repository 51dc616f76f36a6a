"""Markdown and formulas as trees, in which no text of a model becomes an element that acts."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from forethought.server.markdown import MAX_CHARACTERS, Node, blocks, tree


def tags(nodes: list[Node]) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, dict):
            names |= {node["tag"], *tags(node.get("children", []))}
    return names


def text_of(nodes: list[Node]) -> str:
    parts = (n if isinstance(n, str) else text_of(n.get("children", [])) for n in nodes)
    return "".join(parts)


def paragraph(text: str) -> list[Any]:
    (node,) = tree(text)
    assert isinstance(node, dict)
    assert node["tag"] == "p"
    children: list[Any] = node["children"]
    return children


@pytest.mark.parametrize(
    ("text", "display"),
    [
        (r"so \( x^2 \) it is", "inline"),
        (r"so \[ x^2 \] it is", "block"),
        (r"so $x^2$ it is", "inline"),
        (r"so $$x^2$$ it is", "block"),
        (r"so \boxed{x^2} it is", "inline"),
        (r"so \boxed{\frac{1}{x^2}} it is", "inline"),
    ],
)
def test_a_formula_within_a_text_is_mathml(text: str, display: str) -> None:
    before, formula, after = paragraph(text)
    assert (before, after) == ("so ", " it is")
    assert formula["tag"] == "math"
    assert formula["attrs"]["display"] == display
    assert "msup" in tags([formula])


@pytest.mark.parametrize("text", ["\\[\nx = 3\n\\]", "\\[ x = 3 \\]", "$$\nx = 3\n$$"])
def test_a_formula_of_its_own_is_a_block(text: str) -> None:
    for around in (f"{text}", f"before\n{text}\nafter"):
        assert '"display": "block"' in json.dumps(tree(around))
        assert "math" in tags(tree(around))


def test_what_is_no_formula_stays_as_it_is() -> None:
    assert text_of(tree("it costs $5 and $10")) == "it costs $5 and $10"
    assert text_of(tree(r"a \( b")) == "a ( b"
    assert tree("\\[ \\unknown{ \\]") == [{"tag": "code", "children": ["\\unknown{"]}]
    assert tags(tree(rf"\({'x' * 3000}\)")) == {"p"}


def test_markdown_becomes_elements() -> None:
    table = "| d | e |\n|-|-|\n| 1 | 2 |"
    text = f"# One\n\n* a\n* **b**\n\n> c\n\n{table}\n\n3. f\n\n~~g~~ `h` *i*\n\n---"
    nodes = tree(text)
    known = {"h1", "ul", "li", "p", "strong", "blockquote", "table", "thead", "tbody", "tr"}
    assert tags(nodes) == known | {"th", "td", "ol", "s", "code", "em", "hr"}
    numbered = [node for node in nodes if isinstance(node, dict) and node["tag"] == "ol"]
    assert [node["attrs"] for node in numbered] == [{"start": "3"}]
    (code,) = tree("```text extra\nprint(1)\n```")
    assert code == {"tag": "pre", "attrs": {"language": "text"}, "children": ["print(1)"]}


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "a <img src=x onerror=alert(1)> b",
        "[x](javascript:alert(1))",
        "![x](data:text/html,hi)",
        r"\( \text{<script>} \)",
        r"\( \href{javascript:alert(1)}{x} \)",
    ],
)
def test_nothing_that_acts_gets_through(text: str) -> None:
    nodes = tree(text)
    assert not tags(nodes) & {"script", "img", "a", "iframe", "style"}
    assert "href" not in json.dumps([node for node in nodes if node != text])


SEVERAL = """# Title

A paragraph
of two lines, \\( x^2 \\).

* a list

  with a paragraph
* and an item

\\[ y =
z \\]

```python
print(1)

print(2)
```
$$
w
$$
> quoted

| a | b |
| - | - |
| 1 | 2 |

The end.
"""


def test_a_text_is_read_to_the_same_nodes_from_the_line_of_any_of_its_blocks() -> None:
    nodes, lines = blocks(SEVERAL)
    assert len(nodes) == len(lines) == 9
    assert nodes == tree(SEVERAL)
    rows = SEVERAL.splitlines(keepends=True)
    for number, line in enumerate(lines):
        assert tree("".join(rows[line:])) == nodes[number:]
        assert tree("".join(rows[:line])) == nodes[:number]


def test_a_picture_is_a_link_and_links_lead_to_the_web() -> None:
    (link,) = paragraph("![a picture](https://a.example/b.png)")
    assert link == {
        "tag": "a",
        "attrs": {"href": "https://a.example/b.png"},
        "children": ["a picture"],
    }


@pytest.mark.parametrize(
    "piece",
    ["[", "*", "\\(", "\\[", "\\boxed{", "$", "`", "> ", "- ", "![](", "|a", "\\(x\\) ", "_a"],
)
def test_hostile_texts_take_no_longer_than_others(piece: str) -> None:
    """Processor time of the longest text that is taken; a formula of 7 characters takes 75 us."""
    text = (piece * MAX_CHARACTERS)[:MAX_CHARACTERS]
    began = time.process_time()
    tree(text)
    assert time.process_time() - began < 5
