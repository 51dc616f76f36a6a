"""Whatever a model writes is text on the page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from page.browser import Browser
from page.stand_in import Item, StandIn, finished, started
from page.steps import ask, open_page, shows, status, texts

pytestmark = pytest.mark.page

MARKUP = (
    "<script>document.title = 'hacked'</script>"
    "<img src=x onerror=\"document.title='hacked'\">"
    "&lt;b&gt; </pre></textarea><style>*{display:none}</style>"
    "[click](javascript:document.title='hacked')"
)


def everywhere(text: str) -> list[Item]:
    """A run that has a text in every place that a server fills."""
    fields = {"answer": text, text: text}
    votes = {"answer": text, "tally": {text: 1}}
    aside = {"beam": [0], "aside": text}
    return [
        started("plain", text, text),
        {"type": "stage", "at": 0.0, "branch": "0", "name": "spawned", "why": text, "fields": {}},
        {"type": "stage", "at": 0.1, "branch": "0", "name": text, "why": text, "fields": fields},
        {"type": "delta", "at": 0.1, "branch": "0", "text": text, "num_tokens": 3},
        {"type": "delta", "at": 0.1, "branch": "", "text": text, "fields": {"beam": [0]}},
        {"type": "delta", "at": 0.1, "branch": "", "text": text, "fields": aside},
        {"type": "stage", "at": 0.1, "branch": "0", "name": "voted", "fields": votes},
        {"type": "stage", "at": 0.1, "branch": "", "name": "voted", "why": text, "fields": votes},
        {"type": "delta", "at": 0.1, "branch": text, "text": text, "num_tokens": 3},
        {"type": "answer", "text": text},
        finished(text, finish_reason=text),
    ]


def test_markup_is_shown_as_it_was_written(browser: Browser):
    text = MARKUP
    with StandIn(lambda body: everywhere(text)) as server:
        open_page(browser, server.address)
        before = browser.run("return document.querySelectorAll('script, img, style, a').length")
        ask(browser, text)
        status(browser, "Answered")
        assert texts(browser, ".answer") == [text]
        browser.click("#open-runs")
        shows(browser, "#run-list .open", text[:20])
        browser.press("Escape")
        browser.click("#open-chats")
        shows(browser, "#chat-list .open", text[:20])
        shows(browser, ".vote-answer", text[:20])
        after = browser.run("return document.querySelectorAll('script, img, style, a').length")
        assert after == before
        assert browser.run("return document.title") == "forethought"


def test_control_characters_and_directions_are_made_visible(browser: Browser):
    text = "\x1b[31mred\x1b[0m \u202egnp.exe\u2066 \x07 \x00 \u200f"

    def run(body: dict[str, Any]) -> Iterable[Item]:
        return [started(), {"type": "answer", "text": text}, finished(text)]

    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "control")
        status(browser, "Answered")
        shown = "␛[31mred␛[0m ⟨RLO⟩gnp.exe⟨LRI⟩ ␇ ␀ ⟨RLM⟩"
        assert texts(browser, ".answer") == [shown]
        isolated = "return getComputedStyle(document.querySelector('.answer')).unicodeBidi"
        assert browser.run(isolated) == "isolate"


def test_a_line_of_a_megabyte_is_cut_until_it_is_asked_for(browser: Browser):
    line = "x" * 1_000_000

    def run(body: dict[str, Any]) -> Iterable[Item]:
        delta = {"type": "delta", "at": 0.1, "branch": "", "text": line, "num_tokens": 9}
        return [started(), delta, {"type": "answer", "text": line}, finished(line)]

    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "long")
        status(browser, "Answered")
        shows(browser, ".markdown .more", "Show 907,232 more characters")
        shown = "return document.querySelector('.turn').innerText.length"
        assert browser.run(shown) < 100_000
        wide = "return document.documentElement.scrollWidth <= innerWidth"
        assert browser.run(wide)
        browser.click(".markdown .more")
        browser.wait("document.querySelector('.markdown').textContent.length === 1000000")
