"""The lanes of a run, its votes and its decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from page.browser import Browser
from page.stand_in import PAUSE, Item, StandIn, finished, started
from page.steps import ask, open_page, shows, status, texts
from page.streams import answer, delta, stage

pytestmark = pytest.mark.page


FIRST_STEP = "{}:" + "." * 19 + " (end)"


def searched(body: dict[str, Any]) -> Iterable[Item]:
    """Two beams that stream at once; one is pruned, the other goes on twice after the pause."""
    yield started("beam_search")
    for count in range(20):
        for number in (0, 1):
            yield delta(0.02 * count, "", "." if count else f"{number}:", fields={"beam": [number]})
    yield delta(0.4, "", "sure", fields={"beam": [0], "aside": "judgement 0"})
    for number, score in ((0, 0.9), (1, 0.1)):
        text = FIRST_STEP.format(number)
        yield stage(0.5, "", "scored", beam=[number], score=score, text=text, finished=False)
    yield PAUSE
    yield stage(0.6, "", "pruned", "it is not among the best 1", beam=[1], score=0.1, text="")
    for number in (0, 1):
        yield delta(0.8, "", f"then {number}", fields={"beam": [0, number]})
        yield stage(0.9, "", "scored", beam=[0, number], score=0.8, text=f"then {number}.")
    yield stage(0.9, "", "selected", beam=[0, 1], score=0.8, text="then 1.", finished=True)
    yield finished("two")


def test_each_beam_of_a_search_streams_into_a_lane_of_its_own(browser: Browser):
    with StandIn(searched) as server:
        open_page(browser, server.address)
        ask(browser, "search", "majority_vote")
        browser.wait("document.querySelectorAll('.lane-labels button').length === 3")
        assert texts(browser, ".lane-labels button") == ["request", "beam 0", "beam 1"]
        shows(browser, ".stages li", "has score 0.10")
        browser.click_button("beam 1", ".lane-labels")
        assert browser.text(".branch-text") == FIRST_STEP.format(1)
        browser.click_button("beam 0", ".lane-labels")
        assert texts(browser, ".asides > *") == ["judgement 0", "sure"]
        server.released.set()
        shows(browser, ".branch-text", FIRST_STEP.format(0) + "then 0.")
        status(browser, "Answered")
        lanes = ["request", "beam 0", "beam 1 ✓ chosen"]
        assert texts(browser, ".lane-labels button") == lanes, "a lane of a pruned beam is taken"
        browser.click_button("beam 1 ✓ chosen", ".lane-labels")
        assert browser.text(".branch-text") == FIRST_STEP.format(0) + "then 1."


def test_a_step_of_a_beam_that_was_pruned_fades_and_is_shown_where_its_lane_is_clicked(
    browser: Browser,
):
    opacity = """
        const plot = document.querySelector(".plot canvas"), ratio = plot.height / (3 * 24);
        const copy = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
        const copied = copy.getContext("2d", { willReadFrequently: true });
        const x = arguments[0] * plot.width, y = ((arguments[1] + 0.5) * 24 + 5) * ratio;
        copied.drawImage(plot, -x, -y);
        return copied.getImageData(0, 0, 1, 1).data[3];
    """
    click = """
        const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
        const [clientX, clientY] = [box.left + 0.1 * box.width, box.top + 2.5 * 24];
        plot.dispatchEvent(new MouseEvent("click", { clientX, clientY, bubbles: true }));
    """
    with StandIn(searched) as server:
        server.released.set()
        open_page(browser, server.address)
        ask(browser, "search", "majority_vote")
        status(browser, "Answered")
        browser.wait("document.querySelector('.plot canvas').height > 70")
        kept, pruned = browser.run(opacity, 0.1, 1), browser.run(opacity, 0.1, 2)
        assert 0 < pruned < kept
        browser.run(click)
        assert browser.text(".branch-text") == FIRST_STEP.format(1)
        shows(browser, ".run h3", "Text of beam 1, pruned")


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


def test_answers_of_probes_are_bars_until_they_agree(browser: Browser):
    def run(body: dict[str, Any]) -> Iterable[Item]:
        yield started("dynasor")
        for number, given in enumerate(("7", "7", "6")):
            yield stage(0.1, "", "probed", answer=given, at=16 * number, agreeing=1)
        yield PAUSE
        yield stage(0.2, "", "early_exit", "the probes agree", answer="6", at=48)
        yield finished("six")

    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "probe", "dynasor")
        shows(browser, ".votes .vote-count", "1 · 33 %")
        assert texts(browser, ".votes .vote-answer") == ["7", "6"]
        server.released.set()
        status(browser, "Answered")
        assert texts(browser, ".votes .vote-answer") == ["6 (won)", "7"]
        assert browser.text(".votes p") == "The thought ends with 6: the probes agree."


CROSSED = """
    const { Run } = await import(args[0] + "run.js");
    const { Timeline } = await import(args[0] + "timeline.js");
    const request = { model: "m", messages: [{ role: "user", content: "q" }] };
    const run = new Run({ id: "a", created: 0, request });
    run.apply({ type: "started", at: 0 });
    for (let i = 1; i <= 20; i++) {
      run.apply({ type: "delta", at: i / 20, branch: "", text: "word ", num_tokens: 8 });
      const fields = { answer: i % 3 ? "hmm" : "12345", at: 8 * i, agreeing: 1 };
      run.apply({ type: "stage", at: i / 20, branch: "", name: "probed", why: "", fields });
    }
    run.apply({ type: "finished", at: 1 });
    const [texts, marks] = [[], []];
    const { fillRect, fillText } = CanvasRenderingContext2D.prototype;
    const place = document.querySelector("#views");
    const box = Object.assign(document.createElement("div"), { className: "timeline" });
    place.replaceChildren(box);
    const timeline = new Timeline(box, () => {});
    CanvasRenderingContext2D.prototype.fillRect = function (x, y, w, h) {
      if (this.canvas === timeline.base) marks.push([x, y, x + w, y + h]);
    };
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
      const width = this.measureText(text).width;
      if (this.canvas === timeline.base) texts.push([x, y - 8, x + width, y]);
    };
    timeline.show(run);
    Object.assign(CanvasRenderingContext2D.prototype, { fillRect, fillText });
    place.replaceChildren();
    const meet = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
    const all = [...marks, ...texts];
    const crossed = texts.filter((text) => all.some((o) => o !== text && meet(text, o)));
    return [texts.length, crossed];
