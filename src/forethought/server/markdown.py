"""Markdown and LaTeX of an answer as a tree, from which the page makes elements.

A node is a text, or a tag with attributes and children; the page knows which tags there are. HTML
in a text is text, images are links, links lead to http, https and mailto alone. Formulas, in
``\\( \\)``, ``\\[ \\]``, ``$ $`` and ``$$ $$``, become MathML, which needs no script; one that is
not understood stays as it was written. Code has spans with a ``kind`` (``code_colours``).
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import latex2mathml.converter
from markdown_it import MarkdownIt
from markdown_it.ruler import RuleOptionsType
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.tree import SyntaxTreeNode
from mdit_py_plugins.dollarmath import dollarmath_plugin

from forethought.server.code_colours import spans

MAX_CHARACTERS = 1 << 15
"""Of a text."""
_MAX_FORMULA, _MAX_BRACES = 1 << 11, 32
"""Characters of a formula, and braces within each other."""
_INLINE, _DISPLAYED = (
    re.compile(pattern, re.DOTALL) for pattern in (r"\\\((.*?)\\\)", r"\\\[(.*?)\\\]")
)
_BOXED = re.compile(r"(\\boxed\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})")
_ATTRIBUTES = {
    *("display", "mathvariant", "stretchy", "fence", "form", "separator", "accent", "accentunder"),
    *("linethickness", "displaystyle", "scriptlevel", "columnalign", "rowspacing", "notation"),
    *("columnspacing", "width", "height", "depth", "lspace", "rspace", "minsize", "maxsize"),
    *("movablelimits", "largeop", "symmetric"),
}
"""Of MathML; others, such as links, are left out."""
_SCHEMES = ("http://", "https://", "mailto:")
_MATHML = "{http://www.w3.org/1998/Math/MathML}"
_PLAIN = {"softbreak": "\n", "hardbreak": "\n"}

Node = str | dict[str, Any]
"""A text, or ``tag``, and where there are some ``attrs`` and ``children``."""


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    before: RuleOptionsType = {"alt": ["paragraph", "reference", "blockquote", "list"]}
    parser.block.ruler.before("fence", "formula", _formula_alone, before)
    parser.inline.ruler.before("escape", "formula", _formula_within)
    dollarmath_plugin(parser, allow_space=False, allow_digits=False, double_inline=True)
    return parser


def _formula_alone(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    """A formula in brackets that has lines of its own."""
    begin, text = state.bMarks[first] + state.tShift[first], state.src
    close = text.find("\\]", begin + 2, begin + _MAX_FORMULA)
    if not text.startswith("\\[", begin) or close < 0:
        return False
    last = first + text.count("\n", begin, close)
    if last >= end or text[close + 2 : state.eMarks[last]].strip():
        return False
    if not silent:
        token = state.push("math_block", "math", 0)
        token.content, token.map = text[begin + 2 : close], [first, last + 1]
        state.line = last + 1
    return True


def _formula_within(state: StateInline, silent: bool) -> bool:
    """Formulas within a paragraph: in brackets, and boxed answers without any."""
    rest = state.src[state.pos : state.pos + _MAX_FORMULA]
    match = _INLINE.match(rest) or _DISPLAYED.match(rest) or _BOXED.match(rest)
    if match is None:
        return False
    if not silent:
        kind = "math_inline_double" if rest.startswith("\\[") else "math_inline"
        state.push(kind, "math", 0).content = match[1]
    state.pos += match.end()
    return True


def tree(text: str) -> list[Node]:
    """The nodes of a text; of one that cannot be read, the text."""
    return blocks(text)[0]


def blocks(text: str) -> tuple[list[Node], list[int]]:
    """The nodes of a text, and of each the line, from 0, at which its block begins.

    What is appended to a text changes its last block alone, and texts in brackets that a link
    definition in it names: so a text that grows need not be read again from its beginning.
    """
    nodes, lines = list[Node](), list[int]()
    try:
        for block in SyntaxTreeNode(_parser().parse(text)).children:
            nodes += _nodes(block)
            line = block.map[0] if block.map else (lines or [0])[-1]
            lines += [line] * (len(nodes) - len(lines))
    except RecursionError:
        return [text], [0]
    return nodes, lines


def _children(nodes: Sequence[SyntaxTreeNode]) -> Iterator[Node]:
    for node in nodes:
        yield from _nodes(node)


def _nodes(node: SyntaxTreeNode) -> Iterator[Node]:
    kind = node.type
    if kind == "text":
        yield node.content
    elif kind in _PLAIN:
        yield _PLAIN[kind]
    elif kind.startswith("math_"):
        is_block = kind.startswith("math_block") or kind.endswith("_double")
        yield _formula(node.content.strip(), is_block)
    elif kind in ("fence", "code_block"):
        language = node.info.split()[0] if node.type == "fence" and node.info.split() else ""
        attrs = {"language": language} if language else {}
        yield {"tag": "pre", "attrs": attrs, "children": _coloured(node.content, language)}
    elif kind == "code_inline":
        yield {"tag": "code", "children": [node.content]}
    elif kind in ("link", "image"):
        yield from _link(node)
    elif kind in ("inline", "html_block", "html_inline") or not node.tag:
        yield from _children(node.children) if node.children else [node.content]
    else:
        yield _element(node)


def _coloured(code: str, language: str) -> list[Node]:
    """The pieces of a block, whose last line end is none of the code."""
    pieces = list(spans(code, language))
    if pieces:
        kind, text = pieces.pop()
        pieces.append((kind, text.removesuffix("\n")))
    return [
        {"tag": "span", "attrs": {"kind": kind}, "children": [text]} if kind else text
        for kind, text in pieces
        if text
    ]


def _element(node: SyntaxTreeNode) -> Node:
    element: dict[str, Any] = {"tag": node.tag, "children": [*_children(node.children)]}
    if node.type == "ordered_list" and "start" in node.attrs:
        element["attrs"] = {"start": str(node.attrs["start"])}
    return element


def _link(node: SyntaxTreeNode) -> Iterator[Node]:
    target = str(node.attrs.get("href") or node.attrs.get("src") or "")
    shown = [*_children(node.children)] or [target]
    if target.lower().startswith(_SCHEMES):
        yield {"tag": "a", "attrs": {"href": target}, "children": shown}
    else:
        yield from shown


def _formula(tex: str, is_block: bool) -> Node:
    as_written = {"tag": "code", "children": [tex]}
    if len(tex) > _MAX_FORMULA or _depth(tex) > _MAX_BRACES:
        return as_written
    try:
        display = "block" if is_block else "inline"
        root = ET.fromstring(latex2mathml.converter.convert(tex, display=display))
    except Exception:  # of text that a model wrote, anything may be raised
        return as_written
    return _mathml(root)


def _depth(tex: str) -> int:
    depth = deepest = 0
    for character in tex:
        depth += (character == "{") - (character == "}")
        deepest = max(deepest, depth)
    return deepest


def _mathml(element: ET.Element) -> dict[str, Any]:
    children: list[Node] = [element.text] if element.text else []
    children += [_mathml(child) for child in element]
    node: dict[str, Any] = {"tag": element.tag.removeprefix(_MATHML), "children": children}
    if attrs := {name: element.attrib[name] for name in element.attrib.keys() & _ATTRIBUTES}:
        node["attrs"] = attrs
    return node
