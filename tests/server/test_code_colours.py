"""Code blocks in pieces that have colours: none is lost, and none costs more than it should."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product

import pytest

from forethought.server.code_colours import KINDS, LANGUAGES, MAX_SECONDS, spans
from forethought.server.markdown import MAX_CHARACTERS, tree

HOSTILE = (
    *('"', "'", "`", "/", "*", "/*", "//", "<", "<a ", "<!--", "(", "[", "{", "a", "A", " ", "\t"),
    *("\n", "\\", '\\"', "0", "1.", "1e", "a.", "@a", "#", "$", "${", "%", "-", "=", ":", "&", "|"),
    *(
        "_",
        '"""',
        "a(",
        "a b ",
        "<<E\n",
        "r#",
        "{{",
        "a<",
        "::",
        'f"{',
        "~",
        "^",
        "/=",
        "a\n ",
        "* ",
    ),
    *(
        "- ",
        ": ",
        "def a",
        "class ",
        "<?",
        '{"a":',
        'R"(',
        "<a b=",
        "a*",
        "\n ",
        "int a",
        "#if 0\n",
    ),
)
"""Units whose repetition makes regular expressions backtrack."""
CODE = ('x = "a" # b\nint y; // z\n1', "", "\n", "a\r\nb", '<a b="c">{}</a>', "\u202e\0")


def test_the_pieces_are_the_code_in_every_language() -> None:
    languages = sorted(LANGUAGES)
    for language, code in product(languages, CODE):
        pieces = list(spans(code, language))
        assert "".join(text for _, text in pieces) == code
        assert {kind for kind, _ in pieces} <= KINDS | {""}


def test_words_of_a_language_have_kinds() -> None:
    assert list(spans("def f():  # g", "Python")) == [
        ("keyword", "def"),
        ("", " "),
        ("name", "f"),
        ("", "():  "),
        ("comment", "# g"),
    ]
    assert ("number", "1") in spans("int x = 1;", "c")
    assert ("string", '"a"') in spans('x = "a"', "js")
    assert ("deleted", "-a") in spans("-a\n+b\n", "diff")
    assert list(spans("def f", "no language")) == [("", "def f")]


@pytest.mark.parametrize("language", ["c", "python", "html", "javascript"])
def test_no_code_costs_more_than_it_should(language: str) -> None:
    check_cost(language, 4000, (" ", "\n", "a ", '"', "(", "/*", "<a ", "a*"))


def test_a_heredoc_without_a_last_line_end_costs_what_others_do() -> None:
    began = time.thread_time()
    assert list(spans("<<~E\n" + "a" * MAX_CHARACTERS, "ruby"))
    assert time.thread_time() - began < MAX_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("language", sorted({min(kind.aliases) for kind in LANGUAGES.values()}))
def test_no_code_of_any_language_costs_more_than_it_should(language: str) -> None:
    check_cost(language, 16_000, HOSTILE)


def check_cost(language: str, size: int, units: Sequence[str]) -> None:
    for unit in units:
        code = (unit * size)[:size]
        began = time.thread_time()
        assert "".join(text for _, text in spans(code, language)) == code
        assert time.thread_time() - began < MAX_SECONDS + 0.25, unit


def test_text_of_a_model_is_no_attribute_and_no_tag() -> None:
    (block,) = tree('```html\n<script onload="x">alert(1)</script>\n```')
    assert isinstance(block, dict)
    children = [node for node in block["children"] if isinstance(node, dict)]
    assert {node["tag"] for node in children} == {"span"}
    assert {kind for node in children for kind in node["attrs"].values()} <= KINDS
