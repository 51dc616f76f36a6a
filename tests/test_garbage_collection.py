"""Rarer garbage collections, and the thresholds of the program afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from forethought import LLM, SamplingParams
from forethought.garbage_collection import RARE, left_out_of_collections, rare_collections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield (700, 10, 10)
    gc.set_threshold(*before)


def test_collections_are_rarer_while_a_batch_is_generated(
    monkeypatch: pytest.MonkeyPatch, thresholds: tuple[int, int, int]
) -> None:
    with LLM() as llm:
        step, during = llm._frontend.step, []
        monkeypatch.setattr(
            llm._frontend, "step", lambda *args: during.append(gc.get_threshold()) or step(*args)
        )
        llm.generate("Sam has 3 nuts.", SamplingParams(max_tokens=3))
        assert set(during) == {RARE}
        assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("chosen", [(0, 0, 0), (50_000, 20, 100)])
def test_a_program_that_has_made_them_rarer_itself_keeps_its_thresholds(
    chosen: tuple[int, int, int],
) -> None:
    gc.set_threshold(*chosen)
    with rare_collections():
        assert gc.get_threshold() == chosen
    assert gc.get_threshold() == chosen


def test_blocks_that_overlap_leave_the_thresholds_of_before_the_first(
    thresholds: tuple[int, int, int],
) -> None:
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_is_left_out_is_seen_again_afterwards(is_frozen: bool) -> None:
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    with left_out_of_collections():
        assert gc.get_freeze_count() > 0
    assert (gc.get_freeze_count() > 0) == is_frozen
    if was_frozen:
        gc.freeze()
