"""Questions and answers that are edited, continued, generated again, or have files with them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from page.browser import Browser
from page.stand_in import PAUSE, Item, StandIn, finished, started
from page.steps import ask, open_page, shows, status, texts
from page.streams import answer, echo

pytestmark = pytest.mark.page


def numbered(body: dict[str, Any]) -> Iterable[Item]:
    """An answer that says how many messages there were; cut where it has none of the model's."""
    text = f" and {len(body['input'])} messages"
    reason = "stop" if body.get("continue_final_message") else "length"
    return [started(), answer(text), finished(text, finish_reason=reason)]


def sent(server: StandIn) -> list[list[str]]:
    """The messages of each request."""
    return [[message["content"] for message in body["input"]] for body in server.requests]


def test_an_answer_is_generated_again_beside_the_one_before(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        ask(browser, "one")
        status(browser, "Answered")
        browser.click_button("Regenerate")
        shows(browser, ".beside", "2 of 2")
        status(browser, "Answered")
        assert sent(server) == [["one"], ["one"]]
        browser.click("[aria-label='Previous branch']")
        shows(browser, ".beside", "1 of 2")
        shows(browser, ".answer", "answer to one")


def test_an_edited_answer_is_continued_and_what_was_there_stays(browser: Browser):
    with StandIn(numbered) as server:
        open_page(browser, server.address)
        ask(browser, "one")
        status(browser, "Answered")
        browser.click_button("Edit answer")
        browser.set(".edit textarea", "It is six,")
        browser.click_button("Continue from here")
        shows(browser, ".answer", "It is six, and 2 messages")
        status(browser, "Answered")
        again = server.requests[1]
        assert again["continue_final_message"] is True
        assert again["input"] == [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "It is six,"},
        ]
        ask(browser, "two")
        shows(browser, ".answer", "and 3 messages")
        assert sent(server)[2] == ["one", "It is six, and 2 messages", "two"]
        assert "continue_final_message" not in server.requests[2]
        browser.reload()
        shows(browser, ".answer", "It is six, and 2 messages")
        browser.click("[aria-label='Previous branch']")
        shows(browser, ".answer", " and 1 messages")
        assert texts(browser, ".answer") == [" and 1 messages"]


def test_an_answer_that_was_cut_goes_on(browser: Browser):
    with StandIn(numbered) as server:
        open_page(browser, server.address)
        ask(browser, "one")
        assert "cut at its limit" in status(browser, "Answered")
        browser.click_button("Continue")
        shows(browser, ".answer", " and 1 messages and 2 messages")
        status(browser, "Answered")
        hidden = "return [...document.querySelectorAll('.foot button')].map((b) => b.hidden)"
        assert browser.run(hidden)[0] is True, "it has ended"


