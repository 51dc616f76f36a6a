"""The page in a browser, before a server that answers from scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from page.browser import Browser
from page.stand_in import PAUSE, Item, StandIn, finished, started
from page.steps import ask, figure, open_page, shows, status, texts

pytestmark = pytest.mark.page


def stage(at: float, branch: str, name: str, why: str = "", /, **fields: Any) -> dict[str, Any]:
    return {
        "type": "stage",
        "at": at,
        "branch": branch,
        "name": name,
        "why": why,
        "fields": fields,
    }


def delta(at: float, branch: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": "delta", "at": at, "branch": branch, "text": text, "num_tokens": 1, **more}


def answer(text: str) -> dict[str, Any]:
    return {"type": "answer", "text": text}


def votes(body: dict[str, Any]) -> Iterable[Item]:
    """Two samples that vote, with a pause in the middle; plainly: one text."""
    if body["method"] == "plain":
        return [started(), answer("six"), finished("six", at=2.0, tokens=40)]
    return [
        started("majority_vote", "ngram"),
        stage(0.0, "0", "spawned", "Plain"),
        stage(0.0, "1", "spawned", "Plain"),
        delta(0.1, "0", "the first"),
        delta(0.2, "1", "the second"),
        stage(0.2, "1", "probed", answer="6"),
        PAUSE,
        stage(0.4, "0", "voted", answer="6"),
        stage(0.4, "0", "ended", "done"),
        stage(0.5, "1", "pruned", "it cannot change the vote"),
        stage(0.5, "1", "ended", "cancelled"),
        answer("It is 6."),
        finished("It is 6.", at=1.0, tokens=30),
    ]


def echo(body: dict[str, Any]) -> Iterable[Item]:
    text = f"answer to {body['messages'][-1]['content']}"
    return [started(body["method"]), answer(text), finished(text)]


def test_an_example_runs_with_its_method_and_shows_live(browser: Browser):
    with StandIn(votes) as server:
        open_page(browser, server.address)
        browser.click_button("Nuts")
        assert browser.run("return document.querySelector('#method').value") == "dynasor"
        browser.click("#ask")
        shows(browser, ".stages li", "a probe answers 6")
        assert texts(browser, ".lane-labels button") == ["request", "branch 0", "branch 1"]
        assert browser.text(".branch-text") == "the first"
        assert browser.text(".run .status") == "running"
        server.released.set()
        status(browser, "Answered: dynasor, 30 tokens")
        assert texts(browser, ".answer") == ["It is 6."]
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
            "#temperature": "0.7",
            "#seed": "3",
        }
        for selector, value in fields.items():
            browser.set(selector, value)
        browser.set("#question", "why?")
        browser.click("#ask")
        status(browser, "Answered")
        assert server.requests == [
            {
                "model": "reasoner",
                "messages": [{"role": "user", "content": "why?"}],
                "method": "dynasor",
                "method_params": {"chunk_size": 32, "effort": "low", "streaming": True},
                "budget": {"tokens": 500, "seconds": 2.5},
                "speculation": {"enabled": False},
                "temperature": 0.7,
                "seed": 3,
                "stream": True,
                "stream_options": {"include_usage": True},
                "events": True,
            }
        ]
        open_page(browser, server.address)
        assert browser.run("return document.querySelector('#drafter').value") == "none"
        assert browser.run("return document.querySelector('#seed').value") == "3"


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


def test_stop_ends_the_request_and_keeps_what_came(browser: Browser):
    with StandIn(votes) as server:
        open_page(browser, server.address)
        ask(browser, "nuts", "majority_vote")
        shows(browser, ".stages li", "probe")
        browser.click("#stop")
        status(browser, "Stopped: majority_vote, 2 tokens")
        assert server.left.wait(60), "closing the connection is what ends the work on the server"
        assert browser.text(".run .status") == "stopped"
        assert browser.text(".branch-text") == "the first"


def test_a_reload_in_the_middle_shows_what_was_there(browser: Browser):
    with StandIn(votes) as server:
        open_page(browser, server.address)
        ask(browser, "nuts", "majority_vote")
        shows(browser, ".stages li", "probe")
        browser.reload()
        shows(browser, ".run .status", "interrupted")
        assert texts(browser, ".turn > .said:not(.answer)") == ["nuts"]
        assert browser.text(".branch-text") == "the first"
        assert "interrupted" in browser.text(".note")
        server.released.set()
        browser.click_button("Ask again")
        status(browser, "Answered: ")
        browser.reload()
        shows(browser, ".answer", "It is 6.")
        assert browser.text(".run .status") == "done"


def test_plain_decoding_is_run_after_it_and_compared(browser: Browser):
    with StandIn(votes) as server:
        server.released.set()
        open_page(browser, server.address)
        browser.run("document.querySelector('#plain-too').checked = true")
        ask(browser, "nuts", "majority_vote")
        status(browser, "Answered: plain")
        again = server.requests[1]
        assert (again["method"], again["speculation"]) == ("plain", {"enabled": False})
        assert again["messages"] == server.requests[0]["messages"]
        assert figure(browser, "Against plain") == "10 tokens (25 %) less, 1.00 s (50 %) less"
        assert "−25 %" in browser.text(".comparison")
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
        shows(browser, ".run-list .open", "one")
        assert len(texts(browser, ".run-list li")) == 1, "not with itself"
        browser.click(".run-list .open")
        shows(browser, ".comparison", "another text")
        assert texts(browser, ".run h2") == ["dynasor", "plain"]
        browser.click("#open-runs")
        shows(browser, ".run-list li", "one")
        browser.wait("document.querySelectorAll('.run-list li').length === 2")
        browser.run("document.querySelectorAll('.run-list .open')[1].click()")
        shows(browser, ".turn .answer", "answer to one")
        browser.click("#open-runs")
        shows(browser, ".run-list li", "one")
        browser.click_button("Delete", "#run-list li:last-child")
        browser.wait("document.querySelectorAll('.run-list li').length === 1")


def test_an_edited_question_is_a_branch_that_says_what_it_reused(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        for question in ("one", "two"):
            ask(browser, question)
            shows(browser, ".answer", f"answer to {question}")
            status(browser, "Answered")
        browser.run("document.querySelectorAll('.turn')[1].querySelector('button').click()")
        browser.set(".edit textarea", "three")
        browser.click_button("Ask as a branch")
        shows(browser, ".answer", "answer to three")
        status(browser, "Answered: plain, 10 tokens, 1.00 s, 16 of 20 prompt tokens reused")
        assert [m["content"] for m in server.requests[2]["messages"]] == [
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
                shows(browser, ".run-list .open", "export me")
                browser.click(".run-list .open")
                shows(browser, ".run h2", "plain")
                browser.wait("!document.querySelector('#runs').open")
            else:
                assert json.loads(made)["record"]["request"]["messages"][0]["content"] == (
                    "export me"
                )


def saved(browser: Browser, label: str) -> str:
    """The text of the file that a button offers."""
    return str(
        browser.run_async(
            """
            const [make, click] = [URL.createObjectURL, HTMLAnchorElement.prototype.click];
            let file = null;
            URL.createObjectURL = (blob) => ((file = blob), make.call(URL, blob));
            HTMLAnchorElement.prototype.click = () => {};
            const all = [...document.querySelectorAll("button")];
            all.find((button) => button.textContent === args[0]).click();
            [URL.createObjectURL, HTMLAnchorElement.prototype.click] = [make, click];
            return file.text();
            """,
            label,
        )
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


def searched(body: dict[str, Any]) -> Iterable[Item]:
    """Two beams that stream at once; one is pruned, the other goes on after the pause."""
    yield started("beam_search")
    for token in ("step ", "one"):
        for number in (0, 1):
            yield delta(0.2, "", f"{token}{number} ", fields={"beam": [number]})
    yield delta(0.4, "", "sure", fields={"beam": [0], "aside": "judgement 0"})
    for number, score in ((0, 0.9), (1, 0.1)):
        fields = {"text": f"step {number} one{number} \n\n", "finished": False}
        yield stage(0.5, "", "scored", beam=[number], score=score, **fields)
    yield stage(0.6, "", "pruned", "it is not among the best 1", beam=[1], score=0.1, text="")
    yield delta(0.7, "", "step two", fields={"beam": [0, 0]})
    yield PAUSE
    yield stage(0.9, "", "scored", beam=[0, 0], score=0.8, text="step two.", finished=True)
    yield stage(0.9, "", "selected", beam=[0, 0], score=0.8, text="step two.", finished=True)
    yield finished("two")


def test_each_beam_of_a_search_streams_into_a_lane_of_its_own(browser: Browser):
    with StandIn(searched) as server:
        open_page(browser, server.address)
        ask(browser, "search", "majority_vote")
        lanes = ["request", "beam 0", "beam 0.0", "beam 1"]
        browser.wait("document.querySelectorAll('.lane-labels button').length === 4")
        assert texts(browser, ".lane-labels button") == lanes
        browser.click_button("beam 1", ".lane-labels")
        assert browser.text(".branch-text") == "step 1 one1 \n\n"
        pruned = texts(browser, ".lane-labels [data-state=pruned]")
        assert pruned == ["beam 1"]
        browser.click_button("beam 0", ".lane-labels")
        assert texts(browser, ".asides > *") == ["judgement 0", "sure"]
        browser.click_button("beam 0.0", ".lane-labels")
        assert browser.text(".branch-text") == "step 0 one0 \n\nstep two", "with the step before"
        server.released.set()
        status(browser, "Answered")
        assert texts(browser, ".lane-labels [data-state=won]") == ["beam 0.0 ✓ chosen"]
        assert browser.text(".branch-text").endswith("step two.")


def test_lanes_of_pruned_beams_fade_and_can_be_left_out(browser: Browser):
    def run(body: dict[str, Any]) -> Iterable[Item]:
        yield started("beam_search")
        for number in range(16):
            yield delta(0.5, "", "a step", fields={"beam": [number]})
        yield PAUSE
        for number in range(12):
            yield stage(0.9, "", "pruned", "too low", beam=[number], score=0.1, text="a step")
        yield finished("two")

    ink = """
        const canvas = document.querySelector(".plot canvas"), ratio = canvas.height / (17 * 24);
        const copy = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
        const copied = copy.getContext("2d", { willReadFrequently: true });
        copied.drawImage(canvas, -canvas.width / 3, -(24 + 15) * ratio);
        return copied.getImageData(0, 0, 1, 1).data[3];
    """
    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "search", "majority_vote")
        browser.wait("document.querySelectorAll('.lane-labels button').length === 17")
        painted = browser.run(ink)
        server.released.set()
        status(browser, "Answered")
        browser.wait("document.querySelectorAll('.lane-labels [data-state=pruned]').length === 12")
        assert 0 < browser.run(ink) < painted
        browser.click_button("Hide 12 pruned")
        assert len(texts(browser, ".lane-labels button")) == 5
        browser.click_button("Show 12 pruned")
        assert len(texts(browser, ".lane-labels button")) == 17


def test_votes_are_bars_that_grow_and_the_winner_is_named(browser: Browser):
    def run(body: dict[str, Any]) -> Iterable[Item]:
        yield started("majority_vote")
        for number in range(4):
            yield stage(0.0, str(number), "spawned", "Plain")
        yield stage(0.3, "0", "voted", answer="7", tally={"7": 1})
        yield stage(0.4, "2", "voted", answer="6", tally={"7": 1, "6": 1})
        yield stage(0.5, "1", "voted", answer="6", tally={"7": 1, "6": 2})
        yield PAUSE
        yield stage(0.6, "3", "voted", answer="6", tally={"7": 1, "6": 3})
        yield stage(0.6, "", "voted", answer="6", tally={"7": 1, "6": 3})
        yield finished("six")

    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "vote", "majority_vote")
        shows(browser, ".votes .vote-count", "2 · 67 %")
        assert texts(browser, ".votes .vote-answer") == ["6 (leads)", "7"]
        assert browser.text(".votes p") == "More samples may vote."
        shows(browser, ".note", "6 leads (2 of 3)")
        server.released.set()
        status(browser, "Answered")
        assert texts(browser, ".votes .vote-count") == ["3 · 75 %", "1 · 25 %"]
        width = "return document.querySelector('.votes .length').style.width"
        assert browser.run(width) == "75%"
        assert browser.text(".votes p") == "The answer is 6; its text is that of branch 2."
        assert texts(browser, ".lane-labels [data-state=won]") == ["branch 2 ✓ chosen"]


SAID = [
    (("probed", "", {"answer": "6", "at": 210, "agreeing": 2}), "a probe after 210 tokens answers 6; 2 probes in a row agree"),
    (("early_exit", "2 probes in a row agree", {"answer": "6", "at": 180}), "ends early with 6: 2 probes in a row agree; 180 tokens are kept"),
    (("scored", "", {"beam": [1], "score": 0.213, "finished": True}), "has score 0.21: a whole answer"),
    (("scored", "", {"step": 2, "score": 7.0, "accepted": False}), "step 2 of the small model has 7 and is written again"),
    (("pruned", "it was not drawn", {"beam": [1], "score": 0.213}), "is pruned with score 0.21: it was not drawn"),
    (("pruned", "the judge prefers another", {"answer": 2, "winner": 0}), "answer 2 loses against answer 0: the judge prefers another"),
    (("voted", "", {"answer": "6", "tally": {"6": 2, "7": 1}}), "votes for 6, which has 2 of 3 votes now"),
    (("selected", "", {"method": "majority_vote@8"}), "the policy chooses majority_vote@8"),
    (("prolonged", "", {"at": 1, "waits": 2}), "would have ended its thought after 1 token and goes on (2nd time)"),
    (("retrieved", "", {"query": "who?", "documents": [1, 4]}), "finds documents 1, 4 for who?"),
    (("called", "add", {"args": "{}", "result": "3", "is_error": False}), "calls add({}): 3"),
    (("layer", "", {"number": 0, "types": ["generator"], "candidates": 5}), "layer 0 (generator) leaves 5 candidates"),
    (("own_stage", "for a reason", {"some_size": 3}), "own stage: for a reason: some size 3"),
]  # fmt: skip


def test_decisions_are_told_in_words(browser: Browser):
    def run(body: dict[str, Any]) -> Iterable[Item]:
        yield started("dynasor")
        for (name, why, fields), _ in SAID:
            yield stage(0.1, "0", name, why, **fields)
        yield finished("six")

    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "decide", "dynasor")
        status(browser, "Answered")
        assert texts(browser, ".stages li > :last-child") == [sentence for _, sentence in SAID]


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
        if body["messages"][-1]["content"] != "fail":
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
        shows(browser, ".run-list .open", "nuts")
        assert browser.run(
            "return document.querySelector('#runs').contains(document.activeElement)"
        )
        browser.press("Escape")
        browser.wait("!document.querySelector('#runs').open")
        assert browser.run(focused) == "open-runs"


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
