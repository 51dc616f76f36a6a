"""Prompts that are prefilled in a replica of their own, by replicas that are scripted here."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from forethought.cluster import migration as migration_module
from forethought.cluster.fleet import Fleet
from forethought.cluster.link import Role, model_of
from forethought.cluster.messages import Branch, Copy, Generate
from forethought.cluster.prefill import (
    MIN_MEASURED,
    MOVE_SECONDS,
    SECONDS_PER_TOKEN,
    WINDOW,
    Delays,
    MeasuredCosts,
    PrefillSplit,
    check_split,
    is_apart,
)
from forethought.cluster.prefixes import BLOCK, PrefixMemory, blocks_of, num_shared_tokens
from forethought.config.sampling import SamplingParams
from forethought.engine.sequence import Sequence
from forethought.errors import ParameterError
from forethought.outputs import EngineStats
from scripted_replicas import GREEDY, SEEDED, Scripted, ScriptedReplica, expected

LONG = [*range(1, 901)]
SHORT = [5, 6, 7, 8]

pytestmark = pytest.mark.usefixtures("at_once")


def split(num_replicas: int = 2, num_prefill: int = 1, **options: object) -> Scripted:
    return Scripted(num_replicas, num_prefill=num_prefill, chunk=200, **options)


def of_role(cluster: Scripted, role: str) -> list[ScriptedReplica]:
    return [replica for replica in cluster.alive if role in replica.name]


def generates(replica: ScriptedReplica) -> list[Generate]:
    return [command for command in replica.commands if isinstance(command, Generate)]


def expect_output(cluster: Scripted, sequence: Sequence, prompt: list[int], **fields: object):
    assert cluster.outputs[sequence] == expected(prompt, SamplingParams(**fields))


# ---- one prompt ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [GREEDY, SEEDED, {**SEEDED, "max_tokens": 1}])
def test_a_long_prompt_goes_over_in_chunks_and_is_decoded_elsewhere(fields: dict) -> None:
    cluster = split()
    (sequence,) = cluster.start(LONG, **fields)
    cluster.finish()
    expect_output(cluster, sequence, LONG, **fields)
    (prefill,), (decode,) = of_role(cluster, "prefill"), of_role(cluster, "decode")
    starts = [command.start for command in prefill.commands if isinstance(command, Copy)]
    assert starts[:4] == [0, 200, 400, 600]
    assert prefill.num_computed == len(LONG) + 1, "it has gone on after the first token"
    if fields["max_tokens"] > 1:
        (generate,) = generates(decode)
        assert (generate.length, list(generate.rest)) == (len(LONG) + 1, [])
        assert len(generates(prefill)) == 1
        stats = cluster.engine.stats
        assert (stats.prefilled_apart, stats.migrated) == (1, 1)
        assert stats.migrated_tokens == len(LONG) + 1
    cluster.expect_nothing_left()


def test_a_short_prompt_is_prefilled_where_it_decodes() -> None:
    cluster = split()
    (sequence,) = cluster.start(SHORT, **SEEDED)
    cluster.finish()
    expect_output(cluster, sequence, SHORT, **SEEDED)
    assert not of_role(cluster, "prefill")[0].commands
    assert cluster.engine.stats.prefilled_apart == 0


def test_a_prompt_that_the_decode_replica_has_computed_stays_there() -> None:
    cluster = split()
    cluster.start(LONG, **SEEDED)
    cluster.finish()
    for tenant, num_apart in (({}, 1), ({"cache_salt": "other"}, 2)):
        fields = SEEDED | tenant
        (again,) = cluster.start([*LONG, 7, 7], **fields)
        cluster.finish()
        expect_output(cluster, again, [*LONG, 7, 7], **fields)
        assert cluster.engine.stats.prefilled_apart == num_apart


def test_a_short_turn_of_a_session_stays_with_its_history_and_a_long_one_does_not() -> None:
    cluster = split()
    engine, turns = cluster.engine, [LONG, SHORT, [*range(100, 950)] * 2]
    engine.split = PrefillSplit(engine._costs, has_prefix_caches=False)
    sequence, num_apart = engine.open(turns[0]), []
    for turn in turns:
        if turn is not LONG:
            engine.extend(sequence, turn)
        prompt, cluster.outputs[sequence] = list(sequence.tokens), []
        engine.resume(sequence, SamplingParams(**SEEDED))
        cluster.finish()
        expect_output(cluster, sequence, prompt, **SEEDED)
        num_apart.append(engine.stats.prefilled_apart)
    assert num_apart == [1, 1, 2]
    engine.close(sequence)
    cluster.expect_nothing_left()


def test_samples_and_votes_wait_for_the_one_prompt_that_is_on_its_way() -> None:
    cluster = split(key=lambda: "a", size=8)
    samples = cluster.start(LONG, n=3, **SEEDED)
    vote = [cluster.start(LONG, **SEEDED | {"seed": seed})[0] for seed in range(3)]
    cluster.finish()
    for index, sample in enumerate(samples):
        assert cluster.outputs[sample] == expected(LONG, SamplingParams(**SEEDED), index)
    for seed, sample in enumerate(vote):
        expect_output(cluster, sample, LONG, **SEEDED | {"seed": seed})
    (prefill,), (decode,) = of_role(cluster, "prefill"), of_role(cluster, "decode")
    assert len(generates(prefill)) == 1
    assert sum(isinstance(command, Branch) for command in decode.commands) == 2
    assert cluster.engine.stats.prefilled_apart == 1
    cluster.expect_nothing_left()


@pytest.mark.parametrize("after", range(8))
def test_a_fork_of_a_prompt_on_its_way_shares_its_pages(after: int) -> None:
    cluster = split()
    engine, sequence = cluster.engine, cluster.engine.open(LONG)
    engine.resume(sequence, SamplingParams(**GREEDY))
    for _ in range(after):
        cluster.step()
    fork = engine.fork(sequence, len(LONG) - 10)
    engine.extend(fork, [3, 3])
    prompt = list(fork.tokens)
    engine.resume(fork, SamplingParams(**SEEDED))
    cluster.finish()
    expect_output(cluster, sequence, LONG, **GREEDY)
    expect_output(cluster, fork, prompt, **SEEDED)
    decode = of_role(cluster, "decode")[0]
    assert [c.length for c in decode.commands if isinstance(c, Branch)] == [len(LONG) - 10]
    for live in (fork, sequence):
        engine.close(live)
    cluster.expect_nothing_left()


def test_a_fork_that_was_aborted_while_it_waited_is_no_fork_of_the_next_one_it_waits_for() -> None:
    cluster, one = split(size=8), SamplingParams(**{**GREEDY, "max_tokens": 1})
    other = [LONG[0], *range(99, 900)]
    engine, sequence = cluster.engine, cluster.engine.open(LONG)
    engine.resume(sequence, SamplingParams(**GREEDY))
    cluster.step()
    fork = engine.fork(sequence, 1)
    engine.resume(fork, one)
    engine.abort(fork)
    engine.resume(fork, one)
    cluster.finish()
    engine.rewind(fork, 1)
    engine.extend(fork, other[1:])
    cluster.start(other, **GREEDY)
    engine.resume(fork, one)
    cluster.finish()  # each step counts the sessions of the replicas
    for live in (fork, sequence):
        engine.close(live)
    cluster.expect_nothing_left()


@pytest.mark.parametrize("what", ["close", "abort"])
@pytest.mark.parametrize("after", range(8))
def test_a_client_may_leave_while_its_prompt_is_on_its_way(what: str, after: int) -> None:
    cluster = split()
    engine, sequence = cluster.engine, cluster.engine.open(LONG)
    engine.resume(sequence, SamplingParams(**GREEDY))
    fork = engine.fork(sequence)
    engine.resume(fork, SamplingParams(**SEEDED))
    for _ in range(after):
        cluster.step()
    getattr(engine, what)(sequence)
    cluster.finish()
    expect_output(cluster, fork, LONG, **SEEDED)
    for live in (fork, sequence):
        engine.close(live)
    for _ in range(8):
        cluster.step()
    cluster.expect_nothing_left()


# ---- deaths and room ----------------------------------------------------------------------------


@pytest.mark.parametrize("dies", ["prefill", "decode"])
@pytest.mark.parametrize("at", range(12))
def test_the_death_of_either_replica_at_any_step_changes_no_output(dies: str, at: int) -> None:
    cluster = split()
    (sequence,) = cluster.start(LONG, **SEEDED)
    (other,) = cluster.start(SHORT, **SEEDED)
    for number in cluster.steps():
        if number == at:
            of_role(cluster, dies)[0].die()
    expect_output(cluster, sequence, LONG, **SEEDED)
    expect_output(cluster, other, SHORT, **SEEDED)
    assert cluster.fleet.num_lost == 1
    cluster.fleet.wait(2)
    assert [link.role for link in sorted(cluster.fleet.links, key=lambda link: link.name)] == [
        Role.DECODE,
        Role.PREFILL,
    ]
    cluster.expect_nothing_left()


def test_prefill_replicas_generate_while_there_is_no_other_one() -> None:
    cluster = split()
    (decode,) = of_role(cluster, "decode")
    failure, cluster.failure = cluster.failure, RuntimeError("no room")
    decode.die()
    for _ in range(3):
        cluster.step()
    (sequence,) = cluster.start(LONG, **SEEDED)
    for _ in range(12):
        cluster.step()
    assert len(cluster.outputs[sequence]) > 3
    cluster.failure = failure
    cluster.fleet.wait(2)
    cluster.finish()
    expect_output(cluster, sequence, LONG, **SEEDED)
    assert generates(of_role(cluster, "decode")[0]), "it stays in the prefill replica"
    cluster.expect_nothing_left()


def test_without_room_in_the_decode_replica_the_other_one_goes_on_until_there_is() -> None:
    cluster = split()
    (decode,) = of_role(cluster, "decode")
    decode.is_full = True
    (sequence,) = cluster.start(LONG, **SEEDED)
    for number in cluster.steps():
        if number == 12:
            assert len(cluster.outputs[sequence]) > 3
            decode.is_full = False
    expect_output(cluster, sequence, LONG, **SEEDED)
    assert generates(decode), "it was not tried again"
    assert cluster.engine.migration.stats.num_failed >= 1
    cluster.expect_nothing_left()


@pytest.mark.parametrize("at", range(8))
def test_a_decode_replica_that_hangs_holds_no_prompt_on_its_way(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration_module, "MAX_PAUSE", 0.0)
    cluster = split(key=lambda: "a")
    (decode,) = of_role(cluster, "decode")
    (sequence,) = cluster.start(LONG, **SEEDED)
    (vote,) = cluster.start(LONG, **SEEDED | {"seed": 3})
    for number in cluster.steps():
        if number == at:
            decode.silent = True
        if number == 20:  # what has arrived there, or was placed there, goes on
            is_there = cluster.engine._remotes[sequence].link is cluster.link(decode)
            assert is_there or len(cluster.outputs[sequence]) > 3
            decode.silent = False
    expect_output(cluster, sequence, LONG, **SEEDED)
    expect_output(cluster, vote, LONG, **SEEDED | {"seed": 3})
    assert cluster.fleet.num_lost == 0
    cluster.expect_nothing_left()


def test_a_first_token_is_told_and_decoded_on_where_the_decode_replica_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(migration_module, "MAX_PAUSE", 0.0)
    cluster = split()
    (decode,) = of_role(cluster, "decode")
    decode.silent = True
    (sequence,) = cluster.start(LONG, **SEEDED)
    cluster.finish()
    expect_output(cluster, sequence, LONG, **SEEDED)
    assert not generates(decode)


def test_prompts_go_to_the_prefill_replica_with_the_fewest_tokens_to_compute() -> None:
    cluster = split(3, 2)
    lengths = [(0, 900), (1000, 400), (2000, 400)]
    started = [cluster.start([*range(a, a + n)], **GREEDY)[0] for a, n in lengths]
    first, second = of_role(cluster, "prefill")
    cluster.engine._flush()
    assert [len(c.rest) for c in generates(first)] == [900]
    assert [len(c.rest) for c in generates(second)] == [400, 400]
    cluster.finish()
    for (a, n), sequence in zip(lengths, started, strict=True):
        expect_output(cluster, sequence, [*range(a, a + n)], **GREEDY)


def test_prompts_on_their_way_count_as_load_of_where_they_decode() -> None:
    cluster = split(4, 2)
    for number in range(2):
        cluster.start([number, *LONG], **GREEDY)
    decodes = [link for link in cluster.fleet.links if link.role is Role.DECODE]
    assert [link.num_arriving for link in decodes] == [1, 1]
    cluster.finish()
    assert [link.load for link in decodes] == [0, 0]


def test_replicas_of_each_role_are_scaled_and_the_last_one_may_drain() -> None:
    cluster = split(3, 1)
    cluster.fleet.scale(4)
    cluster.fleet.wait(4)
    names = sorted(link.name for link in cluster.fleet.links)
    assert names == [f"replica-decode-{n}" for n in range(3)] + ["replica-prefill-0"]
    with pytest.raises(ParameterError, match="none to decode"):
        cluster.fleet.scale(1)
    cluster.fleet.drain("replica-prefill-0")
    (sequence,) = cluster.start(LONG, **SEEDED)
    cluster.finish()
    expect_output(cluster, sequence, LONG, **SEEDED)
    assert cluster.engine.stats.prefilled_apart == 0


# ---- the rule -----------------------------------------------------------------------------------


class Linear:
    """A token of a prefill takes 1 ms, and a move 50 ms."""

    def prefill_seconds(self, num_tokens: int) -> float:
        return 0.001 * num_tokens

    def move_seconds(self, num_tokens: int) -> float:
        return 0.05


@pytest.mark.parametrize(
    ("here", "apart", "is_better"),
    [
        (Delays(0, 50), Delays(0, 50), False),  # the move takes as long as the prompt
        (Delays(0, 51), Delays(0, 51), True),
        (Delays(0, 10), Delays(0, 500), False),  # it is cached where it decodes
        (Delays(0, 100, 1), Delays(60, 100), False),  # others wait there
        (Delays(0, 100, 3), Delays(60, 100), True),  # and three are delayed here
        (Delays(70, 20, 0), Delays(0, 20), True),  # the wait here is longer than the move
    ],
)
def test_a_prompt_goes_where_its_delays_are_fewer(
    here: Delays, apart: Delays, is_better: bool
) -> None:
    assert is_apart(Linear(), here, apart, apart.num_uncomputed) is is_better


def test_costs_are_those_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, stats = MeasuredCosts(), EngineStats()
    costs.moved(0.1)
    costs.moved(0.3)
    assert costs.prefill_seconds(100) == pytest.approx(100 * SECONDS_PER_TOKEN)
    assert costs.move_seconds(100) == MOVE_SECONDS
    for _ in range(MIN_MEASURED + 1):
        costs.told("a", stats)
        stats.prefilled += 10
        stats.step_seconds += 0.5
    costs.told("a", EngineStats())  # one that has come in its place
    costs.moved(0.2)
    assert costs.prefill_seconds(100) == pytest.approx(5.0)
    assert costs.move_seconds(100) == pytest.approx(0.2)
    later = time.monotonic() + WINDOW
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert costs.prefill_seconds(100) == pytest.approx(100 * SECONDS_PER_TOKEN)
    assert costs.move_seconds(100) == MOVE_SECONDS


def test_prefixes_are_remembered_by_blocks_and_forgotten_in_the_order_of_their_use() -> None:
    memory, tokens = PrefixMemory(max_blocks=4), [*range(3 * BLOCK + 5)]
    memory.add(blocks_of(tokens))
    other = [*tokens[: 2 * BLOCK], *tokens]
    assert memory.num_tokens(blocks_of(tokens)) == 3 * BLOCK
    assert memory.num_tokens(blocks_of(other)) == 2 * BLOCK
    assert memory.num_tokens(blocks_of(tokens, ("adapter", ""))) == 0
    assert num_shared_tokens(blocks_of(tokens), blocks_of(other)) == 2 * BLOCK
    memory.add(blocks_of([9] * 2 * BLOCK))
    assert memory.num_tokens(blocks_of(tokens)) == 0
    assert memory.num_tokens(blocks_of([9] * 2 * BLOCK)) == 2 * BLOCK


def test_roles_are_told_by_names() -> None:
    names = ["replica-1a-prefill-0", "replica-1a-decode-12", "replica-1a-3"]
    assert [Role.of(name) for name in names] == [Role.PREFILL, Role.DECODE, Role.BOTH]
    assert {model_of(name) for name in names} == {"replica-1a"}


@pytest.mark.parametrize(
    ("num_replicas", "num_prefill", "why"),
    [(2, -1, "-1"), (2, 2, "2 of 2"), (1, 1, "none to decode"), (3, 7, "7 of 3")],
)
def test_numbers_that_leave_none_to_decode_are_refused(
    num_replicas: int, num_prefill: int, why: str
) -> None:
    with pytest.raises(ParameterError, match=why):
        check_split(num_replicas, num_prefill)
    with pytest.raises(ParameterError, match=why):
        Fleet(SimpleNamespace, "replica", num_replicas, num_prefill=num_prefill)
