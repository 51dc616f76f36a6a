"""The chats beside the conversation on a wide screen, their order, and the search among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from page.browser import Browser
from page.stand_in import Item, StandIn, finished
from page.steps import READY, ask, open_page, shows, status, texts
from page.streams import echo, votes

pytestmark = pytest.mark.page

TITLES = "#chat-list .open > :first-child"
HIDDEN = "return document.querySelector('#side').hidden"
FOCUSED = "return document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"


@pytest.fixture
def wide(browser: Browser) -> Iterator[Browser]:
    """The browser with room for three columns."""
    browser.resize(1440, 860)
    yield browser
    browser.resize(1280, 800)


def asked(browser: Browser, *questions: str) -> None:
    """Ask each in a chat of its own."""
    for question in questions:
        browser.click("#new")
        ask(browser, question)
        shows(browser, ".answer", f"answer to {question}")
        status(browser, "Answered")


def listed(browser: Browser, *titles: str, selector: str = TITLES) -> None:
    """Wait until the list has these titles, in this order."""
    condition = "JSON.stringify([...document.querySelectorAll(args[0])].map((e) => e.textContent))"
    browser.wait(f"{condition} === JSON.stringify(args[1])", selector, list(titles))


def marked(browser: Browser, *titles: str) -> None:
    """Wait until these are marked as shown."""
    listed(browser, *titles, selector="#chat-list [aria-current] > :first-child")


def test_on_a_wide_screen_chats_are_listed_beside_the_conversation_as_they_begin(wide: Browser):
    with StandIn(echo) as server:
        open_page(wide, server.address)
        shows(wide, "#side #chat-list", "There is none yet")
        asked(wide, "one", "two")
        listed(wide, "two", "one")
        marked(wide, "two")
        wide.click("#chat-list li:last-child .open")
        shows(wide, ".turn .answer", "answer to one")
        marked(wide, "one")
        listed(wide, "two", "one")
        ask(wide, "three")
        listed(wide, "one", "two")
        status(wide, "Answered")
        wide.click("#new")
        marked(wide)
        columns = "return ['#side', '.talk', '#inspector'].map((s) => document.querySelector(s)"
        lefts = wide.run(columns + ".getBoundingClientRect().left)")
        assert lefts == sorted(lefts)
        assert lefts[0] < lefts[1] < lefts[2]


def test_a_column_of_chats_that_is_closed_stays_closed_until_it_is_opened(wide: Browser):
    expanded = "return document.querySelector('#open-chats').ariaExpanded"
    with StandIn(echo) as server:
        open_page(wide, server.address)
        asked(wide, "one")
        assert wide.run(expanded) == "true"
        wide.click("#close-chats")
        assert wide.run(HIDDEN)
        assert wide.run(FOCUSED) == "open-chats"
        wide.reload()
        wide.wait(READY)
        assert wide.run(HIDDEN)
        assert wide.run(expanded) == "false"
        wide.click("#open-chats")
        listed(wide, "one")
        wide.reload()
        listed(wide, "one")
        wide.click("#open-chats")
        assert wide.run(HIDDEN), "the button closes it as well"


def test_the_key_of_the_chats_opens_the_column_with_the_focus_in_the_search(wide: Browser):
    key = "new KeyboardEvent('keydown', { key: 'k', ctrlKey: true, bubbles: true })"
    with StandIn(echo) as server:
        open_page(wide, server.address)
        wide.click("#close-chats")
        wide.run(f"document.body.dispatchEvent({key})")
        assert not wide.run(HIDDEN)
        assert wide.run(FOCUSED) == "chat-filter"


def test_a_window_that_becomes_narrow_has_the_chats_in_a_dialog(wide: Browser):
    with StandIn(echo) as server:
        open_page(wide, server.address)
        asked(wide, "one")
        for width in (1024, 390):
            wide.resize(width, 800)
            wide.wait("document.querySelector('#side').hidden")
            wide.click("#open-chats")
            listed(wide, "one")
            assert wide.run("return document.querySelector('dialog#chats').matches(':modal')")
            wide.click("#chat-list .open")
            wide.wait("!document.querySelector('#chats').open")
        wide.resize(1440, 860)
        wide.wait("!document.querySelector('#side').hidden")
        assert texts(wide, f"#side {TITLES}") == ["one"]


def test_a_chat_is_renamed_and_deleted_in_the_column_with_the_keyboard(wide: Browser):
    with StandIn(echo) as server:
        open_page(wide, server.address)
        asked(wide, "one", "two", "three")
        wide.run("document.querySelector('#chat-filter').focus()")
        wide.press("Tab", "Tab", "Tab", "Tab")
        assert wide.run(FOCUSED) == "Rename, export or delete the chat: two"
        wide.press("Enter", "Tab")
        assert wide.run(FOCUSED) == "Rename the chat: two"
        wide.press("Enter")
        wide.write("2nd")
        wide.press("Escape")
        listed(wide, "three", "two", "one")
        wide.press("Tab", "Tab", "Enter")
        wide.write("2nd")
        wide.press("Enter")
        listed(wide, "three", "2nd", "one")
        assert wide.run("return document.activeElement.firstChild.textContent") == "2nd"
        wide.press("Tab", "Tab", "Tab", "Tab", "Enter", "Enter")
        listed(wide, "three", "one")
        assert wide.run("return document.activeElement.firstChild.textContent") == "one"
        wide.press("Enter")
        shows(wide, ".turn .answer", "answer to one")
        wide.reload()
        listed(wide, "three", "one")


def test_a_chat_that_is_deleted_in_the_column_while_it_is_shown_makes_room(wide: Browser):
    with StandIn(echo) as server:
        open_page(wide, server.address)
        asked(wide, "one", "two")
        wide.click("#chat-list .unfold")
        wide.click_button("Delete", "#chat-list")
        wide.click_button("Really?", "#chat-list")
        listed(wide, "one")
        assert wide.run("return document.querySelector('.welcome')")
        wide.click("#chat-list .open")
        shows(wide, ".turn .answer", "answer to one")
        wide.click_button("Delete", ".turn")
        wide.click_button("Really?", ".turn")
        shows(wide, "#chat-list", "There is none yet")


def test_a_title_that_is_written_outlives_a_change_of_the_list(wide: Browser):
    title = "return document.querySelector('.rename input')?.value"
    with StandIn(votes) as server:
        open_page(wide, server.address)
        ask(wide, "nuts", "majority_vote")
        listed(wide, "nuts")
        wide.click("#chat-list .unfold")
        wide.click_button("Rename", "#chat-list")
        wide.write("squirrels")
        wide.run("dispatchEvent(new Event('focus'))")
        server.released.set()
        status(wide, "Answered")
        ask(wide, "more", "majority_vote")
        wide.wait("document.querySelectorAll('.turn').length === 2")
        status(wide, "Answered")
        assert wide.run(title) == "squirrels"
        wide.click_button("Keep", "#chat-list")
        listed(wide, "squirrels")
        wide.reload()
        listed(wide, "squirrels")
        assert len(texts(wide, ".turn")) == 2


def test_chats_are_in_the_order_of_their_use_whatever_the_clock_says(wide: Browser):
    with StandIn(echo) as server:
        open_page(wide, server.address)
        asked(wide, "one")
        wide.run("Date.now = () => 1e9")
        asked(wide, "two")
        listed(wide, "two", "one")
        wide.reload()
        listed(wide, "two", "one")


FIRST_VERSION = """
    const request = indexedDB.open("forethought", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("runs", { keyPath: "id" });
      request.result.createObjectStore("events", { keyPath: ["run", "number"] });
      const chats = request.result.createObjectStore("conversations", { keyPath: "id" });
      for (const [id, created] of [["a", 2000], ["b", 3000], ["c", 1000]]) {
        const turn = { id: "t", parent: null, question: id, runs: [], created, begun: "six" };
        chats.put({ id, created: 0, turns: [turn], active: {} });
      }
    };
    await new Promise((resolve) => (request.onsuccess = resolve));
    request.result.close();
