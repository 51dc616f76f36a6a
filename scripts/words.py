"""Counts the words of the source that readers of this field would stop at, and keeps them falling.

    python scripts/words.py             the counts, and status 1 if one is above its limit
    python scripts/words.py --names     the names that are pronouns or participles, most used first

A name of a value is the noun that it is: ``results``, not ``found``. A docstring says more than the
signature: an override has ``@override``, not "See X". "behind" is for what lags. Lower a limit when
a count has fallen; raise none.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src"

UNCLEAR_NAMES = frozenset(
    {
        *("found", "own", "each", "left", "given", "known", "kept", "asked", "told", "seen"),
        *("said", "some", "gone", "made", "taken", "wanted"),
    }
)
PHRASES = ["behind", "so many", "under way", "as far as"]
LIMITS = {
    "names that are pronouns or participles, per 1,000": 1.0,
    "docstrings that only say See X": 0,
    "docstring lines, per 1,000": 173,
    "behind": 7,
    "so many": 0,
    "under way": 0,
    "as far as": 0,
}
"""The counts of today; see above."""


def bound_names(tree: ast.AST) -> Iterator[str]:
    """The names of variables and parameters that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """The docstrings of a module, its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node, clean=False):
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            assert isinstance(statement.value, ast.Constant)
            yield statement.value


def counts(paths: list[Path]) -> tuple[dict[str, float], Counter[str]]:
    """The count of each limit, and how often each unclear name is bound."""
    names, phrases = Counter[str](), Counter[str]()
    num_lines = num_docstring_lines = num_references = 0
    for path in paths:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        names.update(bound_names(tree))
        num_lines += source.count("\n")
        for docstring in docstrings(tree):
            num_docstring_lines += (docstring.end_lineno or 0) - docstring.lineno + 1
            num_references += (
                re.fullmatch(r"See [^\n]*\.?", str(docstring.value).strip()) is not None
            )
        for phrase in PHRASES:
            phrases[phrase] += len(re.findall(rf"\b{phrase}\b", source))
    unclear = Counter({name: count for name, count in names.items() if name in UNCLEAR_NAMES})
    return {
        "names that are pronouns or participles, per 1,000": round(
            1000 * unclear.total() / names.total(), 1
        ),
        "docstrings that only say See X": num_references,
        "docstring lines, per 1,000": round(1000 * num_docstring_lines / num_lines),
        **{phrase: phrases[phrase] for phrase in PHRASES},
    }, unclear


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="list the unclear names")
    args = parser.parse_args()
    results, unclear = counts(sorted(ROOT.rglob("*.py")))
    if args.names:
        print("\n".join(f"{count:5} {name}" for name, count in unclear.most_common()))
        return 0
    above = {what for what, count in results.items() if count > LIMITS[what]}
    for what, count in results.items():
        print(f"{count:>8} {what}{f', more than {LIMITS[what]}' if what in above else ''}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