def test_an_answer_written_by_hand_is_part_of_the_conversation(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        ask(browser, "one")
        status(browser, "Answered")
        browser.click_button("Edit answer")
        browser.set(".edit textarea", "Six.")
        browser.click_button("Save as a branch")
        shows(browser, ".note", "Written by hand")
        assert texts(browser, ".answer") == ["Six."]
        ask(browser, "two")
        shows(browser, ".answer", "answer to two")
        assert sent(server)[1] == ["one", "Six.", "two"]


def test_files_are_fenced_blocks_of_the_message_and_folded_on_the_page(
    browser: Browser, tmp_path: Path
):
    (tmp_path / "sum.py").write_text("# ```\nprint(1)\n")
    (tmp_path / "notes.txt").write_text("six nuts")
    with StandIn(echo) as server:
        open_page(browser, server.address)
        for name in ("sum.py", "notes.txt"):
            browser.type("#attach", str(tmp_path / name))
            shows(browser, "#attachments li", name)
        browser.click("[aria-label='Remove notes.txt']")
        ask(browser, "what is this?")
        status(browser, "Answered")
        assert sent(server) == [["what is this?\n\nsum.py:\n````py\n# ```\nprint(1)\n````"]]
        assert browser.run("return document.querySelector('#attachments').hidden")
        assert texts(browser, ".turn > .said:not(.answer)") == ["what is this?"]
        browser.click(".attached summary")
        shows(browser, ".attached .said", "print(1)")
        browser.click_button("Edit")
        browser.set(".edit textarea", "and this?")
        browser.click_button("Ask as a branch")
        shows(browser, ".beside", "2 of 2")
        status(browser, "Answered")
        assert sent(server)[1][0].startswith("and this?\n\nsum.py:\n")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("cat.png", b"\x89PNG", "cat.png is an image: the models here read text alone."),
        ("paper.pdf", b"%PDF-1.7", "paper.pdf is a PDF: the models here read text alone."),
        ("talk.pptx", b"PK", "talk.pptx is an office document: the models here read text alone."),
        ("program", b"\x00\x01", "program is no text in UTF-8."),
        ("latin.txt", b"caf\xe9", "latin.txt is no text in UTF-8."),
        ("large.txt", b"a" * (2**20 + 1), "large.txt is larger than 1 MB."),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(
    browser: Browser, tmp_path: Path, name: str, content: bytes, why: str
):
    (tmp_path / name).write_bytes(content)
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.type("#attach", str(tmp_path / name))
        shows(browser, "#status", why)
        assert browser.run("return document.querySelector('#attachments').hidden")


def test_a_dropped_file_and_a_long_pasted_text_are_attached(browser: Browser):
    drop = """
        const data = new DataTransfer();
        data.items.add(new File(["a,b"], "table.csv", { type: "text/csv" }));
        const all = { bubbles: true, cancelable: true };
        const dropped = new DragEvent("drop", { dataTransfer: data, ...all });
        document.querySelector("#turns").dispatchEvent(dropped);
        const text = new DataTransfer();
        text.setData("text/plain", "long ".repeat(1000));
        const paste = new ClipboardEvent("paste", { clipboardData: text, ...all });
        document.querySelector("#question").dispatchEvent(paste);
    """
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.run(drop)
        shows(browser, "#attachments li", "table.csv, 3 characters")
        shows(browser, "#attachments li", "pasted-1.txt, 5.0k characters")
        browser.click("#ask")
        status(browser, "Answered")
        table = "table.csv:\n```csv\na,b\n```"
        assert sent(server)[0][0].startswith(f"{table}\n\npasted-1.txt:\n```\nlong")


def test_a_file_is_dropped_anywhere_on_the_page_but_not_behind_a_dialog(browser: Browser):
    drop = """
        const data = new DataTransfer();
        data.items.add(new File(["a"], arguments[1], { type: "text/plain" }));
        const drop = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
        document.querySelector(arguments[0]).dispatchEvent(drop);
        return drop.defaultPrevented;
    """
    with StandIn(echo) as server:
        open_page(browser, server.address)
        assert browser.run(drop, "#inspector", "one.txt"), "it does not take the page's place"
        shows(browser, "#attachments li", "one.txt")
        browser.click("#open-help")
        assert browser.run(drop, "#help", "two.txt")
        browser.press("Escape")
        assert browser.run(drop, "header.top", "three.txt")
        shows(browser, "#attachments li", "three.txt")
        assert len(texts(browser, "#attachments li")) == 2


def test_sampling_fields_are_those_of_the_server_and_belong_to_the_chat(browser: Browser):
    value = "return document.querySelector(`#sampling [name=${arguments[0]}]`).value"
    with StandIn(echo) as server:
        open_page(browser, server.address)
        assert texts(browser, "#further-sampling label") == ["dry_multiplier"]
        for name, text in {"temperature": "0.5", "stop": "42", "dry_multiplier": "0.8"}.items():
            browser.set(f"#sampling [name={name}]", text)
        ask(browser, "one")
        status(browser, "Answered")
        fields = ("temperature", "stop", "dry_multiplier")
        assert {name: server.requests[0][name] for name in fields} == {
            "temperature": 0.5,
            "stop": "42",
            "dry_multiplier": 0.8,
        }
        browser.click("#new")
        browser.set("#sampling [name=temperature]", "0.9")
        browser.set("#sampling [name=stop]", '["a", "b"]')
        ask(browser, "two")
        status(browser, "Answered")
        assert server.requests[1]["stop"] == ["a", "b"]
        browser.click("#open-chats")
        shows(browser, "#chat-list .open", "one")
        browser.run("document.querySelectorAll('#chat-list .open')[1].click()")
        shows(browser, ".answer", "answer to one")
        assert [browser.run(value, name) for name in fields] == ["0.5", "42", "0.8"]
        browser.reload()
        shows(browser, ".answer", "answer to one")
        browser.wait("document.querySelector('#sampling [name=temperature]').value === '0.5'")


def test_a_deleted_question_takes_what_follows_it_along(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        for question in ("one", "two", "three"):
            ask(browser, question)
            shows(browser, ".answer", f"answer to {question}")
            status(browser, "Answered")
        browser.click_button("Delete", ".turn:nth-child(2)")
        browser.click_button("Really?", ".turn:nth-child(2)")
        browser.wait("document.querySelectorAll('.turn').length === 1")
        assert texts(browser, ".answer") == ["answer to one"]
        browser.reload()
        shows(browser, ".answer", "answer to one")
        ask(browser, "four")
        browser.wait("document.querySelectorAll('.turn').length === 2")
        status(browser, "Answered")
        assert sent(server)[-1] == ["one", "answer to one", "four"]
        browser.click("#open-runs")
        browser.wait("document.querySelectorAll('#run-list li').length === 2")
        browser.press("Escape")
        browser.click_button("Delete", ".turn")
        browser.click_button("Really?", ".turn")
        browser.wait("document.querySelector('.welcome')")
        browser.click("#open-chats")
        shows(browser, "#chat-list", "There is none yet")


def test_a_fork_is_a_new_chat_up_to_an_answer_and_the_old_one_stays(browser: Browser):
    with StandIn(echo) as server:
        open_page(browser, server.address)
        for question in ("one", "two"):
            ask(browser, question)
            shows(browser, ".answer", f"answer to {question}")
            status(browser, "Answered")
        browser.click_button("Fork", ".turn")
        status(browser, "This is a new chat, up to that answer.")
        assert texts(browser, ".turn .answer") == ["answer to one"]
        assert browser.run("return document.activeElement.id") == "question"
        ask(browser, "three")
        shows(browser, ".answer", "answer to three")
        status(browser, "Answered")
        assert sent(server)[-1] == ["one", "answer to one", "three"]
        browser.click("#open-chats")
        shows(browser, "#chat-list .open", "Fork of one")
        assert texts(browser, "#chat-list .open > :first-child") == ["Fork of one", "one"]
        browser.click("#chat-list li:last-child .open")
        shows(browser, ".answer", "answer to two")
        assert texts(browser, ".turn .answer") == ["answer to one", "answer to two"]
        browser.click("#open-chats")
        shows(browser, "#chat-list .open", "Fork of one")
        browser.click_button("Delete", "#chat-list li:last-child")
        browser.click_button("Really?", "#chat-list li:last-child")
        browser.wait("document.querySelectorAll('#chat-list li').length === 1")
        browser.reload()
        browser.click("#open-chats")
        shows(browser, "#chat-list .open", "Fork of one")
        browser.click("#chat-list .open")
        shows(browser, ".answer", "answer to three")
        assert texts(browser, ".turn .answer") == ["answer to one", "answer to three"]
        assert browser.text(".run .status") == "done", "its runs are its own"


def test_a_fork_has_the_files_and_the_branch_that_is_shown(browser: Browser, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("six nuts")
    with StandIn(numbered) as server:
        open_page(browser, server.address)
        browser.type("#attach", str(tmp_path / "notes.txt"))
        shows(browser, "#attachments li", "notes.txt")
        ask(browser, "one")
        status(browser, "Answered")
        browser.click_button("Edit answer")
        browser.set(".edit textarea", "Six.")
        browser.click_button("Save as a branch")
        shows(browser, ".note", "Written by hand")
        browser.click_button("Fork")
        status(browser, "This is a new chat")
        assert texts(browser, ".turn .answer") == ["Six."]
        assert not browser.run("return document.querySelector('.beside')")
        ask(browser, "two")
        shows(browser, ".answer", "and 3 messages")
        status(browser, "Answered")
        assert sent(server)[-1] == ["one\n\nnotes.txt:\n```\nsix nuts\n```", "Six.", "two"]


def test_a_chat_is_not_forked_while_a_run_is_in_progress(browser: Browser):
    with StandIn(lambda body: [started(), PAUSE, answer("six"), finished("six")]) as server:
        open_page(browser, server.address)
        ask(browser, "one")
        shows(browser, ".turn", "one")
        browser.click_button("Fork")
        assert status(browser, "A run is in progress. Stop it first.")
        server.released.set()
        status(browser, "Answered")


def test_an_answer_is_copied_as_it_was_written_with_a_clipboard_and_without(browser: Browser):
    text = "**six** and `seven`"
    with StandIn(lambda body: [started(), answer(text), finished(text)]) as server:
        open_page(browser, server.address)
        ask(browser, "copy")
        status(browser, "Answered")
        browser.run("navigator.clipboard.writeText = async (text) => (window.copied = text)")
        browser.click("[aria-label='Copy the answer']")
        shows(browser, ".turn button", "Copied")
        assert browser.run("return window.copied") == text
        shows(browser, ".turn [aria-label='Copy the answer']", "Copy")
        browser.run("""
            navigator.clipboard.writeText = () => Promise.reject(new Error("insecure"));
            document.execCommand = () => ((window.copied = getSelection().toString()), true);
        """)
        browser.run("window.copied = ''")
        browser.wait(
            "document.querySelector('[aria-label=\"Copy the answer\"]').textContent === 'Copy'"
        )
        browser.click("[aria-label='Copy the answer']")
        shows(browser, ".turn button", "Copied")
        assert browser.run("return window.copied") == text


def test_a_question_is_copied_with_its_files(browser: Browser, tmp_path: Path):
    path = tmp_path / "main.ts"
    path.write_text("let x = 1;\n")
    with StandIn(echo) as server:
        open_page(browser, server.address)
        browser.type("#attach", str(path))
        shows(browser, "#attachments li", "main.ts")
        ask(browser, "why?")
        status(browser, "Answered")
        browser.run("navigator.clipboard.writeText = async (text) => (window.copied = text)")
        browser.click("[aria-label='Copy the question']")
        shows(browser, ".turn button", "Copied")
        assert browser.run("return window.copied") == "why?\n\nmain.ts:\n```ts\nlet x = 1;\n```"


def test_a_thought_is_open_while_the_model_thinks_and_closed_with_its_answer(browser: Browser):
    def run(body: dict[str, Any]) -> Iterable[Item]:
        return [
            started(),
            {"type": "thought", "text": "hmm"},
            PAUSE,
            answer("six"),
            finished("six"),
        ]

    is_open = "return document.querySelector('.thought').open"
    with StandIn(run) as server:
        open_page(browser, server.address)
        ask(browser, "think")
        shows(browser, ".thought .said", "hmm")
        browser.wait("document.querySelector('.thought').open")
        assert browser.text(".thought summary") == "Thinking …"
        server.released.set()
        status(browser, "Answered")
        assert not browser.run(is_open)
        assert browser.text(".thought summary") == "Thought"


def test_on_a_phone_the_page_follows_the_answer(browser: Browser):
    in_sight = """
        const end = document.querySelector(".turn:last-child .note").getBoundingClientRect();
        return end.bottom <= document.querySelector("#composer").getBoundingClientRect().top;
    """
    text = "word " * 300
    with StandIn(lambda body: [started(), answer(text), finished(text)]) as server:
        try:
            browser.resize(360, 740)
            open_page(browser, server.address)
            for number in (1, 2):
                ask(browser, f"question {number}")
                browser.wait(f"document.querySelectorAll('.turn').length === {number}")
                status(browser, "Answered")
                browser.wait(f"(() => {{ {in_sight} }})()")
        finally:
            browser.resize(1280, 800)
