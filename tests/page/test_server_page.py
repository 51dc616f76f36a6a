"""The page in a browser, before ``forethought serve`` on the embedded reasoner, and on a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from page.browser import Browser
from page.serving import serving
from page.steps import ask, figure, open_page, shows, status, texts

pytestmark = pytest.mark.page

QUESTION = "Sam has 110 nuts. He uses 84. He uses 12. He uses 8. How many nuts does Sam have now?"


slow = pytest.mark.slow
"""Loads the model: the others are enough where time is short."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    drafts = ["--speculative", "ngram", "--max-draft-len", "5"]
    with serving(log, *drafts, "--dtype", "float32") as found:
        yield found


def open_fresh(browser: Browser, server: str) -> None:
    """Open the page as on a first visit."""
    open_page(browser, server)
    browser.click("#new")
    browser.run("localStorage.clear()")
    open_page(browser, server)


@slow
def test_a_chain_ends_early_and_what_it_saved_is_shown_beside_plain_decoding(
    browser: Browser, server: str
):
    open_fresh(browser, server)
    browser.set("#sampling [name=temperature]", "0")
    browser.set("#method", "dynasor")
    browser.set("#parameters [name=chunk_size]", "16")
    browser.set("#parameters [name=certainty_threshold]", "2")
    browser.run("document.querySelector('#plain-too').checked = true")
    browser.set("#question", QUESTION)
    browser.click("#ask")
    status(browser, "Answered: plain")
    assert "less" in figure(browser, "Against plain")
    assert "\\boxed{6}" in texts(browser, ".answer")[0]
    told = "".join(texts(browser, ".stages li"))
    assert "tokens answers 6" in told
    assert "ends early with 6" in told
    assert browser.run("return document.querySelectorAll('.branch-text .draft').length") > 0
    assert "draft tokens accepted" in texts(browser, ".speculation")[0]
    assert "Off" in texts(browser, ".speculation")[1]


@slow
def test_samples_vote_in_lanes_of_their_own(browser: Browser, server: str):
    open_fresh(browser, server)
    browser.set("#method", "majority_vote")
    browser.set("#parameters [name=default_sample_num]", "4")
    browser.set("#sampling [name=temperature]", "0.8")
    browser.set("#question", QUESTION)
    browser.press("Escape")
    browser.click("#ask")
    status(browser, "Answered: majority_vote")
    lanes = texts(browser, ".lane-labels button")
    names = [lane.removesuffix(" ✓ chosen") for lane in lanes]
    assert names == ["request", *(f"branch {number}" for number in range(4))]
    assert sum(lane.endswith("chosen") for lane in lanes) == 1
    assert "votes for" in "".join(texts(browser, ".stages li"))
    assert figure(browser, "Branches") == "4"


@slow
def test_beams_stream_into_as_many_lanes_as_the_search_holds(browser: Browser, server: str):
    open_fresh(browser, server)
    browser.set("#method", "beam_search")
    browser.set("#parameters [name=default_sample_num]", "4")
    browser.set("#parameters [name=width]", "2")
    browser.set("#parameters [name=step_token]", '"\\n"')
    browser.set("#sampling [name=temperature]", "0.8")
    browser.set("#question", QUESTION)
    browser.click("#ask")
    status(browser, "Answered: beam_search")
    lanes = texts(browser, ".lane-labels button")
    assert 3 <= len(lanes) <= 5
    assert sum(lane.endswith("chosen") for lane in lanes) == 1
    assert "is pruned with score" in "".join(texts(browser, ".stages li"))
    assert "He uses 84" in browser.text(".branch-text")


@slow
def test_an_edited_question_reuses_the_conversation_before_it(browser: Browser, server: str):
    open_fresh(browser, server)
    ask(browser, QUESTION)
    status(browser, "Answered")
    ask(browser, "Ann buys 44 boxes with 30 stamps each. How many stamps does Ann have now?")
    browser.wait("document.querySelectorAll('.turn').length === 2")
    status(browser, "Answered")
    browser.click_button("Edit", ".turn:last-child")
    browser.set(".edit textarea", "Ann buys 40 boxes. How many boxes does Ann have now?")
    browser.click_button("Ask as a branch")
    shows(browser, ".beside", "2 of 2")
    assert "prompt tokens reused" in status(browser, "Answered: ")


def test_a_long_answer_is_stopped_also_after_a_reload(browser: Browser, tmp_path: Path):
    script = tmp_path / "script.yaml"
    script.write_text('"*": {text: one two three, seconds_per_token: 5}\n')
    with serving(tmp_path / "log", "--worker", "scripted", str(script)) as slow:
        open_page(browser, slow)
        ask(browser, "stop me")
        shows(browser, ".branch-text", "o")
        browser.click("#stop")
        status(browser, "Stopped: plain")
        ask(browser, "leave me")
        browser.wait("document.querySelectorAll('.turn').length === 2")
        shows(browser, ".branch-text", "o")
        browser.reload()
        status(browser, "The run with plain goes on.")
        assert browser.text(".branch-text").startswith("o")
        browser.click("#stop")
        status(browser, "Stopped: plain")
        browser.wait("fetch('/v1/load').then((r) => r.json()).then((load) => load.running === 0)")


def test_hostile_text_of_a_served_model_is_text(browser: Browser, tmp_path: Path):
    hostile = "<script>document.title='hacked'</script> \\e[31m \\u202E"
    script = tmp_path / "script.yaml"
    script.write_text(f'"*": {{text: "{hostile}"}}\n')
    with serving(tmp_path / "log", "--worker", "scripted", str(script)) as server:
        open_page(browser, server)
        ask(browser, "hostile")
        status(browser, "Answered")
        assert browser.text(".answer") == ("<script>document.title='hacked'</script> ␛[31m ⟨RLO⟩")
        assert browser.run("return document.title") == "forethought"


def test_an_answer_is_shown_with_its_formulas_and_its_code(
    browser: Browser, tmp_path: Path
) -> None:
    script = tmp_path / "answers.yaml"
    script.write_text(
        "'*': |-\n"
        "  # Sum\n"
        "  The answer is \\[ \\boxed{43} \\] and **bold**, <b>not this</b>.\n"
        "\n"
        "  ```python\n"
        "  print(43)\n"
        "  ```\n"
    )
    with serving(tmp_path / "log", "--worker", "scripted", str(script)) as at:
        open_page(browser, at)
        ask(browser, "how many?")
        status(browser, "Answered: plain")
        shows(browser, ".markdown math", "43")
        shows(browser, ".markdown h1", "Sum")
        shows(browser, ".markdown strong", "bold")
        shows(browser, ".markdown .code pre", "print(43)")
        shows(browser, ".markdown .code button", "Copy")
        shows(browser, ".markdown p", "<b>not this</b>")
        assert browser.run("return document.querySelectorAll('.markdown b').length") == 0
        hidden = "return document.querySelector('.said.answer').hidden"
        assert browser.run(hidden)
