"""Whatever a model writes is text on the page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from page.browser import Browser
from page.stand_in import Item, StandIn, finished, started
from page.steps import ask, open_page, saved, shows, status, texts

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


def whole(**events: Any) -> dict[str, Any]:
    """An exported run."""
    request = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
    record = {"id": "r", "created": 1, "request": request}
    event = {"type": "delta", "at": 0.1, "branch": "", "text": "hello", "num_tokens": 1}
    all_events = [started(), {**event, **events}, finished("hello")]
    return {"format": "forethought run", "version": 1, "record": record, "events": all_events}


def changed(path: str, value: Any) -> dict[str, Any]:
    """An exported run with another value at a path."""
    run: Any = whole()
    *parents, last = path.split(".")
    place = run
    for name in parents:
        place = place[int(name) if name.isdecimal() else name]
    place[int(last) if last.isdecimal() else last] = value
    return run


NO_RUNS = [
    changed("events.1", None),
    changed("events.1.drafts", 5),
    changed("events.1.drafts", [[0, "1", True, "x"]]),
    changed("events.1.text", {"toString": 1}),
    changed("events.1.at", "soon"),
    changed("events.2.seconds", "1"),
    changed("events.2.usage", {"completion_tokens": {}}),
    changed("record.created", "yesterday"),
    changed("record.request.messages", [{"role": "user", "content": [1]}]),
    changed("record.request.messages", [None]),
    changed("record.request.method", {}),
    changed("record.begun", 1),
]


def test_a_run_of_another_form_is_refused(browser: Browser, tmp_path: Path):
    path = tmp_path / "run.json"
    with StandIn(lambda body: everywhere("x")) as server:
        open_page(browser, server.address)
        for run in NO_RUNS:
            path.write_text(json.dumps(run))
            browser.run("document.querySelector('#runs-note').textContent = ''")
            browser.type("#import", str(path))
            shows(browser, "#runs-note", "This file holds no run of forethought.")
        browser.click("#open-runs")
        shows(browser, "#run-list", "There is none yet.")


@pytest.mark.parametrize("name", ["__proto__", "constructor", "toString", MARKUP])
def test_a_run_of_a_file_names_nothing_of_the_page(browser: Browser, tmp_path: Path, name: str):
    path = tmp_path / "run.json"
    values = {name: name, "beam": [0], "answer": name, "tally": {name: 1}}
    events = [
        started(name, name, name),
        {"type": "stage", "at": 0.1, "branch": name, "name": name, "why": name, "fields": values},
        {"type": "stage", "at": 0.1, "branch": "", "name": "voted", "why": name, "fields": values},
        {"type": name, "at": 0.1, "text": name},
        {"type": "delta", "at": 0.1, "branch": name, "text": name, "fields": {name: name}},
        finished(name, finish_reason=name),
    ]
    run = {**whole(), "events": events}
    path.write_text(json.dumps(run).replace('"q"', json.dumps(name)))
    with StandIn(lambda body: everywhere("x")) as server:
        open_page(browser, server.address)
        before = browser.run("return document.querySelectorAll('script, img, style, a').length")
        browser.type("#import", str(path))
        status(browser, "Imported")
        shows(browser, ".stages li", name[:20].replace("_", " ").strip())
        browser.click("#open-runs")
        shows(browser, "#run-list .open", name[:20])
        browser.press("Escape")
        assert saved(browser, "Save HTML").count("<script") == 1, "its data"
        after = browser.run("return document.querySelectorAll('script, img, style, a').length")
        assert after == before
        assert browser.run("return document.title") == "forethought"
        assert browser.run("return Object.keys(Object.prototype).length") == 0


def chat(**fields: Any) -> dict[str, Any]:
    """Exported chats: one of a question and its run."""
    turn = {"id": "a", "parent": None, "question": "q", "runs": ["r"], "created": 1}
    conversation = {"id": "c", "created": 1, "turns": [turn], "active": {}, **fields}
    run = {name: whole()[name] for name in ("record", "events")}
    saved_chat = {"conversation": conversation, "runs": [run]}
    return {"format": "forethought chats", "version": 1, "chats": [saved_chat]}


LOOP = {"id": "a", "parent": "a", "question": "q", "runs": [], "created": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"title": {"toLowerCase": 1}},
        {"active": {"": 1}},
        {"active": None},
        {"turns": [LOOP]},
        {"turns": [{**LOOP, "parent": None, "files": [{"name": 1, "text": "x"}]}]},
        {"turns": [{**LOOP, "parent": None, "runs": [{}]}]},
    ],
)
def test_chats_of_another_form_are_refused(
    browser: Browser, tmp_path: Path, fields: dict[str, Any]
):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(chat(**fields)))
    with StandIn(lambda body: everywhere("x")) as server:
        open_page(browser, server.address)
        browser.type("#import-chats", str(path))
        shows(browser, "#chats-note", "This file holds no chats of forethought.")


def test_a_chat_of_a_file_goes_round_and_acts_nowhere(browser: Browser, tmp_path: Path):
    path, again = tmp_path / "chats.json", tmp_path / "again.json"
    evil = f"{MARKUP}\u202egnp.exe"
    turn = {"id": "__proto__", "parent": None, "question": evil, "runs": ["r"], "created": 1}
    turn["files"] = [{"name": evil, "text": evil}]
    settings = {"fields": None, "sampling": {"temperature": 1}}
    path.write_text(json.dumps(chat(title=evil, turns=[turn], settings=settings)))
    with StandIn(lambda body: everywhere("x")) as server:
        open_page(browser, server.address)
        for file in (path, again):
            browser.type("#import-chats", str(file))
            shows(browser, "#chats-note", "Imported 1 chat")
            browser.click("#open-chats")
            shows(browser, "#chat-list .open", "⟨RLO⟩gnp.exe")
            browser.click("#chat-list .open")
            shows(browser, ".turn .answer", "hello")
            shows(browser, ".attached summary", "⟨RLO⟩gnp.exe")
            assert (
                browser.run("return document.querySelectorAll('.turn :is(script, img)').length")
                == 0
            )
            browser.click("#open-chats")
            shows(browser, "#chat-list .open", "⟨RLO⟩gnp.exe")
            again.write_text(saved(browser, "Export"), encoding="utf-8")
            browser.click_button("Delete", "#chat-list")
            browser.click_button("Really?", "#chat-list")
            shows(browser, "#chat-list", "There is none yet")
            browser.press("Escape")
        assert browser.run("return document.title") == "forethought"
