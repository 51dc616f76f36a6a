"""Sequences move between replicas, which are scripted here, and generate what they would have."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from forethought.cluster import migration as migration_module
from forethought.cluster.messages import Close, Copy, Generate, Prepare, Stop
from forethought.cluster.migration import Rebalancing, balance, make_room
from forethought.config.sampling import SamplingParams
from forethought.engine.sequence import Sequence
from forethought.errors import ParameterError
from forethought.outputs import EngineLoad
from scripted_replicas import GREEDY, SEEDED, Scripted, ScriptedReplica, expected

PROMPT = [5, 6, 7, 8]

pytestmark = pytest.mark.usefixtures("at_once")


def home_of(cluster: Scripted, sequence: Sequence) -> ScriptedReplica:
    return cluster.engine._remotes[sequence].link.channel


def other_than(cluster: Scripted, replica: ScriptedReplica) -> ScriptedReplica:
    return next(other for other in cluster.alive if other is not replica)


def move(cluster: Scripted, sequence: Sequence) -> tuple[ScriptedReplica, ScriptedReplica]:
    """Begin to move a sequence to the other replica; the two."""
    source = home_of(cluster, sequence)
    target = other_than(cluster, source)
    remote = cluster.engine._remotes[sequence]
    assert cluster.engine.migration.move(remote, cluster.link(target))
    return source, target


@pytest.mark.parametrize("fields", [GREEDY, SEEDED])
@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("move_at", [0, 1, 2, 7, 20, 34, *range(35, 40)])
def test_a_move_at_any_token_changes_no_output(fields: dict, move_at: int, is_quick: bool) -> None:
    cluster = Scripted()
    for replica in cluster.alive:
        replica.is_quick = is_quick
    (sequence,) = cluster.start(PROMPT, **fields)
    for number in cluster.steps():
        if number == move_at:
            _, target = move(cluster, sequence)
    assert cluster.outputs[sequence] == expected(PROMPT, SamplingParams(**fields))
    if move_at < 30:
        (generate,) = [c for c in target.commands if isinstance(c, Generate)]
        assert list(generate.rest) == [], "the target had to compute what was copied"
        num_computed = sum(replica.num_computed for replica in cluster.alive)
        assert num_computed == len(PROMPT) + len(cluster.outputs[sequence])
        assert cluster.engine.stats.migrated == 1
    assert cluster.engine.num_moved == cluster.fleet.num_lost == 0
    cluster.expect_nothing_left()


def test_the_source_generates_until_what_it_has_is_copied() -> None:
    cluster = Scripted()
    (sequence,) = cluster.start(PROMPT, **SEEDED)
    for _ in range(5):
        cluster.step()
    source, target = move(cluster, sequence)
    cluster.finish()
    first, last = [command for command in source.commands if isinstance(command, Copy)]
    assert (first.start, first.generation) == (0, None)
    assert last.start == len(PROMPT) + 4
    assert last.generation is not None
    (generate,) = [command for command in target.commands if isinstance(command, Generate)]
    assert generate.length > last.start + 1


def test_the_target_compiles_a_grammar_while_pages_are_copied() -> None:
    cluster = Scripted()
    (sequence,) = cluster.start(PROMPT, **SEEDED, guided_decoding={"regex": "a*"})
    cluster.step()
    _, target = move(cluster, sequence)
    cluster.finish()
    commands = [type(command) for command in target.commands]
    assert commands[:2] == [Prepare, Generate]


def test_parts_are_copied_until_few_tokens_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Scripted()
    (sequence,) = cluster.start(list(range(1, 400)), **SEEDED)
    cluster.step()
    source, target = move(cluster, sequence)

    def bounded(handle: int, tokens: list[int], num_left: int) -> None:
        ends = [c for c in source.commands if isinstance(c, Copy)][-1].generation is not None
        start = len(target.sessions.get(handle, ()))
        stop = len(tokens) if ends else min(len(tokens), start + 100)
        receive(handle, tokens[:stop], len(tokens) - stop)

    receive = target.receive
    monkeypatch.setattr(target, "receive", bounded)
    cluster.finish()
    starts = [c.start for c in source.commands if isinstance(c, Copy)]
    assert starts[:4] == [0, 100, 200, 300]
    assert cluster.outputs[sequence] == expected(range(1, 400), SamplingParams(**SEEDED))


def test_a_parked_sequence_moves_with_what_is_stored_of_it() -> None:
    cluster = Scripted()
    engine = cluster.engine
    sequence = engine.open(PROMPT)
    engine.resume(sequence, SamplingParams(**GREEDY))
    cluster.finish()
    source, target = move(cluster, sequence)
    for _ in range(3):
        cluster.step()
    assert home_of(cluster, sequence) is target
    assert not source.sessions
    fork, tokens = engine.fork(sequence, 20), list(sequence.tokens)
    engine.rewind(sequence, 30)
    for live in (sequence, fork):
        cluster.outputs[live], before = [], list(live.tokens)
        engine.resume(live, SamplingParams(**SEEDED))
        cluster.finish()
        assert before == tokens[: len(before)]
        assert cluster.outputs[live] == expected(before, SamplingParams(**SEEDED))
    rests = [len(c.rest) for c in target.commands if isinstance(c, Generate)]
    assert rests == [0, 0], "tokens that were copied were computed again"


def test_a_parked_sequence_that_has_generated_other_tokens_meanwhile_is_not_moved() -> None:
    cluster, one = Scripted(), {**GREEDY, "max_tokens": 1}
    engine, sequence = cluster.engine, cluster.engine.open([*range(1, 50)])
    engine.resume(sequence, SamplingParams(**one))
    cluster.finish()
    move(cluster, sequence)
    engine.rewind(sequence, 5)
    engine.extend(sequence, [*range(100, 160)])
    for fields in (one, GREEDY):  # the first one ends before an answer of the target is read
        prompt, cluster.outputs[sequence] = list(sequence.tokens), []
        engine.resume(sequence, SamplingParams(**fields))
        cluster.finish()
        cluster.step()
        assert cluster.outputs[sequence] == expected(prompt, SamplingParams(**fields))
    assert engine.stats.migrated == 0
    engine.close(sequence)
    cluster.expect_nothing_left()


def test_the_pause_of_a_generation_that_is_aborted_in_it_is_not_measured() -> None:
    cluster = Scripted()
    engine, sequence = cluster.engine, cluster.engine.open(PROMPT)
    engine.resume(sequence, SamplingParams(**GREEDY))
    cluster.step()
    _, target = move(cluster, sequence)
    while home_of(cluster, sequence) is not target:
        cluster.step()
    engine.abort(sequence)
    engine.resume(sequence, SamplingParams(**GREEDY))
    cluster.finish()
    assert not engine.migration.stats.pauses
    engine.close(sequence)
    cluster.expect_nothing_left()


@pytest.mark.parametrize("what", ["rewind", "rewind and wait", "resume", "close", "abort"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_what_its_holder_does_meanwhile_goes_before_the_move(what: str, after: int) -> None:
    cluster = Scripted()
    engine = cluster.engine
    sequence = engine.open(PROMPT)
    engine.resume(sequence, SamplingParams(**GREEDY))
    for _ in range(12):
        cluster.step()
    if what != "abort":
        cluster.finish()
    move(cluster, sequence)
    for _ in range(after):
        cluster.step()
    if what == "close":
        engine.close(sequence)
        cluster.finish()
        cluster.expect_nothing_left()
        return
    if what == "abort":
        engine.abort(sequence)
    if what != "resume":
        engine.rewind(sequence, len(PROMPT) + 6)
        engine.extend(sequence, [1, 2, 3])
    if what == "rewind and wait":
        for _ in range(3):
            cluster.step()
        assert cluster.engine.stats.migrated == 1
    before, cluster.outputs[sequence] = list(sequence.tokens), []
    engine.resume(sequence, SamplingParams(**SEEDED))
    cluster.finish()
    assert cluster.outputs[sequence] == expected(before, SamplingParams(**SEEDED))
    engine.close(sequence)
    cluster.expect_nothing_left()


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("dies", ["source", "target"])
def test_the_death_of_either_replica_in_a_move_changes_no_output(dies: str, after: int) -> None:
    cluster = Scripted()
    (sequence,) = cluster.start(PROMPT, **SEEDED)
    for number in cluster.steps():
        if number == 6:
            source, target = move(cluster, sequence)
        if number == 6 + after:
            (source if dies == "source" else target).die()
    assert cluster.outputs[sequence] == expected(PROMPT, SamplingParams(**SEEDED))
    assert cluster.fleet.num_lost == 1
    cluster.fleet.wait(2)
    cluster.expect_nothing_left()


@pytest.mark.parametrize("after", [0, 1])
def test_without_room_in_the_target_it_goes_on_where_it_was(after: int) -> None:
    cluster = Scripted()
    (sequence,) = cluster.start(PROMPT, **SEEDED)
    for number in cluster.steps():
        if number == 6:
            source, target = move(cluster, sequence)
        if number == 6 + after:
            target.is_full = True
    assert cluster.outputs[sequence] == expected(PROMPT, SamplingParams(**SEEDED))
    assert cluster.engine.migration.stats.num_failed == 1
    assert cluster.engine.stats.migrated == 0
    resumed = [c for c in source.commands if isinstance(c, Generate)][1:]
    assert all(not command.rest for command in resumed)
    cluster.expect_nothing_left()


def test_a_pause_has_an_end_where_the_target_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(migration_module, "MAX_PAUSE", 0.0)
    cluster = Scripted()
    (sequence,) = cluster.start(PROMPT, **SEEDED)
    for number in cluster.steps():
        if number == 6:
            _, target = move(cluster, sequence)
        if number == 7:
            monkeypatch.setattr(target, "receive", lambda *_: None)
    assert cluster.outputs[sequence] == expected(PROMPT, SamplingParams(**SEEDED))
    assert cluster.engine.stats.migrated == 0


# ---- drains -------------------------------------------------------------------------------------


def test_a_drained_replica_is_left_by_all_its_sequences_and_ends() -> None:
    cluster = Scripted(size=64)
    engine = cluster.engine
    sequences = [cluster.start([n + 1], **SEEDED)[0] for n in range(30)]
    parked = engine.open(PROMPT)
    engine.resume(parked, SamplingParams(**GREEDY | {"max_tokens": 3}))
    untouched = engine.open([3, 3])
    for _ in range(5):
        cluster.step()
    drained = home_of(cluster, parked)
    link = cluster.fleet.drain(drained.name)
    late = cluster.start([77], **SEEDED)[0]
    assert home_of(cluster, late) is not drained
    steps = 0
    while not link.is_dead:
        cluster.step()
        steps += 1
        assert steps < 25, "what runs there is waited for"
    assert engine.stats.migrated >= 16
    cluster.finish()
    deadline = time.monotonic() + 60
    while not drained.has_left and time.monotonic() < deadline:
        time.sleep(0.01)
    assert drained.has_left
    assert not drained.sessions
    for number, sequence in enumerate(sequences):
        assert cluster.outputs[sequence] == expected([number + 1], SamplingParams(**SEEDED))
    assert cluster.outputs[late] == expected([77], SamplingParams(**SEEDED))
    assert engine._remotes[parked].length == len(PROMPT) + 2, "it was not moved"
    engine.close(parked)
    engine.close(untouched)
    cluster.expect_nothing_left()


def test_a_replica_that_says_it_is_drained_is_left() -> None:
    cluster = Scripted()
    (sequence,) = cluster.start(PROMPT, **SEEDED)
    cluster.step()
    drained = home_of(cluster, sequence)
    drained.is_draining = True  # as its operator, or another ingress, has told it
    for _ in range(5):
        cluster.step()
    assert home_of(cluster, sequence) is not drained
    assert [link.channel for link in cluster.fleet.links] == [home_of(cluster, sequence)]
    cluster.finish()
    assert cluster.outputs[sequence] == expected(PROMPT, SamplingParams(**SEEDED))


def test_a_parked_sequence_that_cannot_move_does_not_hold_a_drain_up() -> None:
    cluster = Scripted()
    sequence = cluster.engine.open(PROMPT)
    cluster.engine.resume(sequence, SamplingParams(**GREEDY))
    cluster.finish()
    drained = home_of(cluster, sequence)
    other_than(cluster, drained).is_full = True
    link, before = cluster.fleet.drain(drained.name), list(sequence.tokens)
    for _ in range(6):
        cluster.step()
    assert link.is_dead
    cluster.outputs[sequence] = []
    cluster.engine.resume(sequence, SamplingParams(**SEEDED))
    cluster.finish()
    assert cluster.outputs[sequence] == expected(before, SamplingParams(**SEEDED))


def test_the_last_replica_and_unknown_ones_are_not_drained() -> None:
    cluster = Scripted()
    with pytest.raises(ParameterError, match="replica-0, replica-1"):
        cluster.fleet.drain("replica-7")
    cluster.fleet.drain("replica-0")
    with pytest.raises(ParameterError, match="only one"):
        cluster.fleet.drain("replica-1")


def test_branches_of_a_request_stay_together_after_a_drain() -> None:
    cluster = Scripted(3, size=16, key=lambda: "a")
    started = [cluster.start([n], **SEEDED)[0] for n in range(5)]
    cluster.step()
    cluster.fleet.drain(home_of(cluster, started[0]).name)
    for _ in range(6):
        cluster.step()
    started.append(cluster.start([9], **SEEDED)[0])
    assert len({home_of(cluster, sequence).name for sequence in started}) == 1
    cluster.finish()


# ---- loads and lengths --------------------------------------------------------------------------


def test_generations_move_to_a_replica_with_much_less_to_do() -> None:
    cluster = Scripted(size=64, key=lambda: "a", rebalancing=Rebalancing())
    started = [cluster.start([n], **SEEDED)[0] for n in range(20)]
    counts = set()
    for _ in cluster.steps():
        counts.add(tuple(sorted(link.num_generating for link in cluster.fleet.links)))
        assert len(cluster.engine.migration._by_remote) <= migration_module.MAX_MOVES
    assert (10, 10) in counts
    assert cluster.engine.stats.migrated == 10
    for number, sequence in enumerate(started):
        assert cluster.outputs[sequence] == expected([number], SamplingParams(**SEEDED))
    cluster.expect_nothing_left()


def test_nothing_moves_because_of_a_small_difference_or_without_the_rule() -> None:
    for count, rule in ((7, Rebalancing()), (20, None)):
        cluster = Scripted(size=64, key=lambda: "a", rebalancing=rule)
        for number in range(count):
            cluster.start([number], **SEEDED)
        cluster.finish()
        assert cluster.engine.stats.migrated == 0


class Double(SimpleNamespace):
    """Stands for a link or a sequence."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def place(name: str, load: int, num_free: int = 4000, waiting: int = 0) -> Double:
    engine_load = EngineLoad(load - waiting, waiting, 0.0)
    return Double(
        name=name, load=load, num_free_tokens=num_free, capacity=32, engine_load=engine_load
    )


