"""The page's types, by TypeScript's checker, and its accessibility, by axe-core.

``make test-page`` fetches both with npm into ``build/page-tools``; without them these are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from page.browser import Browser
from page.stand_in import Item, StandIn, finished, started
from page.steps import ask, open_page, shows, status
from page.streams import answer, votes

pytestmark = pytest.mark.page

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "build" / "page-tools" / "node_modules"
PAGE = ROOT / "src" / "forethought" / "server" / "page"


def test_the_types_in_the_comments_are_right():
    checker = MODULES / "typescript" / "bin" / "tsc"
    if not checker.is_file() or shutil.which("node") is None:
        pytest.skip("needs typescript: npm install --prefix build/page-tools typescript")
    command = ["node", str(checker), "-p", str(PAGE / "jsconfig.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_accessibility_error(browser: Browser, scheme: str):
    axe = MODULES / "axe-core" / "axe.min.js"
    if not axe.is_file():
        pytest.skip("needs axe-core: npm install --prefix build/page-tools axe-core")
    with StandIn(votes) as server:
        server.released.set()
        browser.media(prefers_color_scheme=scheme)
        try:
            open_page(browser, server.address)
            browser.run("document.querySelector('#plain-too').checked = true")
            ask(browser, "nuts", "majority_vote")
            status(browser, "Answered: plain")
            browser.run("document.querySelector('#settings').open = true")
            browser.run("document.querySelector('#further-sampling').open = true")
            browser.type("#attach", str(ROOT / "Makefile"))
            shows(browser, "#attachments li", "Makefile")
            browser.click_button("Edit answer")
            browser.run(axe.read_text(encoding="utf-8"))
            assert violations(browser) == []
            browser.click("#open-runs")
            shows(browser, "#run-list .open", "nuts")
            assert violations(browser) == []
            browser.press("Escape")
            for dialog in ("chats", "help"):
                browser.click(f"#open-{dialog}")
                assert violations(browser) == []
                browser.press("Escape")
            browser.click("#new")
            assert violations(browser) == []
            browser.resize(1440, 860)
            shows(browser, "#side .open", "nuts")
            browser.click("#chat-list .unfold")
            assert violations(browser) == []
            browser.click("#chat-list .open")
            browser.wait("document.querySelector('#chat-list [aria-current]')")
            browser.click_button("Delete", "#chat-list")
            browser.click_button("Rename", "#chat-list")
            assert violations(browser) == []
            browser.set("#chat-filter", "acorn")
            shows(browser, "#chat-list", "No chat has these words.")
            assert violations(browser) == []
        finally:
            browser.media()
            browser.resize(1280, 800)


CODE = """```python
@cache
def f(x):  # twice
    return 2 * x, "<b>"
```

```diff
-old
+new
```
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_has_colours_that_are_read_on_both_grounds(browser: Browser, scheme: str):
    def run(body: dict[str, Any]) -> list[Item]:
        return [started(), answer(CODE), finished(CODE)]

    with StandIn(run) as server:
        browser.media(prefers_color_scheme=scheme)
        try:
            open_page(browser, server.address)
            ask(browser, "code")
            status(browser, "Answered")
            shows(browser, ".markdown .code-keyword", "def")
            kinds = {"comment", "keyword", "string", "number", "name", "deleted", "inserted"}
            classes = (
                "return [...document.querySelectorAll('.code code span')].map((s) => s.className)"
            )
            assert set(browser.run(classes)) == {f"code-{kind}" for kind in kinds}
            colours = """
                return new Set([...document.querySelectorAll(".code code span")]
                  .map((span) => getComputedStyle(span).color)).size;
            """
            assert browser.run(colours) >= 5
            axe = MODULES / "axe-core" / "axe.min.js"
            if axe.is_file():
                browser.run(axe.read_text(encoding="utf-8"))
                assert violations(browser) == []
        finally:
            browser.media()


def violations(browser: Browser) -> list[Any]:
    """What axe objects to, with the elements."""
    script = """
        const { violations } = await axe.run(document);
        return violations.map(({ id, nodes }) => [id, ...nodes.map((node) => node.html)]);
    """
    found: list[Any] = browser.run_async(script)
    return found
