"""Steps with chain drafts in one call: in C++ what the reference and single steps give."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from chain_drafters import KINDS, few_tokens
from engines import drain, engine_over
from forethought.backends.cpu import library
from forethought.backends.cpu import native_steps as native
from forethought.config.sampling import SamplingParams
from forethought.engine import continuous
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence
from forethought.model import loader
from forethought.speculative.step_runner import SingleSteps
from generations import expect_same
from models import prompts

pytestmark = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)

PROMPTS = prompts((9, 4, 33, 1))
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=size, ignore_eos=True) for size in (30, 11, 24, 17)
]


def run(
    kind: str, num_steps: int, dtype: str = "float32", **limits: Any
) -> tuple[Engine, list[Sequence]]:
    """Requests of several lengths, which accept differently and end at different times."""
    architecture, configure = KINDS[kind]
    lm = loader.load(few_tokens(architecture), dtype=dtype, forward="native")
    settings = {"pages": 96, "page_size": 4, "max_num_tokens": 64, **limits}
    machine = engine_over(lm, speculative=[configure()], **settings)
    machine.num_decode_steps = num_steps
    begun = [
        machine.add(prompt, params, keep=True)[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    drain(machine)
    return machine, begun


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_several_steps_equal_single_steps_and_the_reference(
    kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    call = native.ChainCall.run

    def counted(self: native.ChainCall, *args: Any) -> Any:
        calls.append(len(self.rows))
        return call(self, *args)

    monkeypatch.setattr(native.ChainCall, "run", counted)
    single, several = run(kind, 1, dtype), run(kind, 8, dtype)
    assert calls
    assert several[0].stats.failed_forwards == 0
    assert 8 < single[0].stats.accepted < single[0].stats.drafted - 8
    monkeypatch.setattr(continuous, "step_runners", lambda has_graphs: (SingleSteps,))
    reference = run(kind, 8, dtype)
    for other in (several, reference):
        machines, kept = zip(single, other, strict=True)
        expect_same(machines, kept)


@pytest.mark.parametrize("kind", ["draft model", "eagle3", "mtp"])
def test_neither_threads_nor_pages_nor_the_number_of_steps_matter(kind: str) -> None:
    before, expected = torch.get_num_threads(), run(kind, 8)
    try:
        for num_threads, page_size, num_steps in ((1, 1, 3), (3, 16, 50)):
            torch.set_num_threads(num_threads)
            limits = {"page_size": page_size, "pages": 512 // page_size}
            _, found = run(kind, num_steps, **limits)
            for sequence, other in zip(found, expected[1], strict=True):
                assert sequence.tokens == other.tokens
                assert sequence.drafted_steps == other.drafted_steps
                assert sequence.metrics == other.metrics
    finally:
        torch.set_num_threads(before)


def test_a_prompt_is_read_by_the_draft_network_in_parts() -> None:
    """What it has not read of a long prompt is more than one forward takes."""
    single, several = (run("eagle3", size, max_num_tokens=20) for size in (1, 8))
    expect_same(*zip(single, several, strict=True))


def test_a_token_outside_the_drafters_vocabulary_ends_its_drafts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> Any:
        raise IndexError("token id 100 is outside the vocabulary")

    expected = run("draft model", 8)
    monkeypatch.setattr(native.ChainCall, "run", refuse)
    machine, kept = run("draft model", 8)
    assert [each.tokens for each in kept] == [each.tokens for each in expected[1]]
    assert machine.stats.failed_forwards > 0
    assert machine.stats.draft_failures == 0
    assert not math.isnan(machine.stats.draft_seconds)
