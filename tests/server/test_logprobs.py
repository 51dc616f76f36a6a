"""Log-probabilities over HTTP: whose they are, the bytes of their tokens, and where these lie."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

import pytest

from forethought import AsyncLLM
from forethought.assets import REASONER, embedded_dir
from forethought.llm.reasoning import ReasoningSplitter
from forethought.llm.tokenizer import Tokenizer
from forethought.outputs import Logprob
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.backends.remote_backend import RemoteBackend
from forethought.server.protocol.logprobs import (
    AnswerLogprobs,
    AnswerSpans,
    TextLogprobs,
    texts_of_entries,
    texts_within,
)
from forethought.server.settings import Settings
from forethought.workers.upstream import UpstreamWorker
from http_servers import Served, served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
QUESTION = "Sam has 110 nuts. He uses 84. How many nuts does Sam have now?"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 300,
    "logprobs": True,
    "top_logprobs": 2,
}
FOREIGN = "na\u00efve \U0001f980\U0001f980 \u65e5\u672c ok"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(dtype="float32")
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[Served]:
    with served(EngineBackend(llm, "reasoner"), Settings(stream_interval=0.0)) as running:
        yield running


def chats(running: Served, **fields: Any) -> list[tuple[str, str, Any, Any]]:
    """Content, thought and their log-probabilities of each choice, at once; streams agree."""
    answer = running.send(CHAT, {**ASK, **fields})
    assert answer.status == 200, answer.text
    whole = [
        (
            choice["message"]["content"] or "",
            choice["message"].get("reasoning", ""),
            choice["logprobs"]["content"],
            choice["logprobs"].get("reasoning", []),
        )
        for choice in answer.json["choices"]
    ]
    streamed: list[Any] = [["", "", [], []] for _ in whole]
    for _, data in running.send(CHAT, {**ASK, **fields, "stream": True}).events[:-1]:
        for choice in data["choices"]:
            parts, delta = streamed[choice["index"]], choice["delta"]
            parts[0] += delta.get("content") or ""
            parts[1] += delta.get("reasoning") or ""
            parts[2] += (choice["logprobs"] or {}).get("content", [])
            parts[3] += (choice["logprobs"] or {}).get("reasoning", [])
    assert [tuple(parts) for parts in streamed] == whole
    return whole


def joined(entries: list[Any]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "temperature": 1.0, "seed": 3},
        {"stop": ["now"]},
        {"stop": [" is", "the "], "include_stop_str_in_output": True},
        {"max_tokens": 9},
        {"thinking_budget": 12},
        {"skip_special_tokens": False},
        {"method": "majority_vote@2", "seed": 5},
    ],
    ids=str,
)
def test_logprobs_of_content_and_of_the_thought_are_separate(
    server: Served, fields: dict[str, Any]
) -> None:
    for content, thought, of_content, of_thought in chats(server, **fields):
        for entries, part in ((of_content, content), (of_thought, thought)):
            text, last = joined(entries), joined(entries[-1:])
            assert text.startswith(part)  # and the last token may go on behind its end
            assert len(text) - len(part) < max(len(last), 1)
        assert all(len(each["top_logprobs"]) == 2 for each in (*of_content, *of_thought))
        assert all(each["logprob"] <= 0 for each in (*of_content, *of_thought))
        if not fields:
            assert (of_content, of_thought) > ([], [])
            assert of_content[0]["token"] == of_content[0]["top_logprobs"][0]["token"]


def test_those_of_a_thought_that_is_not_shown_are_not_shown(server: Served) -> None:
    [(content, thought, of_content, of_thought)] = chats(server, include_reasoning=False)
    assert (thought, of_thought) == ("", [])
    assert joined(of_content) == content


def test_those_of_a_forced_call_are_none_of_the_content(server: Served) -> None:
    function = {"name": "add", "parameters": {"type": "object", "additionalProperties": False}}
    tools = [{"type": "function", "function": function}]
    for budget in (None, 20):
        [(content, thought, of_content, of_thought)] = chats(
            server, tools=tools, tool_choice="required", thinking_budget=budget
        )
        assert (content, of_content) == ("", [])
        assert joined(of_thought).strip() == thought


def test_a_thought_that_is_left_in_the_content_has_its_tokens_there(llm: AsyncLLM) -> None:
    settings = Settings(reasoning_in_content=True, stream_interval=0.0)
    with served(EngineBackend(llm, "reasoner"), settings) as running:
        [(content, _, of_content, of_thought)] = chats(running, max_tokens=200)
        assert "</think>" in content
        assert (joined(of_content), of_thought) == (content, [])
        [(content, _, of_content, _)] = chats(running, include_reasoning=False)
        assert "think" not in content
        assert joined(of_content) == content


def test_the_bytes_of_a_part_of_a_character_are_its_own(server: Served) -> None:
    shape = {"choice": [FOREIGN]}
    [(content, _, of_content, _)] = chats(server, structured_outputs=shape, max_tokens=60)
    assert content == FOREIGN
    assert joined(of_content) == FOREIGN
    assert any("\ufffd" in entry["token"] for entry in of_content)
    for stop in ("\U0001f980", "\u672c"):
        [(content, _, of_content, _)] = chats(
            server, structured_outputs=shape, max_tokens=60, stop=stop
        )
        assert content == FOREIGN.partition(stop)[0]
        assert joined(of_content) == content


# ---- completions -------------------------------------------------------------------------------


def texts(running: Served, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """Text and log-probabilities of each choice, at once; streams agree."""
    body = {"max_tokens": 12, "temperature": 0, "logprobs": 2, **fields}
    answer = running.send(COMPLETIONS, body)
    assert answer.status == 200, answer.text
    whole = [(choice["text"], choice["logprobs"]) for choice in answer.json["choices"]]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    streamed: list[Any] = [["", {name: [] for name in names}] for _ in whole]
    for _, data in running.send(COMPLETIONS, {**body, "stream": True}).events[:-1]:
        for choice in data["choices"]:
            parts = streamed[choice["index"]]
            parts[0] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                parts[1][name] += values
    assert [tuple(parts) for parts in streamed] == whole
    assert all(len({len(values) for values in found.values()}) == 1 for _, found in whole)
    return whole


def check_offsets(text: str, found: dict[str, Any]) -> None:
    """Each token stands where its offset says; parts of a character stand where that does."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if token.startswith("bytes:"):
            raw = codecs.escape_decode(token.removeprefix("bytes:"))[0]
            assert text.startswith(decoder.decode(raw), offset)
        else:
            assert text[offset : offset + len(token)] == token[: len(text) - offset]
    assert found["text_offset"] == sorted(found["text_offset"])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "temperature": 1.0, "seed": 1},
        {"stop": ["a"]},
        {"stop": [" ha", "e "], "include_stop_str_in_output": True},
        {"stop": ["e"], "n": 2},
        {"structured_outputs": {"choice": [FOREIGN]}, "max_tokens": 60},
        {"structured_outputs": {"choice": [FOREIGN]}, "max_tokens": 60, "stop": "\u65e5"},
        {"prompt": ["Sam has", FOREIGN]},
    ],
    ids=str,
)
@pytest.mark.parametrize("echo", [False, True])
def test_the_offsets_of_tokens_are_those_in_the_text(
    server: Served, fields: dict[str, Any], echo: bool
) -> None:
    body = {"prompt": f"Sam has {FOREIGN} and", **fields, "echo": echo}
    for text, found in texts(server, **body):
        check_offsets(text, found)
        assert all(value is not None for value in found["token_logprobs"][1:])
        assert (found["token_logprobs"][0] is None) == echo
        assert found["text_offset"][0] == 0
        if "stop" in fields:
            assert all(offset < len(text) for offset in found["text_offset"])


