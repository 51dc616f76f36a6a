"""What is there before a question, the chats that are kept, and the choice of a method."""

from __future__ import annotations

import json
from typing import Any

import pytest

from page.browser import Browser
from page.stand_in import PAUSE, StandIn, finished, started
from page.steps import ask, open_page, saved, shows, status, texts
from page.streams import answer, echo

pytestmark = pytest.mark.page


def test_methods_are_grouped_and_one_that_cannot_run_is_greyed_with_the_reason(browser: Browser):
    groups = """
        return [...document.querySelectorAll("#method optgroup")].map((group) =>
          [group.label, ...[...group.children].map((o) => [o.textContent, o.disabled])]);
    """
    with StandIn(echo) as server:
        open_page(browser, server.address)
        assert browser.run(groups) == [
            ["Plain decoding", ["plain", False]],
            [
                "Shorten the thought",
                ["dynasor", False],
                ["SpecReason (it needs a second, smaller model)", True],
            ],
            ["Draw samples and vote", ["majority_vote", False]],
            ["Draw samples and take the best", ["Best of n", False]],
        ]


def test_a_setting_that_a_method_needs_is_asked_for(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.set("#method", "best_of_n")
        assert "it needs a reward model" in browser.text("#about")
        browser.run("document.querySelector('#settings').open = false")
        browser.set("#question", "why?")
        browser.click("#ask")
        browser.wait("document.activeElement.name === 'reward_controller'")
        assert server.requests == []
        browser.write("judge")
        browser.click("#ask")
        status(browser, "Answered")
        assert server.requests[0]["method_params"] == {"reward_controller": "judge"}


def test_settings_are_fields_of_the_kind_and_range_that_the_server_says(browser: Browser):
    field = "const e = document.querySelector(arguments[0]); return [e.localName, e.type, e.min]"
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.set("#method", "dynasor")
        assert browser.run(field, "#parameters [name=chunk_size]") == ["input", "number", "1"]
        assert browser.run(field, "#parameters [name=effort]")[:2] == ["input", "text"]
        assert "tokens between probes" in texts(browser, "#parameters p")
        browser.set("#method", "majority_vote")
        assert texts(browser, "#parameters [name=answer] option") == ["auto", "boxed"]


def test_the_first_paint_says_what_the_server_has_and_offers_questions(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        assert "reasoner answers" in browser.text(".welcome")
        assert "4 of 5 methods run here. ngram drafts" in browser.text(".welcome")
        assert texts(browser, ".groups dt")[:2] == ["Plain decoding", "Shorten the thought"]
        assert browser.text(".chip.off") == "SpecReason (it needs a second, smaller model)"
        browser.click(".chip.off")
        assert status(browser, "SpecReason does not run here: it needs a second, smaller model.")
        assert browser.run("return document.querySelector('#method').value") == "plain"
        assert "One lane for each branch" in browser.text("#no-run")
        browser.click_button("majority_vote", ".welcome")
        assert browser.run("return document.querySelector('#method').value") == "majority_vote"
        ask(browser, "why?")
        status(browser, "Answered")
        assert not browser.run("return document.querySelector('.welcome')")
        assert browser.run("return document.querySelector('#no-run').hidden")
        browser.click("#new")
        assert browser.run("return document.querySelector('.welcome')")


def test_the_page_says_how_long_it_waits_for_the_first_token(browser: Browser):
    with StandIn(lambda body: [started(), PAUSE, answer("six"), finished("six")]) as server:
        open_page(browser, server.address)
        ask(browser, "nuts")
        shows(browser, ".note", "plain: waiting for the first token, 1 s")
        server.released.set()
        status(browser, "Answered: plain")


def test_a_system_prompt_comes_before_the_question_and_is_kept(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.set("#system", "Be brief.")
        ask(browser, "why?")
        status(browser, "Answered")
        assert server.requests[0]["input"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "why?"},
        ]
        open_page(browser, server.address)
        assert browser.run("return document.querySelector('#system').value") == "Be brief."


def asked_in_two_chats(browser: Browser) -> None:
    for question in ("one", "two"):
        browser.click("#new")
        ask(browser, question)
        shows(browser, ".answer", f"answer to {question}")
        status(browser, "Answered")


def test_chats_are_listed_found_renamed_and_deleted(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        asked_in_two_chats(browser)
        browser.click("#open-chats")
        shows(browser, "#chat-list", "one")
        assert texts(browser, "#chat-list .open > :first-child") == ["two", "one"]
        browser.set("#chat-filter", "ON")
        assert texts(browser, "#chat-list .open > :first-child") == ["one"]
        browser.click_button("Rename", "#chat-list")
        browser.set(".rename input", "my title")
        browser.click_button("Keep", "#chat-list")
        shows(browser, "#chat-list .open", "my title")
        browser.click("#chat-list .open")
        shows(browser, ".turn .answer", "answer to one")
        browser.click("#open-chats")
        browser.set("#chat-filter", "")
        browser.wait("document.querySelectorAll('#chat-list li').length === 2")
        browser.click_button("Delete", "#chat-list li:last-child")
        browser.click_button("Really?", "#chat-list li:last-child")
        browser.wait("document.querySelectorAll('#chat-list li').length === 1")
        assert not browser.run("return document.querySelector('.turn')"), "it was the one shown"
        browser.run("document.querySelector('#chats').close()")
        browser.click("#open-runs")
        browser.wait("document.querySelectorAll('#run-list li').length === 1")


def test_exported_chats_are_imported_beside_those_that_are_there(browser: Browser, tmp_path: Any):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        asked_in_two_chats(browser)
        browser.click("#open-chats")
        shows(browser, "#chat-list", "one")
        path = tmp_path / "chats.json"
        path.write_text(saved(browser, "Export all"), encoding="utf-8")
        browser.type("#import-chats", str(path))
        shows(browser, "#chats-note", "Imported 2 chats.")
        browser.wait("document.querySelectorAll('#chat-list li').length === 4")
        browser.run("document.querySelectorAll('#chat-list .open')[3].click()")
        shows(browser, ".turn .answer", "answer to one")
        assert browser.text(".run .status") == "done"


TURN = {"id": "a", "parent": None, "question": "q", "runs": [], "created": 1}
NO_CHATS = [
    {"format": "something"},
    {"conversation": {"turns": [{**TURN, "parent": "a"}], "active": {}}, "runs": []},
    {"conversation": {"turns": [TURN, {**TURN, "parent": "a"}], "active": {}}, "runs": []},
    {"conversation": {"turns": [TURN], "active": {}}, "runs": [{"record": {}, "events": []}]},
]


def test_a_file_that_holds_no_chats_is_refused(browser: Browser, tmp_path: Any):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        for content in NO_CHATS:
            path = tmp_path / "other.json"
            path.write_text(
                json.dumps({"format": "forethought chats", "version": 1, "chats": [content]})
            )
            browser.run("document.querySelector('#chats-note').textContent = ''")
            browser.type("#import-chats", str(path))
            shows(browser, "#chats-note", "This file holds no chats of forethought.")


def test_keys_open_help_chats_and_a_new_chat_but_not_while_one_types(browser: Browser):
    is_open = "return document.querySelector(arguments[0]).open"
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.press("/")
        assert browser.run("return document.activeElement.id") == "question"
        browser.press("?")
        assert not browser.run(is_open, "#help")
        assert browser.run("return document.querySelector('#question').value") == "?"
        browser.run("document.activeElement.blur()")
        browser.press("?")
        assert browser.run(is_open, "#help")
        browser.press("Escape")
        browser.wait("!document.querySelector('#help').open")
        script = """
            const [key, shiftKey] = arguments;
            const init = { key, shiftKey, ctrlKey: true, bubbles: true };
            document.body.dispatchEvent(new KeyboardEvent("keydown", init));
        """
        browser.run(script, "k", False)
        assert browser.run(is_open, "#chats")
        browser.run("document.querySelector('#chats').close()")
        ask(browser, "why?")
        status(browser, "Answered")
        browser.run(script, "O", True)
        assert not browser.run("return document.querySelector('.turn')")


SETTINGS = {
    "#method": "dynasor",
    "#parameters [name=chunk_size]": "32",
    "#sampling [name=temperature]": "0.3",
    "#system": "Be brief.",
}


def test_settings_are_exported_reset_and_imported(browser: Browser, tmp_path: Any):
    entered = "return arguments[0].map((field) => document.querySelector(field)?.value)"
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.run("document.querySelector('#settings').open = true")
        for field, value in SETTINGS.items():
            browser.set(field, value)
        assert browser.run("return document.documentElement.scrollHeight <= innerHeight")
        path = tmp_path / "settings.json"
        path.write_text(saved(browser, "Export settings"))
        browser.click("#reset-settings")
        assert browser.run(entered, [*SETTINGS]) == ["plain", None, "", ""]
        browser.type("#import-settings", str(path))
        status(browser, "Settings imported.")
        assert browser.run(entered, [*SETTINGS]) == [*SETTINGS.values()]
        path.write_text(
            '{"format": "forethought settings", "version": 1, "settings": {"fields": 5}}'
        )
        browser.type("#import-settings", str(path))
        status(browser, "This file holds no settings")
        open_page(browser, server.address)
        assert browser.run(entered, [*SETTINGS]) == [*SETTINGS.values()]


def test_a_question_that_is_not_asked_yet_outlives_a_reload(browser: Browser):
    written = "return document.querySelector('#question').value"
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.set("#question", "half a thought")
        browser.reload()
        assert browser.run(written) == "half a thought"
        browser.click("#ask")
        status(browser, "Answered")
        browser.reload()
        assert browser.run(written) == ""