"""
"""Chats as the page kept them when they had no numbers."""


def test_chats_of_the_first_version_stay_and_are_in_their_order(wide: Browser):
    with StandIn(echo) as server:
        wide.open(f"{server.address}/v1/models")
        wide.run_async(FIRST_VERSION)
        open_page(wide, server.address)
        listed(wide, "b", "a", "c")
        wide.click("#chat-list li:last-child .open")
        shows(wide, ".turn .answer", "six")
        ask(wide, "more")
        listed(wide, "c", "b", "a")
        status(wide, "Answered")


def test_a_chat_is_found_by_its_answer_and_by_the_name_of_its_file(wide: Browser, tmp_path: Any):
    path = tmp_path / "nuts.csv"
    path.write_text("6")

    def run(body: dict[str, Any]) -> Iterable[Item]:
        return echo(body) if body["input"][0]["content"] == "one" else [finished("seven")]

    with StandIn(run) as server:
        open_page(wide, server.address)
        asked(wide, "one")
        wide.click("#new")
        wide.type("#attach", str(path))
        shows(wide, "#attachments li", "nuts.csv")
        ask(wide, "two")
        status(wide, "Answered")
        for words, titles in {
            "Answer to O": ["one"],
            "NUTS.csv": ["two"],
            "": ["two", "one"],
        }.items():
            wide.set("#chat-filter", words)
            listed(wide, *titles)
        wide.set("#chat-filter", "acorn")
        shows(wide, "#chat-list", "No chat has these words.")


def test_a_chat_of_another_tab_is_listed_when_the_window_has_the_focus_again(wide: Browser):
    other = """
        const database = await new Promise((resolve) => {
          const request = indexedDB.open("forethought");
          request.onsuccess = () => resolve(request.result);
        });
        const turn = { id: "t", parent: null, question: "elsewhere", runs: [], created: 1 };
        const chat = { id: "x", created: 1, used: 99, turns: [turn], active: {} };
        const transaction = database.transaction("conversations", "readwrite");
        transaction.objectStore("conversations").put(chat);
        await new Promise((resolve) => (transaction.oncomplete = resolve));
        database.close();
    """
    with StandIn(echo) as server:
        open_page(wide, server.address)
        asked(wide, "one")
        wide.run_async(other)
        wide.run("dispatchEvent(new Event('focus'))")
        listed(wide, "elsewhere", "one")
        asked(wide, "two")
        listed(wide, "two", "elsewhere", "one")


def test_the_rows_stay_when_the_window_has_the_focus_and_no_other_tab_did_anything(wide: Browser):
    stays = """
        const row = document.querySelector("#chat-list li");
        dispatchEvent(new Event("focus"));
        await new Promise((resolve) => setTimeout(resolve, 500));
        return row.isConnected;
    """
    with StandIn(echo) as server:
        open_page(wide, server.address)
        asked(wide, "one")
        assert wide.run_async(stays), "a row that is pressed to come back to the window is opened"
