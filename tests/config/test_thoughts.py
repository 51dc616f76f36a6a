"""How known models write thoughts."""

import pytest

from forethought.config.thoughts import MARKERS, after_thought, markers_in


@pytest.mark.parametrize(("start", "end"), MARKERS)
def test_what_follows_a_thought_is_found_whatever_its_markers(start, end):
    assert after_thought(f"{start}so{end} 7") == " 7"
    assert after_thought(f"{start}a{end}b{start}c{end}d") == "d"
    assert markers_in(f"p{start}so") == (start, end)


def test_the_prompt_may_have_opened_a_thought_of_most_models_and_of_no_others():
    assert after_thought("so</think>7") == "7"
    assert after_thought("<li></thought>7") == "<li></thought>7"


def test_the_last_markers_of_a_text_count():
    assert markers_in("[THINK]a[/THINK] <think>b") == ("<think>", "</think>")
    assert markers_in("no thought") is None
