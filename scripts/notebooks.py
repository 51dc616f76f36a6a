"""Notebooks of the documentation: their cells are run here, and become pages of the site.

A notebook of ``docs/notebooks`` holds the text that its cells printed when this script ran them
last. The tests run the cells again; ``scripts/site.py`` makes a page of each notebook.

    python scripts/notebooks.py          run all notebooks, and store what they print
    python scripts/notebooks.py FILE     one of them
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"

Notebook = dict[str, Any]
Cell = dict[str, Any]


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    for path in parser.parse_args().files or paths():
        notebook = read(path)
        for cell, text in zip(code_cells(notebook), printed(notebook), strict=True):
            cell["outputs"] = [stream(text)] if text else []
        write(path, notebook)
        print(f"{path.name}: run")
    return 0


def paths() -> list[Path]:
    """The notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Notebook:
    """The cells and metadata of a file."""
    notebook: Notebook = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def write(path: Path, notebook: Notebook) -> None:
    """As Jupyter writes it, with keys in their order."""
    text = json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def code_cells(notebook: Notebook) -> list[Cell]:
    """The cells with code, in their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(notebook: Notebook) -> list[str]:
    """Run the cells one after the other, as Jupyter does, on a running event loop: what each of
    them printed.
    """
    return asyncio.run(_printed(notebook))


async def _printed(notebook: Notebook) -> list[str]:
    names: dict[str, Any] = {"__name__": "__main__"}
    texts = []
    for cell in code_cells(notebook):
        code = compile(source(cell), "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
        with redirect_stdout(io.StringIO()) as output:
            result = eval(code, names)
            if inspect.isawaitable(result):
                await result
        texts.append(output.getvalue())
    return texts


def source(cell: Cell) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


def stream(text: str) -> dict[str, Any]:
    """An output of printed text."""
    return {
        "name": "stdout",
        "output_type": "stream",
        "text": text.splitlines(keepends=True),
    }


def markdown(notebook: Notebook, name: str) -> str:
    """A page: text, code and what it printed; ``name`` is that of the file, which it links to."""
    parts = [
        _code(cell) if cell["cell_type"] == "code" else source(cell) for cell in notebook["cells"]
    ]
    parts.append(f"[Download this notebook]({name}), or open it where you have cloned it.")
    return "\n\n".join(parts) + "\n"


def _code(cell: Cell) -> str:
    text = "".join("".join(output["text"]) for output in cell["outputs"])
    block = f"```python\n{source(cell)}\n```"
    return f"{block}\n\n```text\n{text.rstrip()}\n```" if text else block


if __name__ == "__main__":
    sys.exit(main())
