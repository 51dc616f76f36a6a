"""Responses that outlive their server: what a client reads is what it would have read from it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from forethought.errors import UsageError
from forethought.llm.tool_messages import as_text
from forethought.server import response_journal
from forethought.server.endpoints.responses import _encoded, shown
from forethought.server.http import HttpError
from forethought.server.response_journal import JournalFile, Replay, ResponseJournal
from forethought.server.response_store import Record
from forethought.server.settings import Settings
from forethought.workers.scripted import Reply
from http_servers import WAIT, Served, eventually, scripted

ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
REQUESTS: dict[str, dict[str, Any]] = {
    "steady": {"input": "steady"},
    "thought": {"input": "think"},
    "calls": {"input": "call", "tools": [ADD]},
    "vote": {"input": "steady", "model": "majority_vote@3-scripted", "temperature": 1.0},
    "instructed": {"input": "steady", "instructions": "be short", "metadata": {"of": "me"}},
}


def answers(prompt: str, index: int) -> str | Reply:
    table: dict[str, str | Reply] = {
        "think": "<think>\nhm, hm\n</think>\n\nthe answer",
        "call": "so" + as_text("add", {"a": 1, "b": "two"}),
        "steady": Reply("abcdefghij", seconds_per_token=0.01),
        "slow": Reply("a" * 10_000, seconds_per_token=0.01),
    }
    return table.get(prompt, f"you said {prompt}")


@contextmanager
def serving(folder: Path, **fields: Any) -> Iterator[Served]:
    settings = Settings(response_dir=str(folder), **fields)
    with scripted(answers, settings, drain_seconds=0.1) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("responses") / "of" / "this"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    """Sends each token in an event of its own."""
    with serving(folder, stream_interval=0.0) as running:
        yield running


def events_of(server: Served, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    query = "" if after is None else f"&starting_after={after}"
    answer = server.send(f"/v1/responses/{response_id}?stream=true{query}", method="GET")
    assert answer.status == 200, answer.text
    return [event for _, event in answer.events]


def texts_of(events: Sequence[dict[str, Any]]) -> dict[tuple[int, str], str]:
    texts: dict[tuple[int, str], str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            key = event["output_index"], event["type"]
            texts[key] = texts.get(key, "") + event["delta"]
    return texts


def last_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {**events[-1]["response"], "completed_at": None}


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("*.jsonl")
    return path


@pytest.mark.parametrize("name", REQUESTS)
def test_a_response_goes_on_from_whatever_its_dead_server_has_left(
    server: Served, folder: Path, tmp_path: Path, name: str
) -> None:
    """At each line of its file, and in the middle of lines; tokens come in other parts then."""
    fields = {"model": "scripted", **REQUESTS[name]}
    expected = [event.to_dict() for event in server.client.responses.create(**fields, stream=True)]
    response_id, path = expected[0]["response"]["id"], the_file(folder)
    assert events_of(server, response_id) == expected
    lines = path.read_bytes().splitlines(keepends=True)
    assert [json.loads(line) for line in lines[1:]] == expected
    with serving(tmp_path, stream_interval=0.02) as other:
        for num_lines in range(1, len(lines) + 1):
            torn = lines[num_lines][:20] if num_lines % 2 and num_lines < len(lines) else b""
            (tmp_path / path.name).write_bytes(b"".join(lines[:num_lines]) + torn)
            events = events_of(other, response_id)
            assert events[: num_lines - 1] == expected[: num_lines - 1]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert texts_of(events) == texts_of(expected)
            assert last_of(events) == {**last_of(expected), "output": last_of(events)["output"]}
            assert without_ids(last_of(events)["output"]) == without_ids(response_output(expected))
            assert events_of(other, response_id, after=num_lines) == events[num_lines + 1 :]
            assert [json.loads(line) for line in the_file(tmp_path).read_bytes().splitlines()][
                1:
            ] == events
            other.send(f"/v1/responses/{response_id}", method="DELETE")
            eventually(lambda: not list(tmp_path.glob("*.jsonl")))
    server.send(f"/v1/responses/{response_id}", method="DELETE")
    eventually(lambda: not path.exists())


def response_output(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = last_of(events)["output"]
    return output


def without_ids(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items that no client has seen before the death have other ids."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def test_a_response_that_another_server_generates_is_not_taken_from_it(
    server: Served, folder: Path
) -> None:
    begun = server.client.responses.create(model="scripted", input="slow", background=True)
    with serving(folder) as other:
        answer = other.send(f"/v1/responses/{begun.id}", method="GET")
        assert (answer.status, answer.error["code"]) == (409, "response_elsewhere")
        server.client.responses.cancel(begun.id)
        eventually(lambda: other.client.responses.retrieve(begun.id).status == "cancelled")
        second = other.client.responses.create(
            model="scripted", input="go on", previous_response_id=begun.id
        )
        assert second.output_text == "you said go on"
    for response_id in (begun.id, second.id):
        server.send(f"/v1/responses/{response_id}", method="DELETE")
    eventually(lambda: not list(folder.glob("*.jsonl")))


def test_a_response_that_a_server_ends_with_itself_goes_on_in_the_next(tmp_path: Path) -> None:
    with serving(tmp_path, drain_seconds=0.1) as first:
        with first.client.responses.create(
            model="scripted", input="slow", background=True, stream=True
        ) as stream:
            response_id = next(stream).to_dict()["response"]["id"]
        eventually(lambda: the_file(tmp_path).read_bytes().count(b".delta") > 3)
    lines = the_file(tmp_path).read_bytes().splitlines()
    assert b"response.incomplete" not in lines[-1]
    with serving(tmp_path, drain_seconds=0.1) as second:
        assert second.client.responses.retrieve(response_id).status in ("queued", "in_progress")
        assert second.client.responses.cancel(response_id).status == "cancelled"


def test_keys_have_no_part_in_the_responses_of_others(tmp_path: Path) -> None:
    with serving(tmp_path, api_keys=["one", "two"]) as first:
        client = first.client.with_options(api_key="one")
        response = client.responses.create(model="scripted", input="hello")
    text = the_file(tmp_path).read_text()
    assert "one" not in text.partition('"tenant": ')[2].split(",")[0]
    with serving(tmp_path, api_keys=["one", "two"]) as second:
        with pytest.raises(openai.NotFoundError):
            second.client.with_options(api_key="two").responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            second.client.with_options(api_key="two").responses.delete(response.id)
        again = second.client.with_options(api_key="one").responses.retrieve(response.id)
        assert again.output_text == "you said hello"


def test_an_event_is_shown_once_it_is_written(tmp_path: Path) -> None:
    async def play() -> None:
        journal = ResponseJournal(tmp_path, 3600, 10, 1 << 20)
        record = Record({"id": "resp_1"}, "", [])
        record.journal = journal.begin("resp_1", "", {})
        may_write = threading.Event()
        journal.submit(may_write.wait)
        record.add("response.created")
        following = asyncio.ensure_future(anext(record.follow()))
        await asyncio.sleep(0.05)
        was_shown = following.done()
        may_write.set()
        assert not was_shown
        assert await following == record.events
        record.finish()
        await record.end()
        journal.close()

    asyncio.run(play())


def test_a_stream_of_many_events_leaves_turns_to_others() -> None:
    """Also where its client takes all of them at once."""

    async def play() -> tuple[list[int], int]:
        record = Record({"id": "resp_1"}, "", [])
        for _ in range(1000):
            record.add("response.created")
        record.finish()
        num_turns = 0

        async def other() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        turning = asyncio.ensure_future(other())
        sizes = [len(batch) async for batch in record.follow()]
        turning.cancel()
        return sizes, num_turns

    sizes, num_turns = asyncio.run(play())
    assert sum(sizes) == 1000
    assert max(sizes) <= 256
    assert num_turns >= len(sizes) - 1


def test_a_large_response_is_written_in_pieces_beside_the_event_loop(monkeypatch) -> None:
    """No call of ``json`` is about all of it, in which no other thread would have its turn."""
    sizes: list[int] = []
    encode_whole = json.JSONEncoder.encode

    def encode(self: json.JSONEncoder, value: Any) -> str:
        sizes.append(len(text := encode_whole(self, value)))
        return text

    async def play() -> tuple[bytes, bytes]:
        record = Record({"id": "resp_1"}, "", [])
        scores = [{"token": str(n), "logprob": -0.5, "top_logprobs": []} for n in range(20_000)]
        part = {"type": "output_text", "text": "a", "logprobs": scores}
        record.response["output"] = [{"type": "message", "content": [part]}]
        record.add("response.completed", response=record.response)
        record.finish()
        monkeypatch.setattr(json.JSONEncoder, "encode", encode)
        events = b"".join([data async for data in _encoded(record, 0)])
        return bytes((await shown(record)).body), events

    body, events = asyncio.run(play())
    assert len(body) > 10**6
    assert max(sizes) < 1000
    event = json.loads(events.partition(b"data: ")[2])
    assert event["response"] == json.loads(body)


def test_a_response_whose_file_cannot_be_written_goes_on_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, value: Any) -> None:
        if "type" in value:
            raise OSError("the disk is full")

    monkeypatch.setattr(response_journal, "_write", full)
    with serving(tmp_path) as server:
        response = server.client.responses.create(model="scripted", input="steady")
        assert response.output_text == "abcdefghij"
        assert len(events_of(server, response.id)) > 5
        eventually(lambda: not list(tmp_path.glob("*.jsonl")))


def test_a_stream_has_all_events_on_a_disk_that_has_become_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    with serving(tmp_path) as server:
        monkeypatch.setattr(Path, "unlink", refuse)
        stream = server.client.responses.create(model="scripted", input="steady", stream=True)
        response_id = next(stream).to_dict()["response"]["id"]
        monkeypatch.setattr(response_journal, "_write", refuse)
        assert [event.type for event in stream][-1] == "response.completed"
        assert server.send(f"/v1/responses/{response_id}", method="DELETE").status == 500


def slowed(method: Any) -> Any:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return method(*arguments)

    return slow


def test_a_response_is_gone_once_its_deletion_is_answered(
    server: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = server.client.responses.create(model="scripted", input="hello")
    monkeypatch.setattr(JournalFile, "_delete", slowed(JournalFile._delete))
    server.client.responses.delete(response.id)
    assert not list(folder.glob("*.jsonl"))


def test_a_response_that_is_being_removed_is_not_read_again(
    server: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = server.client.responses.create(model="scripted", input="hello")
    monkeypatch.setattr(JournalFile, "_delete", slowed(JournalFile._delete))
    deletion = threading.Thread(target=server.client.responses.delete, args=[response.id])
    deletion.start()
    eventually(lambda: response.id not in server.service.store)
    assert server.send(f"/v1/responses/{response.id}", method="GET").status == 404
    deletion.join()


def test_a_response_whose_end_a_client_has_seen_can_be_answered(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JournalFile, "_end", slowed(JournalFile._end))
    client = server.client
    with client.responses.create(model="scripted", input="hello", stream=True) as stream:
        last = next(event for event in stream if event.type == "response.completed")
        second = client.responses.create(
            model="scripted", input="on", previous_response_id=last.response.id
        )
    assert second.output_text == "you said on"
    for response_id in (last.response.id, second.id):
        client.responses.delete(response_id)


@pytest.fixture
def lines(server: Served, folder: Path) -> tuple[str, str, list[bytes]]:
    """Id, file name and lines of a response that has ended, and whose file is gone again."""
    response = server.client.responses.create(model="scripted", input="steady")
    path = the_file(folder)
    content = path.read_bytes().splitlines(keepends=True)
    server.client.responses.delete(response.id)
    return response.id, path.name, content


@pytest.mark.parametrize("damage", [b"\0" * 50 + b"\n", b"[]\n", b'{"type": "response.failed"}\n'])
def test_a_response_goes_on_from_before_a_line_that_the_disk_has_damaged(
    tmp_path: Path, lines: tuple[str, str, list[bytes]], damage: bytes
) -> None:
    response_id, name, content = lines
    (tmp_path / name).write_bytes(b"".join([*content[:5], damage, *content[6:]]))
    with serving(tmp_path) as server:
        events = events_of(server, response_id)
        assert events[:4] == [json.loads(line) for line in content[1:5]]
        assert events[-1]["type"] == "response.completed"
        assert list(texts_of(events).values()) == ["abcdefghij"]
        values = [json.loads(line) for line in (tmp_path / name).read_bytes().splitlines()]
        assert values[1:] == events


def test_a_response_that_has_ended_is_read_while_another_server_reads_it(
    tmp_path: Path, lines: tuple[str, str, list[bytes]]
) -> None:
    response_id, name, content = lines
    (tmp_path / name).write_bytes(b"".join(content))
    with serving(tmp_path) as server, (tmp_path / name).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert server.client.responses.retrieve(response_id).output_text == "abcdefghij"


def test_a_response_that_is_taken_over_slowly_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as server:
        ids = [
            server.client.responses.create(model="scripted", input=text).id for text in ("a", "b")
        ]
    is_let_go, restored = threading.Event(), Record.restored

    def wait(saved: Any, tenant: str) -> Record:
        if saved.request["id"] == ids[0]:
            is_let_go.wait()
        return restored(saved, tenant)

    monkeypatch.setattr(Record, "restored", wait)
    with serving(tmp_path) as server:
        slow = threading.Thread(target=server.client.responses.retrieve, args=[ids[0]])
        slow.start()
        try:
            assert server.client.responses.retrieve(ids[1]).output_text == "you said b"
        finally:
            is_let_go.set()
            slow.join()


def test_a_response_that_cannot_go_on_can_be_deleted(
    tmp_path: Path, lines: tuple[str, str, list[bytes]]
) -> None:
    response_id, name, content = lines
    head = content[0].replace(b'"model": "scripted"', b'"model": "of before"')
    path = tmp_path / name
    path.write_bytes(b"".join([head, *content[1:5]]))
    with serving(tmp_path) as server:
        answer = server.send(f"/v1/responses/{response_id}", method="GET")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            answer = server.send(f"/v1/responses/{response_id}", method="DELETE")
            assert (answer.status, answer.error["code"]) == (409, "response_elsewhere")
        server.client.responses.delete(response_id)
        assert not path.exists()
        answer = server.send(f"/v1/responses/{response_id}", method="DELETE")
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")


def test_a_file_that_has_become_too_old_is_not_read(
    tmp_path: Path, lines: tuple[str, str, list[bytes]]
) -> None:
    response_id, name, content = lines
    with serving(tmp_path) as server:
        (tmp_path / name).write_bytes(b"".join(content))
        os.utime(tmp_path / name, (1e9, 1e9))
        assert server.send(f"/v1/responses/{response_id}", method="GET").status == 404


@pytest.mark.parametrize(("make", "status"), [(os.mkfifo, 404), (os.mkdir, 500)])
def test_what_is_no_file_is_not_waited_for(
    tmp_path: Path, lines: tuple[str, str, list[bytes]], make: Any, status: int
) -> None:
    """And what cannot be read is not said to be missing."""
    response_id, name, _ = lines
    with serving(tmp_path) as server:
        make(tmp_path / name)
        assert server.send(f"/v1/responses/{response_id}", method="GET").status == status


def test_a_server_starts_where_a_file_is_gone_before_it_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "nowhere")
    ResponseJournal(tmp_path, 3600, 10, 1 << 20).close()


@pytest.mark.parametrize("response_id", ["resp_none", "..%2F..%2Fetc%2Fpasswd", "%00"])
def test_no_id_names_a_file(server: Served, response_id: str) -> None:
    assert server.send(f"/v1/responses/{response_id}", method="GET").status == 404


def test_what_is_not_stored_or_has_events_of_its_method_is_in_memory_alone(
    server: Served, folder: Path
) -> None:
    client = server.client
    client.responses.create(model="scripted", input="hello", store=False)
    begun = client.responses.create(
        model="majority_vote@2-scripted", input="hello", extra_body={"events": True}
    )
    assert client.responses.retrieve(begun.id).status == "completed"
    assert not list(folder.glob("*.jsonl"))


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        Settings(response_dir=str(tmp_path / "file" / "in"))


def test_old_files_and_those_beyond_the_limits_are_removed_at_the_start(tmp_path: Path) -> None:
    journal = ResponseJournal(tmp_path, 3600, 10, 1 << 20)
    for age, name in enumerate("abcd"):
        file = journal.begin(name, "", {"response": {}})
        if name != "d":
            journal.submit(file.close)
            os.utime(file.path, (1e9 - age, 1e9 - age) if name == "c" else None)
    journal.close()
    assert os.stat(file.path).st_mode & 0o77 == 0
    os.utime(file.path, (1e9, 1e9))  # it is old, and is written to
    ResponseJournal(tmp_path, 3600, 1, 1 << 20).close()
    remaining = [json.loads(path.read_text())["id"] for path in tmp_path.glob("*.jsonl")]
    assert "d" in remaining
    assert len(remaining) == 2
    assert "c" not in remaining


def delta(text: str, *scores: int) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "delta": text, "logprobs": list(scores)}


def test_a_replay_passes_over_text_and_scores_that_were_there() -> None:
    opened = {"type": "response.output_item.added", "item": {"id": "msg_1"}}
    replay = Replay([opened, delta("ab", 1), delta("", 2), delta("cd", 3, 4)])
    assert replay.event(opened["type"], opened) == opened
    kind = "response.output_text.delta"
    assert replay.rest(kind, delta("abc", 1, 2)) is None
    assert not replay.is_over
    assert replay.rest(kind, delta("def", 3, 4, 5)) == delta("ef", 5)
    assert replay.is_over
    assert replay.rest(kind, delta("g", 6)) == delta("g", 6)
    assert replay.event("response.output_text.done", {}) is None


@pytest.mark.parametrize("again", [delta("ax"), {"type": "response.output_text.done"}])
def test_a_replay_of_another_text_is_an_error(again: dict[str, Any]) -> None:
    replay = Replay([delta("ab"), {"type": "response.completed"}])
    again_made = replay.rest if "delta" in again else replay.event
    with pytest.raises(HttpError, match="cannot go on"):
        again_made(again["type"], again)


def test_a_response_whose_text_is_another_one_fails_with_the_events_of_before(
    server: Served, folder: Path, tmp_path: Path
) -> None:
    response = server.client.responses.create(model="scripted", input="steady")
    path, expected = the_file(folder), events_of(server, response.id)
    lines = path.read_bytes().splitlines(keepends=True)[:-4]
    lines[-1] = lines[-1].replace(b'"delta": "', b'"delta": "X')
    (tmp_path / path.name).write_bytes(b"".join(lines))
    with serving(tmp_path) as other:
        *before, last = events_of(other, response.id)
        assert before[:-1] == expected[: len(before) - 1]
        assert last["type"] == "response.failed"
        assert "cannot go on" in last["response"]["error"]["message"]
    server.send(f"/v1/responses/{response.id}", method="DELETE")


def test_a_response_that_calls_another_function_fails(
    server: Served, folder: Path, tmp_path: Path
) -> None:
    response = server.client.responses.create(model="scripted", **REQUESTS["calls"])
    path = the_file(folder)
    head, *lines = path.read_bytes().splitlines(keepends=True)[:-3]
    lines = [line.replace(b'"name": "add"', b'"name": "other"') for line in lines]
    (tmp_path / path.name).write_bytes(b"".join([head, *lines]))
    with serving(tmp_path) as other:
        last = events_of(other, response.id)[-1]["response"]
        assert last["status"] == "failed"
        assert "other was called, and add is now" in last["error"]["message"]
    server.client.responses.delete(response.id)


@contextmanager
def process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], OpenAI]]:
    """``forethought serve`` of the embedded reasoner, and a client."""
    command = [sys.executable, "-m", "forethought", "serve", "--port", "0", "--dtype", "float32"]
    command += ["--reward-model", "none", "--response-dir", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            told = next(line for line in running.stderr if "(the page)" in line)
            port = int(told.partition("127.0.0.1:")[2].partition(" ")[0])
            threading.Thread(target=running.stderr.read, daemon=True).start()
            url = f"http://127.0.0.1:{port}/v1"
            with OpenAI(base_url=url, api_key="key", max_retries=0, timeout=WAIT) as client:
                yield running, client
        finally:
            running.kill()


@pytest.mark.slow
def test_a_sampled_stream_goes_on_after_kill_9_with_the_text_of_its_seed(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "reasoner", "input": "What is 12 + 34 * 5?"}
    asked |= {"temperature": 1.0, "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
    with process(tmp_path) as (running, client):
        stream = client.responses.create(**asked, background=True, stream=True)
        before = [next(stream).to_dict() for _ in range(8)]
        running.kill()
        running.wait(WAIT)
    assert b"response.completed" not in the_file(tmp_path).read_bytes()
    number = before[-1]["sequence_number"]
    response_id = before[0]["response"]["id"]
    with process(tmp_path) as (_, client):
        stream = client.responses.retrieve(response_id, stream=True, starting_after=number)
        after = [event.to_dict() for event in stream]
        whole = [e.to_dict() for e in client.responses.retrieve(response_id, stream=True)]
        seed = json.loads(the_file(tmp_path).read_text().splitlines()[0])["body"]["seed"]
        undisturbed = client.responses.create(
            **asked | {"extra_body": {"ignore_eos": True, "seed": seed}}, store=False
        )
    assert before + after == whole
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    texts = [part.text for item in undisturbed.output for part in item.content or ()]
    assert list(texts_of(whole).values()) == texts
    assert whole[-1]["response"]["usage"]["output_tokens"] == undisturbed.usage.output_tokens