def test_an_echo_alone_has_the_offsets_of_the_prompt(server: Served) -> None:
    for prompt in (FOREIGN, [300, 301, 302]):
        [(text, found)] = texts(server, prompt=prompt, echo=True, max_tokens=0)
        check_offsets(text, found)
        assert len(found["tokens"]) > 2


def test_the_token_that_ends_a_text_stands_at_its_end(server: Served, llm: AsyncLLM) -> None:
    [(text, found)] = texts(server, prompt="Sam has", stop_token_ids=[300], logit_bias={"300": 100})
    assert (text, found["text_offset"], len(found["tokens"])) == ("", [0], 1)


# ---- responses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"include": ["message.output_text.logprobs"]}, {}], ids=str)
@pytest.mark.parametrize("method", [None, "majority_vote@2"])
def test_a_response_shows_those_of_its_message(
    server: Served, fields: dict[str, Any], method: str | None
) -> None:
    body = {
        **fields,
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": 300,
        "top_logprobs": 1,
        "method": method,
    }
    part = server.send(RESPONSES, body).json["output"][-1]["content"][0]
    assert joined(part["logprobs"]) == part["text"]
    events = server.send(RESPONSES, body | {"stream": True}).events
    deltas = [data["logprobs"] for name, data in events if name == "response.output_text.delta"]
    done = [data["logprobs"] for name, data in events if name == "response.output_text.done"]
    assert [each for delta in deltas for each in delta] == done[0] == part["logprobs"]


