"""The page in a browser, before a server that answers from scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from page.browser import Browser
from page.stand_in import Item, StandIn, finished, started
from page.steps import ask, figure, open_page, saved, shows, status, texts
from page.streams import answer, delta, echo, votes

pytestmark = pytest.mark.page


def test_an_example_runs_with_its_method_and_shows_live(browser: Browser):
    with StandIn(votes) as server:
        open_page(browser, server.address)
        browser.click(".card")
        assert browser.run("return document.querySelector('#method').value") == "dynasor"
        browser.click("#ask")
        shows(browser, ".stages li", "a probe answers 6")
        assert texts(browser, ".lane-labels button") == ["request", "branch 0", "branch 1"]
        assert browser.text(".branch-text") == "the first"
        assert browser.text(".run .status") == "running"
        server.released.set()
        status(browser, "Answered: dynasor, 30 tokens")
        assert texts(browser, ".answer") == ["It is \\boxed{6}."]
        assert figure(browser, "Reused") == "16"
        assert "is left out: it cannot change the vote" in "".join(texts(browser, ".stages li"))


def test_settings_are_sent_and_kept_for_the_next_visit(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.set("#method", "dynasor")
        browser.set("#drafter", "none")
        fields = {
            "#parameters [name=chunk_size]": "32",
            "#parameters [name=effort]": "low",
            "#parameters [name=streaming]": "true",
            "#budget-tokens": "500",
            "#budget-seconds": "2.5",
            "#sampling [name=temperature]": "0.7",
            "#sampling [name=seed]": "3",
        }
        for selector, value in fields.items():
            browser.set(selector, value)
        browser.set("#question", "why?")
        browser.click("#ask")
        status(browser, "Answered")
        assert server.requests == [
            {
                "model": "reasoner",
                "input": [{"role": "user", "content": "why?"}],
                "method": "dynasor",
                "method_params": {"chunk_size": 32, "effort": "low", "streaming": True},
                "budget": {"tokens": 500, "seconds": 2.5},
                "speculation": {"enabled": False},
                "temperature": 0.7,
                "seed": 3,
                "background": True,
                "stream": True,
                "events": True,
            }
        ]
        open_page(browser, server.address)
        assert browser.run("return document.querySelector('#drafter').value") == "none"
        assert browser.run("return document.querySelector('#sampling [name=seed]').value") == "3"


def test_stop_ends_the_request_and_keeps_what_came(browser: Browser):
    with StandIn(votes) as server:
        open_page(browser, server.address)
        ask(browser, "nuts", "majority_vote")
        shows(browser, ".stages li", "probe")
        browser.click("#stop")
        status(browser, "Stopped: majority_vote, 2 tokens")
        assert server.left.wait(60), "the work on the server is ended, too"
        assert browser.text(".run .status") == "stopped"
        assert browser.text(".branch-text") == "the first"


def test_plain_decoding_is_run_after_it_and_compared(browser: Browser):
    with StandIn(votes) as server:
        server.released.set()
        open_page(browser, server.address)
        browser.run("document.querySelector('#plain-too').checked = true")
        ask(browser, "nuts", "majority_vote")
        status(browser, "Answered: plain")
        again = server.requests[1]
        assert (again["method"], again["speculation"]) == ("plain", {"enabled": False})
        assert again["input"] == server.requests[0]["input"]
        assert figure(browser, "Against plain") == "10 tokens (25 %) less, 1.00 s (50 %) less"
        assert "−25 %" in browser.text(".comparison")
        assert texts(browser, ".glance > *") == [
            "majority_vote against plain",
            "30 against 40 tokens (25 % less)",
            "1.00 against 2.00 s (50 % less)",
            "answers 6 against six",
        ]
        assert texts(browser, ".run h2") == ["majority_vote", "plain"]
        browser.reload()
        shows(browser, ".figures dd", "10 tokens (25 %) less")


def test_a_kept_run_is_opened_compared_and_deleted(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        ask(browser, "one", "plain")
        status(browser, "Answered: plain")
        browser.click("#new")
        ask(browser, "two", "dynasor")
        status(browser, "Answered: dynasor")
        browser.click_button("Compare with…")
        shows(browser, "#run-list .open", "one")
        assert len(texts(browser, "#run-list li")) == 1, "not with itself"
        browser.click("#run-list .open")
        shows(browser, ".comparison", "another text")
        assert texts(browser, ".run h2") == ["dynasor", "plain"]
        browser.click("#open-runs")
        shows(browser, "#run-list li", "one")
        browser.wait("document.querySelectorAll('#run-list li').length === 2")
        browser.run("document.querySelectorAll('#run-list .open')[1].click()")
        shows(browser, ".turn .answer", "answer to one")
        browser.click("#open-runs")
        shows(browser, "#run-list li", "one")
        browser.click_button("Delete", "#run-list li:last-child")
        browser.click_button("Really?", "#run-list li:last-child")
        browser.wait("document.querySelectorAll('#run-list li').length === 1")


def test_an_edited_question_is_a_branch_that_says_what_it_reused(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        for question in ("one", "two"):
            ask(browser, question)
            shows(browser, ".answer", f"answer to {question}")
            status(browser, "Answered")
        browser.click_button("Edit", ".turn:last-child")
        browser.set(".edit textarea", "three")
        browser.click_button("Ask as a branch")
        shows(browser, ".answer", "answer to three")
        shown = "Answered: plain, 10 tokens, 1.00 s, 10 tokens/s, 16 of 20 prompt tokens reused"
        status(browser, shown)
        assert [m["content"] for m in server.requests[2]["input"]] == [
            "one",
            "answer to one",
            "three",
        ]
        assert texts(browser, ".beside .small") == ["2 of 2"]
        browser.click("[aria-label='Previous branch']")
        shows(browser, ".answer", "answer to two")
        assert texts(browser, ".answer") == ["answer to one", "answer to two"]
        browser.reload()
        shows(browser, ".answer", "answer to two")


def test_an_exported_page_runs_nothing_and_is_imported_again(browser: Browser, tmp_path: Any):
    evil = "<script>document.title = 'hacked'</script><img src=x onerror=alert(1)>"

    def run(body: dict[str, Any]) -> Iterable[Item]:
        return [started(), delta(0.1, "", evil), answer(evil), finished(evil)]

    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "export me")
        status(browser, "Answered")
        for label, kind in (("Save HTML", "html"), ("Save JSON", "json")):
            made = saved(browser, label)
            path = tmp_path / f"run.{kind}"
            path.write_text(made, encoding="utf-8")
            browser.click("#new")
            browser.type("#import", str(path))
            status(browser, "Imported: plain, 10 tokens")
            assert browser.text(".branch-text") == evil
            if kind == "html":
                browser.open(path.as_uri())
                assert browser.run("return document.title") == "plain: export me"
                assert browser.run("return document.scripts.length") == 1, "its data"
                assert evil in texts(browser, "pre")
                assert browser.run("return document.querySelector('img').src.slice(0, 10)") == (
                    "data:image"
                )
                open_page(browser, server.address)
                browser.click("#open-runs")
                shows(browser, "#run-list .open", "export me")
                browser.click("#run-list .open")
                shows(browser, ".run h2", "plain")
                browser.wait("!document.querySelector('#runs').open")
            else:
                assert json.loads(made)["record"]["request"]["messages"][0]["content"] == (
                    "export me"
                )


def test_a_file_that_holds_no_run_is_refused(browser: Browser, tmp_path: Any):
    path = tmp_path / "other.json"
    path.write_text('{"format": "something"}')
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.type("#import", str(path))
        shows(browser, "#runs-note", "This file holds no run of forethought.")


def test_the_page_says_why_speculation_is_off_and_colours_what_drafters_wrote(browser: Browser):
    def run(body: dict[str, Any]) -> Iterable[Item]:
        if body.get("speculation") == {"enabled": False}:
            yield started(reason="the request switches drafts off")
            yield finished("a", tokens=100, at=1.0)
            return
        yield started("plain", "ngram")
        drafts = [[2, 4, True, "ngram"], [4, 4, False, "ngram", "zz"]]
        yield delta(0.1, "", "abcdef", drafts=drafts)
        counts = {"steps": 10, "drafted": 40, "accepted": 12, "accepted_by_position": [8, 4]}
        yield finished("abcdef", at=2.0, tokens=100, speculation=counts)

    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "draft")
        status(browser, "Answered")
        assert "ngram: 12 of 40 draft tokens accepted, 2.20 tokens" in browser.text(".speculation")
        assert texts(browser, ".branch-text .draft") == ["cd", "e"]
        assert browser.text(".branch-text") == "abcdef"
        title = "return document.querySelector('.rejected').title"
        assert browser.run(title) == 'ngram proposed "zz" here: rejected'
        browser.click_button("Run plain too")
        status(browser, "Answered: plain, 100 tokens, 1.00 s")
        lost, off = texts(browser, ".speculation")
        assert "20.00 ms a token against 10.00 ms without: it lost" in lost
        assert off == "Speculation Off: the request switches drafts off"


@pytest.mark.parametrize(
    ("stream", "shown"),
    [
        (ValueError("method 'x' has no parameter 'y'"), "method 'x' has no parameter 'y'"),
        (
            [started(), {"type": "error", "at": 0.1, "message": "a worker failed"}],
            "a worker failed",
        ),
    ],
)
def test_a_refusal_or_failure_is_shown_and_the_next_question_works(
    browser: Browser, stream: Any, shown: str
):
    def run(body: dict[str, Any]) -> Iterable[Item]:
        if body["input"][-1]["content"] != "fail":
            return echo(body)
        if isinstance(stream, Exception):
            raise stream
        return list(stream)

    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "fail")
        assert shown in status(browser, "Failed: ")
        browser.click("#new")
        ask(browser, "again")
        status(browser, "Answered")


def test_everything_is_done_with_the_keyboard_alone(browser: Browser):
    with StandIn(votes) as server:
        open_page(browser, server.address)
        focused = "return document.activeElement.id || document.activeElement.textContent"
        browser.press("Tab")
        assert browser.run(focused) == "Skip to the question"
        browser.press("Enter")
        browser.run("document.querySelector('#method').focus()")
        browser.press("m")
        assert browser.run("return document.querySelector('#method').value") == "majority_vote"
        browser.run("document.querySelector('#question').focus()")
        browser.write("nuts")
        browser.press("Enter")
        shows(browser, ".stages li", "probe")
        outline = "return getComputedStyle(document.activeElement).outlineStyle"
        assert browser.run(outline) == "solid"
        browser.press("Escape")
        status(browser, "Stopped")
        server.released.set()
        browser.run("document.querySelector('.lane-labels [tabindex=\"0\"]').focus()")
        browser.press("End")
        shows(browser, ".branch-text", "the second")
        assert browser.run("return document.activeElement.textContent") == "branch 1"
        browser.press("Up", "Up")
        assert browser.run("return document.activeElement.textContent") == "request"
        browser.run("document.querySelector('#open-runs').focus()")
        browser.press("Enter")
        shows(browser, "#run-list .open", "nuts")
        assert browser.run(
            "return document.querySelector('#runs').contains(document.activeElement)"
        )
        browser.press("Escape")
        browser.wait("!document.querySelector('#runs').open")
        assert browser.run(focused) == "open-runs"


OUTSIDE = """
    const controls = [...document.querySelectorAll("button, input, select, textarea, summary")];
    const isOutside = (box) => box.width && (box.left < 0 || box.right > innerWidth + 0.5);
    return controls.filter((c) => c.offsetParent && isOutside(c.getBoundingClientRect()))
      .map((c) => c.outerHTML);
