"""The target writes its own texts, and an interrupted run goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import load
from forethought.assets import reasoner_dir
from forethought.errors import ParameterError
from forethought.llm.tokenizer import Tokenizer
from forethought.training import texts as corpus
from forethought.training.teacher import Teacher
from forethought.training.texts import DistillationSettings, self_distil
from models import greedy, prompts, tiny

PROMPTS = prompts((1, 4, 9, 17, 5))
SETTINGS = DistillationSettings(max_tokens=6)


class Counting(Teacher):
    """Says how many prompts it was asked."""

    asked = 0

    def generate(self, *args, **more):
        self.asked += len(args[0])
        return super().generate(*args, **more)


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(corpus, "PART", 2)
    return Counting(load("llama"), Tokenizer.load(reasoner_dir()), tiny("llama"))


def test_every_prompt_is_answered_at_the_temperatures_in_turn(
    teacher: Counting, tmp_path: Path
) -> None:
    texts = self_distil(teacher, PROMPTS, tmp_path / "t.jsonl", SETTINGS)
    assert [text.prompt for text in texts] == PROMPTS
    for place in (0, 2, 4):  # greedy ones; transformers does not stop at an end of sequence
        answer = texts[place].token_ids[len(PROMPTS[place]) :]
        assert answer == greedy(tiny("llama"), [PROMPTS[place]], 6)[0][: len(answer)]


@pytest.mark.parametrize(("lines", "asked"), [(0, 5), (1, 5), (2, 3), (3, 3), (4, 1), (5, 0)])
def test_an_interrupted_run_goes_on_behind_the_last_whole_part(
    teacher: Counting, tmp_path: Path, lines: int, asked: int
) -> None:
    whole = self_distil(teacher, PROMPTS, tmp_path / "whole", SETTINGS)
    written = (tmp_path / "whole").read_text().splitlines(keepends=True)
    (tmp_path / "part").write_text("".join(written[:lines]))
    teacher.asked = 0
    assert self_distil(teacher, PROMPTS, tmp_path / "part", SETTINGS) == whole
    assert teacher.asked == asked


def test_answers_to_other_prompts_are_refused(teacher: Counting, tmp_path: Path) -> None:
    self_distil(teacher, PROMPTS[:2], tmp_path / "t", SETTINGS)
    with pytest.raises(ParameterError, match="answers to other prompts"):
        self_distil(teacher, PROMPTS[1:], tmp_path / "t", SETTINGS)
