"""How much of the model's context a conversation takes, and a server that goes away."""

from __future__ import annotations

import pytest

from page.browser import Browser
from page.stand_in import JSON, PAUSE, StandIn, finished, started
from page.steps import ask, open_page, shows, status, texts
from page.streams import answer, delta, echo

pytestmark = pytest.mark.page

WITH_LIMIT = {**JSON, "/v1/models": {"data": [{"id": "reasoner", "max_model_len": 100}]}}


def test_the_context_is_counted_with_the_question_that_is_written(browser: Browser):
    narrow = "return document.querySelector('#context').classList.contains('narrow')"
    with StandIn(echo, WITH_LIMIT) as server:
        open_page(browser, server.address)
        assert browser.run("return document.querySelector('#context').hidden")
        browser.set("#question", "x" * 30)
        shows(browser, "#context-text", "Context: 30 of 100 tokens")
        browser.set("#system", "s" * 10)
        shows(browser, "#context-text", "Context: 40 of 100 tokens")
        browser.click("#ask")
        status(browser, "Answered")
        shows(browser, "#context-text", "Context: 80 of 100 tokens")
        assert not browser.run(narrow)
        browser.set("#question", "x" * 15)
        shows(browser, "#context-text", "Context: 95 of 100 tokens: 5 left for the answer")
        browser.set("#question", "x" * 30)
        shows(browser, "#context-text", "Context: 110 of 100 tokens: 10 too many")
        assert browser.run(narrow)
        assert browser.run("return document.querySelector('#context-length').style.width") == "100%"
        browser.set("#question", "")
        browser.click("#new")
        browser.set("#system", "")
        browser.wait("document.querySelector('#context').hidden")


def test_the_context_grows_with_an_answer_that_is_written(browser: Browser):
    events = [started(), delta(0.1, "", "six"), delta(0.2, "", "ty"), PAUSE, finished("sixty")]
    with StandIn(lambda body: events, WITH_LIMIT) as server:
        open_page(browser, server.address)
        ask(browser, "x" * 30)
        shows(browser, "#context-text", "Context: 32 of 100 tokens")
        server.released.set()
        status(browser, "Answered")
        shows(browser, "#context-text", "Context: 35 of 100 tokens")


def test_a_server_without_a_known_context_shows_none(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        ask(browser, "why?")
        status(browser, "Answered")
        assert browser.run("return document.querySelector('#context').hidden")


def test_the_page_says_that_the_server_is_away_and_goes_on_when_it_is_back(browser: Browser):
    away = "!document.querySelector('#offline').hidden"
    with StandIn(lambda body: [started(), answer("half"), PAUSE, finished("half")]) as server:
        open_page(browser, server.address)
        port = server.server.server_address[1]
        ask(browser, "one")
        shows(browser, ".answer", "half")
        server.server.shutdown()
        server.server.server_close()
        browser.wait(away)
        server.released.set()
        status(browser, "Answered")
        browser.set("#question", "two")
        browser.click("#ask")
        status(browser, "Failed: The server cannot be reached")
    models = {"data": [{"id": "another", "object": "model"}]}
    with StandIn(echo, {**JSON, "/v1/models": models}, port):
        browser.wait(f"!({away})")
        browser.wait("document.querySelector('#model').textContent === 'another'")
        browser.click_button("Regenerate", ".turn:last-child")
        status(browser, "Answered")
        assert texts(browser, ".answer")[-1] == "answer to two"