"""
"""The controls of which a part is beside the window."""


def test_the_page_fits_a_phone_and_follows_the_colours_asked_for(browser: Browser):
    with StandIn(votes) as server:
        server.released.set()
        open_page(browser, server.address)
        ask(browser, "nuts", "majority_vote")
        status(browser, "Answered")
        background = "return getComputedStyle(document.documentElement).backgroundColor"
        try:
            browser.resize(360, 740)
            fits = "document.documentElement.scrollWidth <= innerWidth"
            browser.wait(fits)
            assert browser.run(OUTSIDE) == []
            browser.run("document.querySelector('#settings').open = true")
            for dialog in ("chats", "runs", "help"):
                browser.click(f"#open-{dialog}")
                assert browser.run(OUTSIDE) == []
                browser.press("Escape")
            browser.click("#new")
            assert browser.run(OUTSIDE) == []
            browser.media(prefers_color_scheme="dark")
            assert browser.run(background) == "rgb(19, 20, 22)"
            browser.click("#theme")
            assert browser.run(background) == "rgb(252, 252, 251)"
            assert browser.text("#theme") == "Theme: light"
        finally:
            browser.media()
            browser.resize(1280, 800)


def test_nothing_is_loaded_from_elsewhere(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        names = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        loaded = browser.run(names)
        assert len(loaded) > 10
        assert all(name.startswith(server.address) for name in loaded)
        inline = "return document.querySelectorAll('script:not([src]), style, [style]').length"
        assert browser.run(inline) <= 7, "sizes of canvases and bars, set by scripts"


def test_a_frame_of_64_branches_paints_only_what_is_new(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        counts = browser.run_async(
            """
            const { Run } = await import(args[0] + "run.js");
            const { Timeline } = await import(args[0] + "timeline.js");
            const request = { model: "m", messages: [{ role: "user", content: "q" }] };
            const run = new Run({ id: "a", created: 0, request });
            run.apply({ type: "started", at: 0 });
            const piece = (i, branch) => run.apply({
              type: "delta", at: i / 100, branch: String(branch), text: "word ", num_tokens: 1,
              drafts: i % 3 ? [] : [[0, 4, true, "ngram"]],
            });
            for (let i = 0; i < 2000; i++) for (let b = 0; b < 64; b++) piece(i, b);
            const place = document.querySelector("#views");
            const timeline = new Timeline(place, () => {});
            timeline.show(run);
            const paint = CanvasRenderingContext2D.prototype.fillRect;
            let painted = 0;
            CanvasRenderingContext2D.prototype.fillRect = function (...box) {
              painted++;
              return paint.apply(this, box);
            };
            timeline.frame();
            const idle = painted;
            for (let b = 0; b < 64; b++) piece(2000, b);
            timeline.frame();
            const grown = painted - idle;
            CanvasRenderingContext2D.prototype.fillRect = paint;
            place.replaceChildren();
            return [idle, grown];
            """,
            server.address,
        )
        idle, grown = counts
        assert idle == 0, "what moves is painted by no canvas"
        assert 64 <= grown <= 3 * 65, "at most line, text and draft of each lane"
