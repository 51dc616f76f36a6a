"""Answers as Markdown while they grow, long ones, and their lines."""

from __future__ import annotations

import pytest

from page.browser import Browser
from page.stand_in import StandIn, finished, started
from page.steps import ask, open_page, status, texts
from page.streams import answer, echo

pytestmark = pytest.mark.page


LONG = "".join(
    f"{number}. [step] with `code`\n\nA paragraph **{number}**.\n\n" for number in range(3000)
)
"""Beyond what the server reads at once."""


GROWS = """
    const [address, first, all] = args;
    const { MarkdownView } = await import(address + "markdown.js");
    const plain = document.createElement("div");
    const view = new MarkdownView(plain);
    document.querySelector("#views").append(plain, view.element);
    const until = async (met) => {
      while (!met()) await new Promise((resolve) => setTimeout(resolve, 10));
    };
    view.show(first, false);
    await until(() => view.shown === first);
    const before = view.element.querySelector("strong");
    view.show(all, false);
    await until(() => view.shown === all);
    view.show(all, true);
    await until(() => view.settled === 0 && !view.waits);
    const kept = before.isConnected;
    const links = view.element.querySelectorAll("a").length;
    document.querySelector("#views").replaceChildren();
    return [kept, links];
"""
"""A text that comes in two parts, and ends."""


def test_a_growing_answer_is_read_from_its_last_blocks_and_keeps_the_elements_before(
    browser: Browser,
):
    end = "[step]: https://example.org/"
    first, text = LONG[:3000], f"{LONG[:6000]}\n\n{end}\n"
    with StandIn(echo) as server:
        open_page(browser, server.address)
        kept, num_links = browser.run_async(GROWS, server.address, first, text)
        assert kept
        assert num_links == text.count("[step]") - 1, "at the end all is read once, for its links"
        begun, grown, whole = server.rendered
        assert (begun, whole) == (first, text)
        assert text.endswith(grown)
        assert len(grown) < len(text) - len(first) + 200, "what was settled is not read again"


def test_an_answer_longer_than_the_server_reads_at_once_is_markdown_to_its_end(browser: Browser):
    with StandIn(lambda body: [started(), answer(LONG), finished(LONG)]) as server:
        open_page(browser, server.address)
        ask(browser, "steps")
        status(browser, "Answered")
        browser.wait("document.querySelectorAll('.markdown p strong').length === 3000")
        assert max(map(len, server.rendered)) <= 1 << 15
        assert texts(browser, ".markdown p strong")[-1] == "2999"


def test_the_lines_of_a_paragraph_stay_lines(browser: Browser):
    text = "He uses 84.\nHe uses 12.\n\n* one\n  two"
    with StandIn(lambda body: [started(), answer(text), finished(text)]) as server:
        open_page(browser, server.address)
        ask(browser, "lines")
        status(browser, "Answered")
        browser.wait("document.querySelector('.markdown li')")
        shown = "return document.querySelector('.turn').innerText"
        assert "He uses 84.\nHe uses 12.\n" in browser.run(shown)
        assert "one\ntwo" in browser.run(shown)
