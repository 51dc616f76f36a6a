"""Prompts that a target writes itself: users' turns, each once; an interrupted run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forethought.assets import reasoner_dir
from forethought.errors import UsageError
from forethought.llm.tokenizer import Tokenizer
from forethought.training import prompts
from forethought.training.prompts import write_prompts

END = 1


class Speaker:
    """A teacher whose n-th sample is the n-th of some turns, again and again."""

    def __init__(self, *turns: str, ends: bool = True) -> None:
        self.tokenizer = Tokenizer.load(reasoner_dir())
        self.lm = SimpleNamespace(eos_token_ids=(END,))
        self._turns, self._ends = turns, [END] if ends else []
        self.prefixes: list[list[int]] = []

    def generate(self, prefixes: Any, params: Any) -> Any:
        self.prefixes += prefixes
        turns = [self._turns[(sampling.seed & 0xFFFF) % len(self._turns)] for sampling in params]
        return SimpleNamespace(
            token_ids=[self.tokenizer.encode_more(turn) + self._ends for turn in turns]
        )


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_PART", 2)


def written(teacher: Any, count: int, path: Path, **more: Any) -> list[str]:
    write_prompts(teacher, count, path, 0, **more)
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def test_different_turns_that_ended_are_prompts(tmp_path: Path) -> None:
    speaker, shown = Speaker("one", " two", "one", "", "3"), list[tuple[str, int, int]]()
    found = written(speaker, 3, tmp_path / "p", on_texts=lambda *done: shown.append(done))
    assert found == ["one", "two", "3"]
    assert shown[0] == ("prompts", 0, 3)
    assert shown[-1] == ("prompts", 3, 3)


def test_a_turn_continues_what_is_in_front_of_a_users_words(tmp_path: Path) -> None:
    speaker = Speaker("one", "two")
    written(speaker, 2, tmp_path / "p")
    chat = speaker.tokenizer.render([{"role": "user", "content": "one"}])
    assert speaker.tokenizer.encode_more(chat)[: len(speaker.prefixes[0])] == speaker.prefixes[0]
    assert chat.startswith(speaker.tokenizer.decode(speaker.prefixes[0], False) + "one")


def test_an_interrupted_run_ends_with_the_prompts_of_one_that_was_not(tmp_path: Path) -> None:
    turns = [str(number) for number in range(9)]
    whole = written(Speaker(*turns), 7, tmp_path / "whole")
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    (tmp_path / "part").write_text("".join(lines[:4]) + '{"prompt": "4')
    assert written(Speaker(*turns), 7, tmp_path / "part") == whole
    assert written(Speaker("never asked"), 7, tmp_path / "part") == whole


@pytest.mark.parametrize(
    ("speaker", "why"),
    [
        (lambda: Speaker("always the same"), "of 12 samples only 1 are different prompts"),
        (lambda: Speaker("a", "b", "c", ends=False), "only 0 are different"),
    ],
)
def test_a_model_that_writes_no_prompts_is_refused(tmp_path: Path, speaker: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        written(speaker(), 3, tmp_path / "p")


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    speaker = Speaker("one")
    speaker.tokenizer.hf.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        written(speaker, 1, tmp_path / "p")
