"""Hooks of the documentation's site (``mkdocs.yml``): pages that stand elsewhere, links, llms.txt.

README.md is the home page, CONTRIBUTING.md and each notebook of ``docs/notebooks`` are pages. Links
of pages to files of the repository beside ``docs`` lead to the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import notebooks
import trends
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the repository that are pages -> their names there."""
DIAGRAMS = ROOT / "docs" / "diagrams"
DIAGRAM = re.compile(r'<img alt="([^"]*)" src="[^"]*diagrams/([\w-]+\.svg)"[^>]*>')
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in ``docs``."""
    for source, name in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    for path in notebooks.paths():
        text = notebooks.markdown(notebooks.read(path), path.name)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Lead links to where their targets are on the site, and fill in the ratios over time."""
    outside = {name: source for source, name in OUTSIDE.items()}
    place = ROOT / outside.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def lead(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = (place.parent / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():  # mkdocs says so
            return match[0]
        return f"]({_address(path, page.file.src_uri, config['repo_url'])}{anchor})"

    if trends.MARK in markdown:
        markdown = markdown.replace(trends.MARK, trends.page(trends.runs()))
    return LINK.sub(lead, markdown)


def _address(path: Path, page: str, repository: str) -> str:
    """Of a file, for the page: a page of the site, else in the repository."""
    name = path.relative_to(ROOT).as_posix()
    up = "../" * page.count("/")
    if name in OUTSIDE:
        return up + OUTSIDE[name]
    if path.suffix == ".ipynb" and page != f"notebooks/{path.stem}.md":
        return up + name.removeprefix("docs/").replace(".ipynb", ".md")
    if name.startswith("docs/") and path.is_file() and path.suffix != ".jsonl":
        return up + name.removeprefix("docs/")
    return f"{repository}/blob/main/{name}"


def on_nav(nav: Any, config: Any, **_: Any) -> None:
    """Keep the pages, in their order, for ``on_post_build``."""
    config["extra"]["pages"] = nav.pages


def on_post_build(config: Any) -> None:
    """Write llms.txt: what each page is, for programs that read (llmstxt.org)."""
    lines, section = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""], None
    for page in config["extra"]["pages"]:
        if page.parent is not section:
            section = page.parent
            lines += ["", f"## {section.title}", ""]
        lines.append(f"- [{page.title}]({config['site_url']}{page.url}): {_first(page.markdown)}")
    text = "\n".join(lines) + "\n"
    (Path(config["site_dir"]) / "llms.txt").write_text(text, encoding="utf-8")


def _first(markdown: str) -> str:
    """The first sentence of a page."""
    prose = re.sub(r"(?ms)^```.*?^```", "", markdown)
    texts = (line for line in prose.splitlines() if re.match(r"[A-Z*`]", line))
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", next(texts, ""))
    return re.split(r"(?<=[.:]) ", text)[0]


def on_page_content(html: str, **_: Any) -> str:
    """Diagrams become a part of the page, so that their text has its colour, light or dark.
    Docstrings mark a block of code by two colons, as Sphinx reads them.
    """
    html = DIAGRAM.sub(lambda match: diagram(match[2], match[1]), html)
    return html.replace("<p>::</p>\n", "").replace("::</p>", ":</p>")


def diagram(name: str, alternative: str) -> str:
    """A file of ``docs/diagrams`` as an element; its own style, for where it is an image, is left
    out.
    """
    text = (DIAGRAMS / name).read_text(encoding="utf-8")
    text = re.sub(r"\s*<(style|title)>.*?</\1>", "", text, flags=re.DOTALL)
    labelled = f'<svg role="img" aria-label="{alternative}" style="max-width: 100%; height: auto"'
    return text.strip().replace("<svg", labelled, 1)