"""
"""Labels painted at a narrow width, and those that a mark or another label crosses."""


def test_no_mark_crosses_the_label_of_another_on_a_phone(browser: Browser):
    with StandIn(searched) as server:
        open_page(browser, server.address)
        try:
            browser.resize(360, 740)
            num_labels, crossed = browser.run_async(CROSSED, server.address)
        finally:
            browser.resize(1280, 800)
        assert num_labels > 1
        assert crossed == []


def test_workers_and_threads_write_into_lanes_of_their_own(browser: Browser):
    def run(body: dict[str, Any]) -> Iterable[Item]:
        yield started("hogwild")
        for number, name in enumerate(("Alice", "Bob")):
            yield delta(0.1, "", f"I am {name}", fields={"worker": number, "name": name})
        yield delta(0.2, "", "a thread", fields={"thread": 2})
        yield PAUSE
        yield delta(0.9, "", "six")
        yield answer("six")
        yield finished("six")

    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "together")
        shows(browser, ".lane-labels button", "thread 2")
        assert texts(browser, ".lane-labels button") == ["request", "Alice", "Bob", "thread 2"]
        browser.click_button("Bob", ".lane-labels")
        assert browser.text(".branch-text") == "I am Bob"
        server.released.set()
        status(browser, "Answered")
        browser.click_button("request", ".lane-labels")
        assert browser.text(".branch-text") == "six"


INKED = """
    const { Run } = await import(args[0] + "run.js");
    const { Timeline } = await import(args[0] + "timeline.js");
    const request = { model: "m", messages: [{ role: "user", content: "q" }] };
    const run = new Run({ id: "a", created: 0, request });
    run.apply({ type: "started", at: 0 });
    for (const [at, tokens] of args[1]) {
      run.apply({ type: "delta", at, branch: "", text: "word ", num_tokens: tokens });
    }
    run.apply({ type: "finished", at: 1 });
    const { fillRect } = CanvasRenderingContext2D.prototype;
    const place = document.querySelector("#views");
    const box = Object.assign(document.createElement("div"), { className: "timeline" });
    place.replaceChildren(box);
    const timeline = new Timeline(box, () => {});
    let inked = 0;
    CanvasRenderingContext2D.prototype.fillRect = function (x, y, w, h) {
      if (this.canvas === timeline.base && h === 7) inked += w;
    };
    timeline.show(run);
    Object.assign(CanvasRenderingContext2D.prototype, { fillRect });
    place.replaceChildren();
    return inked / timeline.width;
