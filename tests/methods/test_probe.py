"""Probes of a chain, and the answers that are written behind it."""

import pytest

from forethought.methods.parts.probe import (
    ANSWER_END,
    ANSWER_SUFFIX,
    ANSWER_SUFFIX_WITH_MARKER,
    PROBE_SUFFIX,
    Probe,
    written_answer,
)
from forethought.scaffolding import GenerationTask
from forethought.scaffolding.thinking import ThinkingProfile


def probing(length=8):
    main = GenerationTask(input_str="Q: ", temperature=0.6, seed=3, priority=2)
    main.output_str, main.output_tokens = "so", [1, 2]
    return Probe(main, length)


def finished(probe, text, stop_reason="}"):
    probe.task.output_str, probe.task.output_tokens = text, [0] * len(text)
    probe.task.finish_reason, probe.task.stop_reason = "stop", stop_reason
    probe.on_result()
    return probe.answer


def test_a_probe_asks_behind_the_chain_with_its_fields_and_before_it():
    task = probing().task
    assert task.input_str == f"Q: so{PROBE_SUFFIX}"
    assert (task.temperature, task.seed, task.priority) == (0.6, 3, 1)


def test_the_answer_of_a_probe_ends_at_the_brace_that_closes_the_box():
    assert finished(probing(), " 42") == "42"
    assert finished(probing(), "42", stop_reason=None) == ""
    nested = probing()
    assert finished(nested, "\\frac{1") is None
    assert nested.task.input_str.endswith("\\frac{1}"), "it goes on behind the inner brace"
    assert finished(probing(length=3), "{12") == "", "no token is left"


def test_an_open_thought_is_closed_before_the_answer_is_written():
    opened = ThinkingProfile(("<think>", "</think>"), is_open=True)
    assert written_answer("so", "7", opened) == f"{ANSWER_SUFFIX_WITH_MARKER}7{ANSWER_END}"
    assert written_answer("so</think>", "7", opened) == f"{ANSWER_SUFFIX}7{ANSWER_END}"


@pytest.mark.parametrize("markers", [("<think>", "</think>"), None])
def test_where_no_thought_is_open_none_is_closed(markers):
    profile = ThinkingProfile(markers)
    assert written_answer("so", "7", profile) == f"{ANSWER_SUFFIX}7{ANSWER_END}"


def test_a_thought_is_closed_by_the_markers_of_its_model():
    profile = ThinkingProfile(("[THINK]", "[/THINK]"))
    assert "...[/THINK]\n" in written_answer("[THINK]so", "7", profile)
    assert written_answer("<think>so", "7", profile) == f"{ANSWER_SUFFIX}7{ANSWER_END}"
