"""Tools that the model calls: shown with arguments, result, time and error, and answered from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from page.browser import Browser
from page.stand_in import JSON, Item, StandIn, finished, started
from page.steps import ask, figure, open_page, shows, status, texts
from page.streams import answer
from page.test_hostile import MARKUP

pytestmark = pytest.mark.page

ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {}},
}
WITH_TOOLS = {**JSON, "/v1/tools": {"data": [ADD]}}


def calling(*calls: tuple[str, str]) -> Iterable[Item]:
    """A stream whose model calls tools, the arguments in two pieces."""
    yield started()
    yield answer("Let me see.")
    for index, (name, args) in enumerate(calls):
        item = {"type": "function_call", "call_id": f"c{index}", "name": name, "arguments": ""}
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        for text in (args[:3], args[3:]):
            kind = "response.function_call_arguments.delta"
            yield {"type": kind, "output_index": index, "delta": text}
    yield finished("Let me see.", finish_reason="tool_calls")


def adding(body: dict[str, Any]) -> Iterable[Item]:
    """Calls two tools at once, then answers."""
    if body["input"][-1].get("type") == "function_call_output":
        return [started(), answer("It is 31."), finished("It is 31.")]
    return calling(("add", '{"a": 30, "b": 1}'), ("evil", '{"x": "<b>"}'))


def test_calls_are_shown_as_they_run_and_the_answer_is_made_of_their_results(browser: Browser):
    with StandIn(adding, WITH_TOOLS) as server:
        open_page(browser, server.address)
        assert "add" in browser.text("#tools")
        ask(browser, "30 + 1?")
        shows(browser, ".calls summary", 'add({"a": 30, "b": 1}) running')
        assert browser.run("return document.querySelectorAll('.calls .spinner').length") == 2
        server.released.set()
        assert "plain, 20 tokens, " in status(browser, "Answered"), "those of both rounds"
        assert texts(browser, ".calls summary") == [
            'add({"a": 30, "b": 1}) 0.25 s',
            'evil({"x": "<b>"}) failed, 0.10 s',
        ]
        assert texts(browser, ".calls li:first-child .said")[1] == "31"
        assert texts(browser, ".calls li:last-child h4") == ["Arguments", "Error"]
        assert texts(browser, ".answer") == ["Let me see.\n\nIt is 31."]
        assert {"name": "add", "arguments": '{"a": 30, "b": 1}'} in server.called
        function = {"type": "function", **ADD["function"]}
        assert [body.get("tools") for body in server.requests] == [[function], [function]]
        _, said, *items = server.requests[1]["input"]
        assert said == {"role": "assistant", "content": "Let me see."}
        assert [(item["type"], item["call_id"]) for item in items] == [
            ("function_call", "c0"),
            ("function_call", "c1"),
            ("function_call_output", "c0"),
            ("function_call_output", "c1"),
        ]
        assert [item["output"] for item in items[2:]] == ["31", "Error: no tool"]
        assert figure(browser, "Prompt") == "40"
        browser.reload()
        shows(browser, ".calls summary", "0.25 s")
        shows(browser, ".answer", "It is 31.")


def test_a_model_that_never_stops_calling_is_asked_without_tools_in_the_end(browser: Browser):
    with StandIn(
        lambda body: (
            calling(("add", "{}")) if "tools" in body else [started(), answer("x"), finished("x")]
        ),
        WITH_TOOLS,
    ) as server:
        server.released.set()
        open_page(browser, server.address)
        ask(browser, "again")
        status(browser, "Answered")
        assert len(server.called) == 8
        assert ["tools" in body for body in server.requests] == [True] * 8 + [False]


def test_a_call_in_progress_is_stopped_and_tools_can_be_left_out(browser: Browser):
    with StandIn(adding, WITH_TOOLS) as server:
        open_page(browser, server.address)
        ask(browser, "30 + 1?")
        shows(browser, ".calls summary", "running")
        browser.click("#stop")
        status(browser, "Stopped")
        shows(browser, ".calls summary", "has no result")
        server.released.set()
        browser.run("document.querySelector('#use-tools').click()")
        ask(browser, "without")
        browser.wait("document.querySelectorAll('.turn').length === 2")
        status(browser, "Answered")
        assert "tools" not in server.requests[1]


def test_markup_of_a_call_and_its_result_is_shown_as_it_was_written(browser: Browser):
    hostile = f"{MARKUP}</script>\u202e"

    def once(body: dict[str, Any]) -> Iterable[Item]:
        if body["input"][-1].get("type") == "function_call_output":
            return [started(), answer("Done."), finished("Done.")]
        return calling(("echo", hostile), (MARKUP, "{}"), ("__proto__", '{"__proto__": 1}'))

    with StandIn(once, WITH_TOOLS) as server:
        server.released.set()
        open_page(browser, server.address)
        before = browser.run("return document.querySelectorAll('script, img, style, a').length")
        ask(browser, "?")
        status(browser, "Answered")
        shown = texts(browser, ".calls li:first-child .said")
        assert shown[0] == shown[1]
        assert shown[1].startswith(MARKUP)
        assert "\u202e" not in shown[1], "it would turn the direction of what follows"
        assert "<script>" in texts(browser, ".calls summary")[1]
        assert len(texts(browser, ".calls li")) == 3
        after = browser.run("return document.querySelectorAll('script, img, style, a').length")
        assert (after, browser.run("return document.title")) == (before, "forethought")
