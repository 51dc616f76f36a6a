"""Texts and prompts to learn from: every spelling, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forethought.assets import reasoner_dir
from forethought.errors import UsageError
from forethought.llm.tokenizer import Tokenizer
from forethought.training.texts import Text, load_prompts, load_texts, save_texts

TOKENIZER = Tokenizer.load(reasoner_dir())


def lines(path: Path, *records: Any) -> Path:
    written = (each if isinstance(each, str) else json.dumps(each) for each in records)
    path.write_text("\n".join(written) + "\n", encoding="utf-8")
    return path


def test_ids_are_taken_as_they_are_and_written_as_they_are_read(tmp_path: Path) -> None:
    texts = [Text([5, 6, 7, 8], 2), Text([9, 10], 1)]
    save_texts(texts[:1], tmp_path / "t.jsonl")
    save_texts(texts[1:], tmp_path / "t.jsonl")
    assert load_texts(tmp_path / "t.jsonl", TOKENIZER, 100) == texts
    assert texts[0].prompt == [5, 6]


def test_words_are_asked_as_a_chat_is_and_end(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Tom has 3 apples."}]
    reply = [*asked, {"role": "assistant", "content": "3 + 4 = 7."}]
    pair = {"prompt": "Tom has 3 apples.", "response": "3 + 4 = 7."}
    first, second = load_texts(lines(tmp_path / "t", pair, {"messages": reply}), TOKENIZER, 100)
    assert first == second
    assert first.prompt == TOKENIZER.encode_more(TOKENIZER.render(asked))
    answer = first.token_ids[first.prompt_length :]
    assert TOKENIZER.decode(answer) == "3 + 4 = 7."
    assert answer[-1] == TOKENIZER.hf.eos_token_id


def test_long_texts_are_cut_and_those_without_an_answer_left_out(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "t",
        {"token_ids": [5] * 10, "prompt_length": 3},
        {"token_ids": [6] * 10, "prompt_length": 5},
    )
    assert load_texts(path, TOKENIZER, 5) == [Text([5] * 5, 3)]
    with pytest.raises(UsageError, match="none of its 2 texts has an answer within 3 tokens"):
        load_texts(path, TOKENIZER, 3)


def test_prompts_are_lines_of_text_or_the_beginnings_of_texts(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "How many?"}
    found = load_prompts(
        lines(
            tmp_path / "p",
            "How many?",
            {"prompt": "How many?", "response": "3"},
            {"messages": [asked, {"role": "assistant", "content": "3"}]},
            {"token_ids": [5, 6, 7], "prompt_length": 2},
        ),
        TOKENIZER,
    )
    expected = TOKENIZER.encode_more(TOKENIZER.render([asked]))
    assert found == [expected, expected, expected, [5, 6]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "is not JSON"),
        ("only words", "nothing to read"),
        ({"prompt": "without an answer"}, "nothing to read"),
        ({"token_ids": [5, "x"], "prompt_length": 1}, "a list of integers"),
        ({"messages": [{"role": "user", "content": "?"}]}, "messages with a reply"),
    ],
)
def test_what_is_no_text_is_refused_with_its_line(tmp_path: Path, line: Any, said: str) -> None:
    path = lines(tmp_path / "t", {"token_ids": [5, 6], "prompt_length": 1}, line)
    with pytest.raises(UsageError, match=said) as caught:
        load_texts(path, TOKENIZER, 100)
    assert f"{path}:2" in str(caught.value)


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(UsageError):
            load_texts(path, TOKENIZER, 100)
        with pytest.raises(UsageError):
            load_prompts(path, TOKENIZER)
