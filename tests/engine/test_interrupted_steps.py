"""Several steps in one call end early where somebody waits, with the tokens of single steps."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from engines import GREEDY, change_advance, drain, engine, expect_empty, outputs
from forethought.engine.engine import Engine
from forethought.speculative.step_runner import Advance
from models import ARCHITECTURES, greedy, prompts, tiny

PROMPTS = prompts((3, 17, 9))
EXPECTED = greedy(tiny("llama"), PROMPTS, 16)
IN_CPP_AND_TORCH = ["llama", "gpt2"]
assert {*IN_CPP_AND_TORCH} <= {*ARCHITECTURES}


def made(architecture: str = "llama", **settings: Any) -> Engine:
    machine = engine(architecture, page_size=4, max_num_tokens=200, **settings)
    machine.num_decode_steps = 8
    return machine


def sizes(machine: Engine) -> list[int]:
    return [len(event.tokens) for event in drain(machine)]


@pytest.mark.parametrize("architecture", IN_CPP_AND_TORCH)
def test_a_request_from_another_thread_ends_a_call_with_its_step(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = made(architecture)

    def requested(advance: Any, rows: Any, num_steps: int) -> Advance:
        machine.interrupt.request()
        result: Advance = advance(rows, num_steps)
        machine.interrupt.clear()
        return result

    change_advance(monkeypatch, requested)
    sequences = [machine.add(PROMPTS[0], GREEDY)[0]]
    assert sizes(machine) == [1] * 16
    assert outputs(sequences) == greedy(tiny(architecture), PROMPTS[:1], 16)
    expect_empty(machine)


@pytest.mark.parametrize("architecture", IN_CPP_AND_TORCH)
def test_a_call_ends_with_a_row_where_clients_wait_for_it(architecture: str) -> None:
    machine = made(architecture)
    machine.ends_with_rows = True
    short = machine.add(PROMPTS[0], GREEDY.replace(max_tokens=4))[0]
    long = machine.add(PROMPTS[1], GREEDY)[0]
    assert sizes(machine) == [1, 1, 3, 3, 8, 4]
    expected = greedy(tiny(architecture), PROMPTS[:2], 16)
    assert outputs([short, long]) == [expected[0][:4], expected[1]]
    expect_empty(machine)


def test_a_call_ends_with_a_row_where_others_wait_for_its_place() -> None:
    machine = made(max_batch_size=2)
    for prompt, size in zip(PROMPTS, (4, 16, 6), strict=True):
        machine.add(prompt, GREEDY.replace(max_tokens=size))
    assert sizes(machine) == [1, 1, 3, 3, 6, 6, 6]
    expect_empty(machine)


@pytest.mark.parametrize("architecture", IN_CPP_AND_TORCH)
def test_a_call_ends_with_a_token_that_may_end_a_stop_string(architecture: str) -> None:
    machine = made(architecture)
    (expected,) = greedy(tiny(architecture), PROMPTS[:1], 16)
    sequence = machine.add(PROMPTS[0], GREEDY.replace(stop=["x"]))[0]
    sequence.stop_candidates = array("q", sorted({expected[3], 10**6}))
    first = expected.index(expected[3])
    assert sizes(machine)[:2] == [1, first]
    assert sequence.output == expected
    expect_empty(machine)


def test_at_most_so_many_steps_are_made_as_the_caller_says() -> None:
    machine = made()
    sequence = machine.add(PROMPTS[0], GREEDY)[0]
    machine.step()
    for num_steps, size in ((3, 4), (1, 5), (100, 13)):
        machine.step(num_steps)
        assert len(sequence.output) == size
    drain(machine)
    assert [sequence.output] == EXPECTED[:1]


def test_a_held_sequence_waits_for_its_client_while_others_go_on() -> None:
    machine = made()
    held, other = (machine.add(prompt, GREEDY)[0] for prompt in PROMPTS[:2])
    held.hold = held.prompt_length + 5
    drain(machine)
    assert len(held.output) == 5
    assert other.output == EXPECTED[1]
    assert not machine.has_work
    held.hold += 3
    drain(machine)
    assert len(held.output) == 8
    held.hold = float("inf")
    drain(machine)
    assert held.output == EXPECTED[0]
    expect_empty(machine)


def test_no_sequence_is_held_while_others_wait_for_its_place() -> None:
    """Its client may wait for them, as Dynasor's chain does for its probes."""
    machine = made(max_batch_size=1)
    held = machine.add(PROMPTS[0], GREEDY)[0]
    held.hold = held.prompt_length + 2
    drain(machine)
    assert len(held.output) == 2
    other = machine.add(PROMPTS[1], GREEDY)[0]
    drain(machine)
    assert outputs([held, other]) == EXPECTED[:2]
    expect_empty(machine)


@pytest.mark.parametrize("architecture", IN_CPP_AND_TORCH)
def test_in_a_large_batch_a_call_ends_when_one_row_in_eight_waits(architecture: str) -> None:
    """A row that may have ended its stop string waits while the others go on."""
    machine = made(architecture, max_batch_size=16)
    (expected,) = greedy(tiny(architecture), PROMPTS[:1], 16)
    waiting, ended = (GREEDY.replace(stop=["x"]), GREEDY.replace(max_tokens=5))
    params = [waiting, ended, *[GREEDY] * 14]
    sequences = [machine.add(PROMPTS[0], settings)[0] for settings in params]
    sequences[0].stop_candidates = array("q", [expected[3]])
    first = expected.index(expected[3])
    machine.ends_with_rows = True
    while machine.has_work and not sequences[2].output[1:]:
        machine.step()
    sizes = [len(sequence.output) for sequence in sequences[:3]]
    assert sizes == [first + 1, 5, 5]
    drain(machine)
    assert outputs(sequences) == [expected, expected[:5], *[expected] * 14]
    expect_empty(machine)
