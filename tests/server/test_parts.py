"""Names of models and methods, thoughts in a stream, calls in a text, scripts in files."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import ParameterError, UnknownNameError, UsageError
from forethought.llm.reasoning import ReasoningSplitter, split
from forethought.llm.tool_messages import as_text
from forethought.server.backends.backend import Conversation
from forethought.server.backends.engine_backend import template_args
from forethought.server.backends.scripted_backend import ScriptedBackend, read_script
from forethought.server.http import ChunkEncoder
from forethought.server.names import Composition, read_model
from forethought.server.protocol.tool_calls import Tools

CHUNK = ChunkEncoder({"id": "1", "object": "chat.completion.chunk"})
MARKERS = ("<think>", "</think>")
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("model", "name", "choices"),
    [
        ("m", "m", None),
        ("dynasor-m", "m", (("dynasor",),)),
        ("majority_vote@8-org/m-1", "org/m-1", (("majority_vote@8",),)),
        ("dynasor+majority_vote@2-m", "m", (("dynasor+majority_vote@2",),)),
        ("dynasor&plain-m", "m", (("dynasor", "plain"),)),
        ("dynasor|plain&plain-m", "m", (("dynasor",), ("plain", "plain"))),
    ],
)
def test_methods_stand_in_front_of_a_models_name(
    model: str, name: str, choices: tuple[tuple[str, ...], ...] | None
) -> None:
    composition = None if choices is None else Composition(choices)
    assert read_model(model, ["m", "org/m-1"]) == (name, composition)


def test_the_longest_method_in_front_of_a_name_wins() -> None:
    served = ["m", "majority_vote-m"]
    assert read_model("majority_vote-m", served) == ("majority_vote-m", None)
    assert read_model("dynasor-majority_vote-m", served)[0] == "majority_vote-m"


@pytest.mark.parametrize("model", ["x", "-m", "nothing-m", "dynasor-x", "m-m", "os:path-m"])
def test_a_name_that_is_none_is_refused(model: str) -> None:
    with pytest.raises(UnknownNameError):
        read_model(model, ["m"])


def test_template_arguments_that_the_server_sets_are_not_the_clients() -> None:
    class Tokenizer:
        chat_template = "{{ messages }}"

        def apply_chat_template(self, messages: list[str], tokenize: bool = True) -> str:
            return ""

    def arguments(**given: object) -> dict[str, object]:
        asked = [{"role": "user", "content": "?"}]
        return template_args(Tokenizer(), Conversation(asked, template_args=given))

    assert arguments() == {}
    assert arguments(enable_thinking=False) == {"enable_thinking": False}
    with pytest.raises(ParameterError, match=r"chat_template_kwargs\.tokenize"):
        arguments(tokenize=True)


@settings(deadline=None)
@given(
    st.text(st.characters()),
    st.integers(0, 3),
    st.sampled_from([("content",), ("reasoning", "other")]),
)
def test_a_chunk_of_text_is_written_as_any_chunk_is(
    text: str, index: int, names: tuple[str, ...]
) -> None:
    choice = {"index": index, "delta": dict.fromkeys(names, text)}
    choice |= {"logprobs": None, "finish_reason": None}
    assert CHUNK.encode_delta(index, names, text) == CHUNK.encode(choice)


@settings(max_examples=40, deadline=None)
@given(
    thought=st.text("ab </think", max_size=12),
    answer=st.text("ab <think>", max_size=12),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    is_open=st.booleans(),
)
def test_a_stream_is_split_as_the_whole_text_is(
    thought: str, answer: str, cuts: list[int], is_open: bool
) -> None:
    text = ("" if is_open else "<think>") + thought + "</think>" + answer
    whole = split(text, MARKERS, is_open)
    splitter, pieces = ReasoningSplitter(MARKERS, is_open), []
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in itertools.pairwise(places):
        pieces.append(splitter.push(text[start:end]))
    pieces.append(splitter.finish())
    assert "".join(piece.reasoning for piece in pieces) == whole.reasoning
    assert "".join(piece.content for piece in pieces) == whole.content


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\na\n</think>\n\nb", False, ("a", "b")),
        ("a</think>b", True, ("a", "b")),
        ("a", True, ("a", "")),
        ("a </think> b", False, ("", "a </think> b")),
        (" <thin", False, ("", " <thin")),
        ("a </thin", True, ("a </thin", "")),
    ],
)
def test_a_thought_is_split_off(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    splitter = ReasoningSplitter(MARKERS, is_open)
    pieces = [splitter.push(character) for character in text] + [splitter.finish()]
    assert ("".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)) == expected


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (as_text("add", {"a": 1}), "", 1),
        ("well " + as_text("add", {}) + as_text("add", {}), "well", 2),
        ('[TOOL_CALLS][{"name": "add", "arguments": {}}]', "", 1),
        ('{"name": "add", "parameters": {}}', "", 1),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', 0),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", 0),
        ("plain text", "plain text", 0),
        ("[" * 5000, "[" * 5000, 0),
    ],
)
def test_calls_are_found_in_the_formats_of_known_models(
    text: str, content: str, count: int
) -> None:
    _, found, calls = Tools([ADD]).parse(text)
    assert (found, len(calls)) == (content, count)
    assert len({call.id for call in calls}) == count


def test_a_script_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"a": ["1", {"text": "2", "delay": 0.5}], "*": {"error": "no"}}')
    script = read_script(path)
    assert script("a", 0).text == "1"
    assert script("a", 1).delay == 0.5
    with pytest.raises(UsageError, match="no more answers"):
        script("a", 2)
    assert str(script("else", 0).error) == "no"
    path.write_text('["1"]')
    assert read_script(path)("any", 0).text == "1"


@pytest.mark.parametrize("text", ["", "7", '[{"nonsense": 1}]', "{", '[{"tool_calls": [{}]}]'])
def test_a_file_that_is_no_script_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="script"):
        read_script(path)


class Marking(ScriptedBackend):
    """Puts a ^ before each whole text, as tokenizers put the beginning of the sequence."""

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        return super().tokenize("^" * special + text)


@pytest.mark.parametrize("text", ["^hello", "^", "^^", "^hello^"])
def test_a_prompt_of_ids_as_text_becomes_the_same_ids_again(text: str) -> None:
    backend, ids = Marking([]), [ord(character) for character in text]
    assert backend.tokenize(backend.as_text(ids)) == ids
    assert backend.as_text(text) == text


def test_a_prompt_as_text_is_whole_where_nothing_is_put_before_it() -> None:
    backend = ScriptedBackend([])
    assert backend.as_text([ord("a"), ord("a"), ord("b")]) == "aab"
