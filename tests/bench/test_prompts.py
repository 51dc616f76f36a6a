"""Prompts of a benchmark: a file with one per line, as text or as JSON objects."""

import pytest

from forethought.bench import prompts
from forethought.errors import UsageError


def test_a_line_is_a_prompt_or_an_object_that_holds_one(tmp_path):
    path = tmp_path / "prompts.txt"
    lines = ["plain", "", '{"prompt": "p"}', '{"question": "q", "answer": 3}', "plain", "{not json"]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert prompts.load_prompts(path) == ["plain", "p", "q", "{not json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "no prompts in"), ('a\n{"answer": 3}', ":2"), ('{"prompt": 3}', ":1")],
)
def test_a_file_without_prompts_is_refused_with_the_place(tmp_path, text, said):
    path = tmp_path / "prompts.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        prompts.load_prompts(path)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"/nowhere\.txt"):
        prompts.load_prompts(prompts.Path("/nowhere.txt"))


def test_the_shipped_prompts_are_all_different():
    assert len(set(prompts.shipped_prompts())) == len(prompts.shipped_prompts()) >= 64