# ---- the parts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    "text",
    [
        " <think>\n a thought < /\n\n</think>\n\nThe answer. <think>x</think>",
        "<think></think>answer",
        "<think>cut ",
        "no thought",
        "  ",
    ],
)
def test_a_splitter_says_where_what_it_returns_stood(text: str, size: int) -> None:
    splitter, reasoning, content = ReasoningSplitter(("<think>", "</think>")), "", ""
    for start in range(0, len(text) + size, size):
        piece = text[start : start + size]
        split = splitter.push(piece) if piece else splitter.finish()
        reasoning, content = reasoning + split.reasoning, content + split.content
        start, end = splitter.thought
        assert text[start:end] == reasoning
        if content:
            assert splitter.answer_start is not None
            assert text[splitter.answer_start : splitter.position] == content
    assert splitter.position == len(text)


def test_tokens_of_another_server_are_sorted_by_their_texts() -> None:
    tokens = ["<think>", "a ", "b", "</think>", "\n", "so", "\ufffd", "\ufffd", "end"]
    raw = {6: b"\xc3", 7: b"\xaf"}
    entries = [{-1: Logprob(-1.0, 1, t, raw.get(i))} for i, t in enumerate(tokens)]
    answer = AnswerLogprobs(texts_of_entries())
    answer.add(entries, ())
    text = "<think>a b</think>\nso\u00ef"
    thought, content = answer.take(AnswerSpans((7, 10), (19, len(text))))
    assert [each.chosen and each.chosen.token for each in thought] == ["a ", "b"]
    assert [each.start for each in content] == [19, 21, 21]


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("one two", [0, 3, 3, 7, 7]),
        ("one<|end|> two", [0, 3, 10, 14, 14]),
        ("one tw", [0, 3]),  # cut by a stop string
    ],
)
def test_special_tokens_that_the_text_of_another_server_is_without_take_no_room_in_it(
    text: str, offsets: list[int]
) -> None:
    tokens = ["one", "<|end|>", " two", "<|end|>", "<|eos|>"]
    entries = [{-1: Logprob(-1.0, 1, token)} for token in tokens]
    logprobs = TextLogprobs(texts_within(text, entries))
    logprobs.add(entries, ())
    spans = logprobs.take_rest(len(text), keeps_last=len(offsets) == len(tokens))
    assert [span.start for span in spans] == offsets


def test_special_tokens_of_another_server_are_scored_where_they_are(server: Served) -> None:
    worker = UpstreamWorker([server.url], "reasoner", extensions=["ignore_eos"])
    backend = RemoteBackend(worker, "reasoner")
    body = {"prompt": "The sum of 3 and 4 is", "max_tokens": 50, "seed": 3, "logprobs": 1}
    body |= {"ignore_eos": True, "temperature": 1.0}
    with served(backend) as front:
        direct, passed = (s.send(COMPLETIONS, body).json["choices"][0] for s in (server, front))
    backend.close()
    assert passed["text"] == direct["text"]
    for column in ("tokens", "text_offset"):
        assert passed["logprobs"][column] == direct["logprobs"][column]


def test_through_another_server_with_a_tokenizer_a_chat_has_the_same_tokens(server: Served) -> None:
    tokenizer = Tokenizer.load(embedded_dir(REASONER))
    backend = RemoteBackend(
        UpstreamWorker([server.url], "reasoner"), "reasoner", tokenizer=tokenizer
    )
    with served(backend, Settings(stream_interval=0.0)) as front:
        for fields in ({}, {"max_tokens": 20}, {"stop": "boxed"}):
            for here, there in zip(chats(server, **fields), chats(front, **fields), strict=True):
                assert [_tokens(scores) for scores in here[2:]] == [
                    _tokens(scores) for scores in there[2:]
                ]
    backend.close()


def _tokens(scores: list[dict[str, Any]]) -> list[str]:
    return [score["token"] for score in scores]


def test_the_last_tokens_that_a_text_of_another_server_is_without_are_left_out() -> None:
    def taken(text: str, *tokens: str) -> list[str]:
        sorted_tokens = AnswerLogprobs(texts_of_entries())
        sorted_tokens.add([{-1: Logprob(-0.5, 1, token)} for token in tokens], [])
        sorted_tokens.leave_out_ending(text)
        _, content = sorted_tokens.take(AnswerSpans((0, 0), (0, 10**9)))
        return [str(span.chosen and span.chosen.token) for span in content]

    assert taken("It is 7.", "It", " is", " 7.", "<|end|>") == ["It", " is", " 7."]
    assert taken("It is 7", "It", " is", " 7.", " STOP", "<|end|>") == ["It", " is", " 7."]
    assert taken("It is 7.", "<|a|>", "It", " is", " 7.") == ["<|a|>", "It", " is", " 7."]
    assert taken("", "<|end|>") == []
