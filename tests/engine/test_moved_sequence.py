"""A sequence that is copied in parts, while it generates, goes on exactly in another engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines import GREEDY, drain, engine, expect_empty
from forethought.config.sampling import SamplingParams
from forethought.engine.base import Begun
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence
from forethought.errors import CapacityError

PROMPT = list(range(5, 27))
PARAMS = {
    "greedy": GREEDY.replace(max_tokens=40),
    "seeded": SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, logprobs=1),
}


def begun_in(machine: Engine, params: SamplingParams, num_steps: int) -> Sequence:
    (sequence,) = machine.add(PROMPT, params, keep=True)
    for _ in range(num_steps):
        machine.step()
    return sequence


def part(machine: Engine, sequence: Sequence, start: int, *, ends: bool = False):
    """What a replica copies of a sequence from ``start`` on."""
    if ends:
        machine.abort(sequence)
    count = len(sequence.tokens) if ends else sequence.num_computed
    return machine.capture(sequence, sequence.tokens[:count], start)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
@pytest.mark.parametrize("name", PARAMS)
def test_it_goes_on_with_the_same_tokens_and_computes_none_of_those_before(
    architecture: str, name: str
) -> None:
    params = PARAMS[name]
    alone = engine(architecture, pages=40)
    whole = begun_in(alone, params, 0)
    drain(alone)
    source, target = engine(architecture, pages=40), engine(architecture, pages=40)
    sequence = begun_in(source, params, 6)
    moved = target.restore(part(source, sequence, 0))
    for count in (3, 9):
        for _ in range(count):
            source.step()
        target.append_snapshot(moved, part(source, sequence, len(moved.tokens), ends=count == 9))
    num_begun = len(sequence.tokens) - len(PROMPT)
    assert moved.tokens == sequence.tokens
    target.resume(moved, params, begun=Begun(num_begun))
    drain(target)
    assert moved.output == whole.output
    assert target.stats.prefilled + target.stats.decoded <= 1 + len(whole.output) - num_begun
    for machine, held in ((alone, whole), (source, sequence), (target, moved)):
        machine.close(held)
        expect_empty(machine)


def test_sequences_that_begin_alike_share_the_pages_where_they_go_within_a_tenant() -> None:
    source, target = engine("llama", pages=60), engine("llama", pages=60)
    params = [GREEDY.replace(cache_salt=salt, seed=n) for n, salt in enumerate("aab")]
    sequences = [begun_in(source, one, 8) for one in params]
    copies = [target.restore(part(source, sequence, 0)) for sequence in sequences]
    num_pages = len(PROMPT) // target.pool.page_size
    assert copies[0].table.pages[:num_pages] == copies[1].table.pages[:num_pages]
    assert not {*copies[0].table.pages} & {*copies[2].table.pages}
    child = source.fork(sequences[2])  # its tenant is not known before it generates
    assert part(source, child, 0).cache_salt is None
    for held in copies:
        target.close(held)
    for held in (*sequences, child):
        source.close(held)
    expect_empty(source)
    expect_empty(target)


def test_pages_that_are_lost_between_two_parts_are_computed_again() -> None:
    source, target = engine("llama", pages=40), engine("llama", pages=40)
    sequence = begun_in(source, PARAMS["greedy"], 6)
    moved = target.restore(part(source, sequence, 0))
    moved.table.release()
    source.step()
    last = part(source, sequence, len(moved.tokens), ends=True)
    target.append_snapshot(moved, replace(last, cache_salt=None))
    assert (moved.tokens, moved.num_computed) == (sequence.tokens, 0)
    target.resume(moved, PARAMS["greedy"], begun=Begun(len(sequence.output)))
    drain(target)
    source.resume(sequence, PARAMS["greedy"], begun=Begun(len(sequence.output)))
    drain(source)
    assert moved.output == sequence.output
    for machine, held in ((source, sequence), (target, moved)):
        machine.close(held)
        expect_empty(machine)


def test_a_part_without_room_leaves_what_was_there() -> None:
    source, target = engine("llama", pages=40), engine("llama", pages=10)
    sequence = begun_in(source, PARAMS["greedy"], 2)
    moved = target.restore(part(source, sequence, 0))
    before = list(moved.tokens), moved.num_computed
    drain(source)
    with pytest.raises(CapacityError):
        target.append_snapshot(moved, part(source, sequence, len(moved.tokens), ends=True))
    assert (moved.tokens, moved.num_computed) == before
    source.close(sequence)
    target.close(moved)
    expect_empty(source)
    expect_empty(target)
