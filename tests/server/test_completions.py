"""Completions over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forethought.workers.scripted import Reply
from http_servers import Served, scripted


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with scripted(lambda prompt, index: f" after {prompt}") as running:
        yield running


def test_a_text_is_continued(server: Served) -> None:
    answer = server.client.completions.create(model="scripted", prompt="one")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" after one", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_several_prompts_have_their_choices_in_order(server: Served) -> None:
    answer = server.client.completions.create(model="scripted", prompt=["one", "two"], n=2)
    texts = [(choice.index, choice.text) for choice in answer.choices]
    assert texts == [(0, " after one"), (1, " after one"), (2, " after two"), (3, " after two")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 12


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]]])
def test_a_prompt_may_be_ids(server: Served, prompt: Any) -> None:
    answer = server.client.completions.create(model="scripted", prompt=prompt, echo=True)
    assert answer.choices[0].text == "hi after hi"


def test_the_prompts_of_a_stream_come_apart(server: Served) -> None:
    texts, ends = {0: "", 1: ""}, []
    for chunk in server.client.completions.create(
        model="scripted",
        prompt=["one", "two"],
        echo=True,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert texts == {0: "one after one", 1: "two after two"}
    assert ends == ["stop", "stop"]
    assert chunk.usage is not None
    assert chunk.usage.prompt_tokens == 6


def test_a_method_may_continue_a_text(server: Served) -> None:
    answer = server.client.completions.create(model="majority_vote@2-scripted", prompt="one")
    assert answer.choices[0].text == " after one"


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [""]},
        {"prompt": 7},
        {"prompt": [1, "a"]},
        {"prompt": ["x"] * 1000},
        {"suffix": "x"},
        {"best_of": 2},
        {"logprobs": True},
        {"echo": True, "logprobs": 1},
    ],
)
def test_what_cannot_be_is_refused(server: Served, change: dict[str, Any]) -> None:
    answer = server.send("/v1/completions", {"prompt": "one", **change})
    assert answer.status == 400, answer.text


def test_the_events_of_a_stream_say_of_which_prompt_they_are(server: Served) -> None:
    body = {"model": "scripted", "prompt": ["one", "two"], "stream": True, "events": True}
    events = server.send("/v1/completions", body).events
    told = [data for name, data in events if name == "forethought"]
    for number, prompt in enumerate(body["prompt"]):
        own = [data for data in told if data["prompt"] == number]
        assert (own[0]["type"], own[-1]["type"]) == ("started", "finished")
        assert own[-1]["text"] == f" after {prompt}"
        assert len({data["id"] for data in own if data["type"] == "started"}) == 1


def test_a_prompt_that_fails_in_a_stream_with_events_is_told_by_an_event() -> None:
    def says(prompt: str, index: int) -> Reply:
        return Reply("never", error=RuntimeError("broken") if prompt == "two" else None, delay=0.01)

    body = {"model": "scripted", "prompt": ["one", "two"], "stream": True, "events": True}
    with scripted(says) as server:
        events = server.send("/v1/completions", body).events
    told = [data for name, data in events if name == "forethought"]
    assert [data["prompt"] for data in told if data["type"] == "started"] == [0, 1]
    assert (told[-1]["type"], told[-1]["prompt"]) == ("error", 1)
    assert events[-2][1]["error"]["message"] == told[-1]["message"]
