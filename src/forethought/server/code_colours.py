"""Spans of a code block by what they are: keywords, strings, comments, for the page's colours.

Pygments reads the code. The languages are a closed table, whose lexers take time linear in a text
that was written to cost time (``tests/server/test_code_colours.py``); a block that takes longer
than ``MAX_SECONDS`` has no spans from there on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from pygments.lexer import Lexer
from pygments.lexers.c_cpp import CLexer, CppLexer
from pygments.lexers.configs import TOMLLexer
from pygments.lexers.css import CssLexer
from pygments.lexers.data import JsonLexer, YamlLexer
from pygments.lexers.diff import DiffLexer
from pygments.lexers.dotnet import CSharpLexer
from pygments.lexers.go import GoLexer
from pygments.lexers.haskell import HaskellLexer
from pygments.lexers.html import HtmlLexer, XmlLexer
from pygments.lexers.javascript import JavascriptLexer, TypeScriptLexer
from pygments.lexers.jvm import JavaLexer, KotlinLexer
from pygments.lexers.python import PythonLexer
from pygments.lexers.ruby import RubyLexer
from pygments.lexers.rust import RustLexer
from pygments.lexers.scripting import LuaLexer
from pygments.lexers.shell import BashLexer
from pygments.lexers.sql import SqlLexer
from pygments.token import Token

MAX_SECONDS = 0.25
"""Of processor time, for one block."""
_LEXERS: tuple[type[Lexer], ...] = (
    *(BashLexer, CLexer, CppLexer, CSharpLexer, CssLexer, DiffLexer, GoLexer, HaskellLexer),
    *(HtmlLexer, JavaLexer, JavascriptLexer, JsonLexer, KotlinLexer, LuaLexer, PythonLexer),
    *(RubyLexer, RustLexer, SqlLexer, TOMLLexer, TypeScriptLexer, XmlLexer, YamlLexer),
)
LANGUAGES: Mapping[str, type[Lexer]] = MappingProxyType(
    {alias: lexer for lexer in _LEXERS for alias in lexer.aliases}
    | {"jsx": JavascriptLexer, "tsx": TypeScriptLexer, "jsonc": JsonLexer, "h": CLexer}
)
"""By the names that fences give them."""
_KINDS = (
    (Token.Comment, "comment"),
    (Token.Keyword, "keyword"),
    (Token.Operator.Word, "keyword"),
    (Token.Name.Tag, "keyword"),
    (Token.Literal.String, "string"),
    (Token.Literal, "number"),
    (Token.Name.Function, "name"),
    (Token.Name.Class, "name"),
    (Token.Name.Decorator, "name"),
    (Token.Name.Attribute, "name"),
    (Token.Name.Builtin, "name"),
    (Token.Generic.Deleted, "deleted"),
    (Token.Generic.Inserted, "inserted"),
    (Token.Generic.Heading, "comment"),
    (Token.Generic.Subheading, "comment"),
)
KINDS = frozenset(kind for _, kind in _KINDS)


def spans(code: str, language: str) -> Iterator[tuple[str, str]]:
    """The code in pieces, each with one of ``KINDS``, or ``""`` for what has no colour.

    Neighbours of one kind are one piece; of an unknown language, all of it is.
    """
    kind, text = "", list[str]()
    for kind_of_token, value in _tokens(code, language.lower()):
        if kind_of_token != kind and text:
            yield kind, "".join(text)
            text = []
        kind = kind_of_token
        text.append(value)
    if text:
        yield kind, "".join(text)


def _tokens(code: str, language: str) -> Iterator[tuple[str, str]]:
    if language not in LANGUAGES:
        yield "", code
        return
    end = time.thread_time() + MAX_SECONDS
    # the rules of C for definitions of functions, which "root" has, take quadratic time in spaces
    stack = [("statement",)] if issubclass(LANGUAGES[language], CLexer | CppLexer) else []
    # a last line without an end takes Ruby's heredocs quadratic time
    text, position = code + "\n", 0
    for _, token, value in _lexer(language).get_tokens_unprocessed(text, *stack):
        yield _kind(token), value[: len(code) - position]
        position += len(value)
        if position >= len(code):
            return
        if time.thread_time() > end:
            yield "", code[position:]
            return


@cache
def _lexer(language: str) -> Any:
    return LANGUAGES[language]()


@cache
def _kind(token: Any) -> str:
    return next((kind for ancestor, kind in _KINDS if token in ancestor), "")
