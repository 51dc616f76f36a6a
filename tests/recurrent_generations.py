"""What holds of a generation of a model with recurrent layers, however its steps were made."""

from __future__ import annotations

from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import pytest

from engines import GREEDY, drain, expect_empty
from forethought.backends.cpu.module_steps import ModuleSteps
from forethought.config.sampling import SamplingParams
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence
from forethought.kv.recurrent import RecurrentStates, RecurrentStorage
from models import greedy, prompts

PROMPTS = prompts((3, 17, 9, 30, 70))


def mixed(model: Path, sampled: SamplingParams, most: int) -> list[SamplingParams]:
    """Of ``PROMPTS``: greedy and sampled, with scores, penalties, and ends at different times.

    Args:
        model: whose text ends the first one.
        sampled: what the sampled ones have.
        most: tokens of the last one.
    """
    [text] = greedy(model, PROMPTS[:1], 12)
    return [
        GREEDY.replace(max_tokens=140, stop_token_ids=[text[-1]]),
        sampled.replace(max_tokens=33, logprobs=2),
        GREEDY.replace(max_tokens=90, logprobs=0),
        sampled.replace(max_tokens=7, top_k=20, top_p=0.9, repetition_penalty=1.2),
        sampled.replace(max_tokens=most, seed=8, min_tokens=5, ignore_eos=False),
    ]


def count_calls(monkeypatch: pytest.MonkeyPatch, *, drafting: bool) -> list[int]:
    """The forwards of each call of several steps in C++ from now on, or of those with drafts."""
    made, original = list[int](), ModuleSteps.advance

    def advance(self: ModuleSteps, *arguments: Any) -> Any:
        result = original(self, *arguments)
        if self.drafting is not None or not drafting:
            made.append(result.num_forwards)
        return result

    monkeypatch.setattr(ModuleSteps, "advance", advance)
    return made


def states_of(machine: Engine) -> RecurrentStates:
    storage = machine.runner.storage
    assert isinstance(storage, RecurrentStorage)
    return storage.states


def kept_states(machine: Engine, sequence: Sequence) -> dict[int, Any]:
    """The states that a sequence may go on from, by its length then."""
    states, slots = states_of(machine), sequence.table.slots(0, sequence.num_computed)
    return {
        length: [
            {kind: tensor.tolist() for kind, tensor in layer.items()}
            for layer in states._by_slot[slot]
        ]
        for length, slot in enumerate(slots, 1)
        if slot in states
    }


def facts(machine: Engine, sequence: Sequence) -> dict[str, Any]:
    """What holds of a generation, however many steps were made at once."""
    stored = sequence.table.slots(0, sequence.num_computed)
    return {
        "tokens": sequence.tokens,
        "computed": (sequence.num_computed, sequence.num_ever_computed),
        "keys": [layer[stored].tolist() for layer in machine.runner.storage.keys],
        "states": kept_states(machine, sequence),
        "end": (sequence.finish_reason, sequence.stop_reason),
        "usage": sequence.usage,
        "metrics": sequence.metrics,
    }


def run(
    machine: Engine, prompts: List[list[int]], each: List[SamplingParams]
) -> list[dict[str, Any]]:
    """The facts and scores of a kept sequence for each of the prompts, of which all are closed."""
    sequences = [
        machine.add(prompt, params, keep=True)[0]
        for prompt, params in zip(prompts, each, strict=False)
    ]
    scores: dict[int, list[Any]] = {sequence.id: [] for sequence in sequences}
    for event in drain(machine):
        scores[event.sequence.id] += event.logprobs or [None] * len(event.tokens)
    found = [facts(machine, each) | {"scores": scores[each.id]} for each in sequences]
    for sequence in sequences:
        machine.close(sequence)
    expect_empty(machine)
    return found
