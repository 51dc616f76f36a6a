"""Runs that go on while the page is away, and that it finds again."""

from __future__ import annotations

import pytest

from http_servers import eventually
from page.browser import Browser
from page.stand_in import StandIn
from page.steps import ask, open_page, shows, status, texts
from page.streams import echo, votes
from page.test_tools import WITH_TOOLS, adding

pytestmark = pytest.mark.page

ANSWER = "It is \\boxed{6}."


def begun(browser: Browser, server: StandIn) -> None:
    """A vote that is asked for, and has come to its middle."""
    open_page(browser, server.address)
    ask(browser, "nuts", "majority_vote")
    shows(browser, ".stages li", "a probe answers 6")


def test_a_run_goes_on_through_a_reload(browser: Browser):
    with StandIn(votes) as server:
        begun(browser, server)
        browser.reload()
        status(browser, "The run with majority_vote goes on.")
        assert texts(browser, ".turn > .said:not(.answer)") == ["nuts"]
        assert browser.text(".branch-text") == "the first"
        assert browser.text(".run .status") == "running"
        server.released.set()
        status(browser, "Answered: majority_vote, 30 tokens")
        assert texts(browser, ".answer") == [ANSWER]
        assert len(server.requests) == 1
        browser.reload()
        shows(browser, ".answer", ANSWER)
        assert browser.text(".run .status") == "done"
        assert browser.text(".branch-text") == "the first", "no event is there twice"
        browser.wait("fetch('/v1/responses/resp_1?starting_after=0').then((r) => r.status === 404)")


def test_a_run_goes_on_while_another_chat_is_shown(browser: Browser):
    with StandIn(votes) as server:
        begun(browser, server)
        browser.click("#new")
        ask(browser, "other", "plain")
        status(browser, "Answered: plain")
        server.released.set()
        browser.click("#open-chats")
        shows(browser, "#chat-list .open", "nuts")
        browser.run("document.querySelector('#chat-list li:last-child .open').click()")
        status(browser, "Answered: majority_vote, 30 tokens")
        assert texts(browser, ".answer") == [ANSWER]
        assert not server.left.is_set()


def test_a_run_that_was_found_again_is_stopped(browser: Browser):
    with StandIn(votes) as server:
        begun(browser, server)
        browser.reload()
        status(browser, "The run with")
        browser.click("#stop")
        status(browser, "Stopped: majority_vote, 2 tokens")
        assert server.left.wait(60)


def test_a_lost_connection_is_made_again(browser: Browser):
    with StandIn(votes) as server:
        begun(browser, server)
        server.cut.set()
        browser.wait(
            "performance.getEntriesByType('resource').some((e) => e.name.includes('after='))"
        )
        server.cut.clear()
        server.released.set()
        status(browser, "Answered: majority_vote, 30 tokens")
        assert browser.text(".branch-text") == "the first"
        assert texts(browser, ".answer") == [ANSWER]


def test_a_run_that_the_server_has_forgotten_has_failed(browser: Browser):
    with StandIn(votes) as server:
        begun(browser, server)
        server.kept.clear()
        browser.reload()
        status(browser, "Failed: The server does not have this run any more")
        assert browser.text(".branch-text") == "the first"
        server.released.set()
        browser.click_button("Regenerate")
        status(browser, "Answered: ")


def test_a_chat_that_is_deleted_ends_its_run(browser: Browser):
    with StandIn(votes) as server:
        begun(browser, server)
        browser.click("#open-chats")
        shows(browser, "#chat-list .open", "nuts")
        browser.click_button("Delete", "#chat-list")
        browser.click_button("Really?", "#chat-list")
        assert server.left.wait(60)
        shows(browser, "#chat-list", "There is none yet")
        assert texts(browser, ".turn") == []


def test_tools_that_were_called_when_the_page_was_left_are_not_called_again(browser: Browser):
    with StandIn(adding, WITH_TOOLS) as server:
        open_page(browser, server.address)
        ask(browser, "30 + 1?")
        eventually(lambda: len(server.called) == 2)
        browser.reload()
        shows(browser, ".run .status", "interrupted")
        shows(browser, ".calls summary", "has no result")
        assert len(server.called) == 2


def test_the_events_of_a_run_are_kept_by_one_tab_alone(browser: Browser):
    with StandIn(votes) as server:
        server.released.set()
        open_page(browser, server.address)
        browser.run("navigator.locks.request = (name, options, use) => use(null)")
        ask(browser, "nuts", "majority_vote")
        status(browser, "Answered")
        browser.reload()
        shows(browser, ".run .status", "interrupted")
        assert texts(browser, ".answer") == [""]


def test_what_two_tabs_ask_in_one_chat_is_all_kept(browser: Browser):
    """The other tab asks after the turn that both have read, and again in it."""
    other = """
        const database = await new Promise((resolve) => {
          const request = indexedDB.open("forethought");
          request.onsuccess = () => resolve(request.result);
        });
        const transaction = database.transaction("conversations", "readwrite");
        const chats = transaction.objectStore("conversations");
        const chat = await new Promise((resolve) => {
          chats.getAll().onsuccess = ({ target }) => resolve(target.result[0]);
        });
        const [turn] = chat.turns;
        turn.runs.push("unread");
        const next = { id: "t", parent: turn.id, question: "elsewhere", runs: [], created: 1 };
        const orphan = { ...next, id: "orphan", parent: "deleted" };
        chats.put({ ...chat, turns: [turn, next, orphan] });
        await new Promise((resolve) => (transaction.oncomplete = resolve));
        database.close();
    """
    turns = """
        const database = await new Promise((resolve) => {
          const request = indexedDB.open("forethought");
          request.onsuccess = () => resolve(request.result);
        });
        const chats = database.transaction("conversations").objectStore("conversations");
        const [chat] = await new Promise((resolve) => {
          chats.getAll().onsuccess = ({ target }) => resolve(target.result);
        });
        database.close();
        return chat.turns.map((turn) => `${turn.question} ${turn.runs.indexOf("unread")}`);
    """
    with StandIn(echo) as server:
        open_page(browser, server.address)
        ask(browser, "one")
        status(browser, "Answered")
        browser.run_async(other)
        ask(browser, "two")
        shows(browser, ".turn:last-child .answer", "answer to two")
        status(browser, "Answered")
        assert sorted(browser.run_async(turns)) == ["elsewhere -1", "one 0", "two -1"]
        browser.click_button("Delete", ".turn:last-child")
        browser.click_button("Really?", ".turn:last-child")
        eventually(lambda: sorted(browser.run_async(turns)) == ["elsewhere -1", "one 0"])