def remote(
    link: object, number: int, length: int, key: str | None = None, has_begun: bool = True
) -> Double:
    return Double(
        sequence=SimpleNamespace(tokens=[0] * length),
        link=link,
        key=key,
        handle=number,
        generation=number,
        has_begun=has_begun,
    )


def test_whole_requests_move_and_the_shortest_first() -> None:
    busy, idle = place("busy", 12), place("idle", 0)
    lengths = {"a": 100, "b": 10, "c": 50}
    remotes = [remote(busy, n, lengths["abc"[n // 4]], "abc"[n // 4]) for n in range(12)]
    moves = balance([busy, idle], remotes, Rebalancing())
    assert [m.remote.key for m in moves] == ["b"] * 4
    assert moves == balance([idle, busy], remotes[::-1], Rebalancing())
    assert {m.target for m in moves} == {idle}


def test_of_one_large_request_the_shortest_sequences_move_as_far_as_there_is_room() -> None:
    busy, idle = place("busy", 12), place("idle", 0, num_free=100)
    remotes = [remote(busy, n, 10 * (n + 1), "a") for n in range(12)]
    moves = balance([busy, idle], remotes, Rebalancing())
    assert [len(m.remote.sequence.tokens) for m in moves] == [10, 20, 30]


def test_a_prompt_that_waits_for_pages_goes_where_they_are_free() -> None:
    full, free = place("full", 3, num_free=50, waiting=1), place("free", 3, num_free=500)
    late = remote(full, 9, 400, has_begun=False)
    moves = make_room([full, free], [remote(full, 1, 20), late])
    assert moves == [(late, free)]


def test_shorter_sequences_make_room_where_all_replicas_together_have_enough() -> None:
    full, other = place("full", 4, num_free=300, waiting=1), place("other", 3, num_free=350)
    late = remote(full, 9, 400, has_begun=False)
    short = [remote(full, n, length) for n, length in enumerate((90, 60, 500))]
    assert make_room([full, other], [*short, late]) == [(short[1], other), (short[0], other)]
    assert make_room([full, place("other", 3, num_free=50)], [*short, late]) == []


def test_a_long_request_runs_once_others_have_made_room_for_it() -> None:
    cluster = Scripted(size=8, capacity=400, rebalancing=None)
    longest = {"temperature": 1.0, "seed": 9, "max_tokens": 120}
    short = [cluster.start([n + 1] * 60, **longest)[0] for n in range(4)]
    for _ in range(3):
        cluster.step()
    (late,) = cluster.start([9] * 300, **SEEDED | {"max_tokens": 5})
    for number in cluster.steps():
        if cluster.outputs[late]:
            assert number < 20, "it has waited for the end of the others"
            break
    assert cluster.outputs[late]
    assert cluster.engine.stats.migrated >= 1
    cluster.finish()
    for number, sequence in enumerate(short):
        prompt = [number + 1] * 60
        assert cluster.outputs[sequence] == expected(prompt, SamplingParams(**longest))


def test_close_and_stop_reach_the_replica_that_has_the_sequence_now() -> None:
    cluster = Scripted()
    sequence = cluster.engine.open(PROMPT)
    cluster.engine.resume(sequence, SamplingParams(**SEEDED))
    cluster.step()
    source, target = move(cluster, sequence)
    for _ in range(5):
        cluster.step()
    cluster.engine.close(sequence)
    cluster.engine._flush()
    assert [type(command) for command in target.commands][-2:] == [Stop, Close]
    assert isinstance(source.commands[-1], Close)
    cluster.expect_nothing_left()
