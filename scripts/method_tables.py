"""Tables of methods and their settings: written into docs/methods from the fields of the classes.

``<!-- settings: beam_search, dvts -->`` is followed by a table of the settings of these methods, in
which a row that several of them share comes once; ``<!-- methods -->`` by a table of all methods,
each with a link to the heading above its settings. A table ends with ``<!-- end of settings -->``
or ``<!-- end of methods -->``.

    python scripts/method_tables.py            write all tables anew
    python scripts/method_tables.py --check    fail if one is not what would be written
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from forethought import methods
from forethought.methods import Method
from forethought.scaffolding.settings import REQUIRED

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "methods"
SETTINGS = re.compile(r"<!-- settings: ([\w, ]+) -->\n.*?<!-- end of settings -->", re.DOTALL)
METHODS = re.compile(r"<!-- methods -->\n.*?<!-- end of methods -->", re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LONGEST = 40
"""Characters of a default that is shown; longer ones are texts of prompts."""

Row = tuple[str, str, str, str]
"""Name, type, default and meaning of a setting."""


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    pages = pages_in_order()
    places = places_of(pages)
    stale = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        written_text = written(text, places)
        if written_text != text:
            stale.append(page)
            if not args.check:
                page.write_text(written_text, encoding="utf-8")
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'is stale' if args.check else 'written'}")
    return int(args.check and bool(stale))


def pages_in_order() -> list[Path]:
    """The pages of methods, in the order in which the first one links to them."""
    first = FOLDER / "index.md"
    linked = re.findall(r"\]\(([\w-]+\.md)\)", first.read_text(encoding="utf-8"))
    return list(dict.fromkeys([first, *(FOLDER / name for name in linked)]))


def places_of(pages: list[Path]) -> dict[str, str]:
    """Method -> the link to the heading above its settings."""
    places = {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in SETTINGS.finditer(text):
            headings = HEADING.findall(text, 0, match.start())
            for name in names_in(match):
                places[name] = f"{page.name}#{anchor(headings[-1])}"
    return places


def names_in(match: re.Match[str]) -> list[str]:
    """The methods of a table of settings."""
    return [name.strip() for name in match[1].split(",")]


def anchor(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def written(text: str, places: dict[str, str]) -> str:
    """A page with its tables anew."""

    def settings(match: re.Match[str]) -> str:
        body = settings_table([methods.describe(name) for name in names_in(match)])
        return f"<!-- settings: {match[1]} -->\n\n{body}\n\n<!-- end of settings -->"

    def every_method(_: re.Match[str]) -> str:
        return f"<!-- methods -->\n\n{method_table(places)}\n\n<!-- end of methods -->"

    return METHODS.sub(every_method, SETTINGS.sub(settings, text))


def method_table(places: dict[str, str]) -> str:
    """All methods, in the order of the pages that describe them."""
    if missing := {*methods.names()} - places.keys():
        raise SystemExit(f"no page has the settings of {', '.join(sorted(missing))}")
    lines = ["| method | what it does | paper |", "| --- | --- | --- |"]
    for name in sorted(methods.names(), key=list(places).index):
        method = methods.describe(name)
        cells = [f"[`{name}`]({places[name]})", method.description, method.paper]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def settings_table(described: list[Method]) -> str:
    """The settings of some methods, each row with the methods that it is of if not of all."""
    owners: dict[Row, list[str]] = {}
    for method in described:
        for row in rows_of(method):
            owners.setdefault(row, []).append(method.name)
    heads, of_all = ["setting", "type", "default", "meaning"], len(described)
    if of_all > 1:
        heads.insert(1, "of")
    lines = [heads, ["---"] * len(heads)]
    for (name, kind, default, meaning), names in sorted(owners.items(), key=first_name(owners)):
        cells = [f"`{name}`", kind, default, meaning]
        if of_all > 1:
            cells.insert(1, "all" if len(names) == of_all else ", ".join(f"`{n}`" for n in names))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def first_name(owners: dict[Row, list[str]]) -> Any:
    """Rows of one setting stand together, in the order in which their setting comes first."""
    order = list(dict.fromkeys(name for name, *_ in owners))
    return lambda item: order.index(item[0][0])


def rows_of(method: Method) -> list[Row]:
    """A row per setting, in the order of the constructor's parameters."""
    return [
        (name, setting.type_text, shown(method.parameters[name]), setting.help)
        for name, setting in method.settings.items()
    ]


def shown(default: Any) -> str:
    """A default as a cell."""
    if default is REQUIRED:
        return "required"
    text = getattr(default, "__name__", None) or repr(default)
    return f"`{text}`" if len(text) <= LONGEST else "see `forethought methods`"


if __name__ == "__main__":
    sys.exit(main())