"""
"""The share of a lane's width that is painted as text, of pieces at times."""


@pytest.mark.parametrize(
    ("pieces", "least", "most"),
    [
        ([[0.1 * count, 4] for count in range(1, 11)], 0.8, 0.95),
        ([[0.1, 4], [0.2, 4], [0.3, 4], [0.9, 4], [1.0, 4]], 0.25, 0.45),
    ],
    ids=["few pieces", "a pause"],
)
def test_a_lane_is_text_where_it_was_written_and_a_line_where_it_paused(
    browser: Browser, pieces: list[list[float]], least: float, most: float
):
    with StandIn(searched) as server:
        open_page(browser, server.address)
        assert least < browser.run_async(INKED, server.address, pieces) < most


def test_the_chosen_one_of_many_lanes_is_in_sight(browser: Browser):
    def run(body: dict[str, Any]) -> Iterable[Item]:
        yield started("beam_search")
        for number in range(40):
            yield delta(0.1, "", "x", fields={"beam": [number]})
        yield stage(0.5, "", "selected", beam=[38], score=0.9)
        yield finished("x")

    in_sight = """
        const box = document.querySelector(".timeline").getBoundingClientRect();
        const lane = document.querySelector("[data-state=won]").getBoundingClientRect();
        return lane.top >= box.top && lane.bottom <= box.bottom;
    """
    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "search")
        status(browser, "Answered")
        shows(browser, "[data-state=won]", "beam 38")
        browser.wait(f"(() => {{ {in_sight} }})()")


SAID = [
    (
        ("probed", "", {"answer": "6", "at": 210, "agreeing": 2}),
        "a probe after 210 tokens answers 6; 2 probes in a row agree",
    ),
    (
        ("early_exit", "2 probes in a row agree", {"answer": "6", "at": 180}),
        "ends early with 6: 2 probes in a row agree; 180 tokens are kept",
    ),
    (
        ("scored", "", {"beam": [1], "score": 0.213, "finished": True}),
        "has score 0.21: a whole answer",
    ),
    (
        ("scored", "", {"step": 2, "score": 7.0, "accepted": False}),
        "step 2 of the small model has 7 and is written again",
    ),
    (
        ("pruned", "it was not drawn", {"beam": [1], "score": 0.213}),
        "is pruned with score 0.21: it was not drawn",
    ),
    (
        ("pruned", "the judge prefers another", {"answer": 2, "winner": 0}),
        "answer 2 loses against answer 0: the judge prefers another",
    ),
    (
        ("voted", "", {"answer": "6", "tally": {"6": 2, "7": 1}}),
        "votes for 6, which has 2 of 3 votes now",
    ),
    (("selected", "", {"method": "majority_vote@8"}), "the policy chooses majority_vote@8"),
    (
        ("prolonged", "", {"at": 1, "waits": 2}),
        "would have ended its thought after 1 token and goes on (2nd time)",
    ),
    (("retrieved", "", {"query": "who?", "documents": [1, 4]}), "finds documents 1, 4 for who?"),
    (("called", "add", {"args": "{}", "result": "3", "is_error": False}), "calls add({}): 3"),
    (
        ("layer", "", {"number": 0, "types": ["generator"], "candidates": 5}),
        "layer 0 (generator) leaves 5 candidates",
    ),
    (("own_stage", "for a reason", {"some_size": 3}), "own stage: for a reason: some size 3"),
]


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
