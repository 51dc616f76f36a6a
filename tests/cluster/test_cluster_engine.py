"""Sequences outlive the replicas that compute them, which are scripted here."""

from __future__ import annotations

import time

import pytest

from forethought.cluster import fleet as fleet_module
from forethought.cluster.engine import ENOUGH_TOKENS, MAX_DEATHS
from forethought.cluster.link import QUIET
from forethought.cluster.messages import Branch, Generate, Reach, Stop
from forethought.config.sampling import SamplingParams
from forethought.errors import EngineStopped, ModelError, RequestError, UsageError
from scripted_replicas import END, GREEDY, SEEDED, Scripted, expected

PROMPT = [5, 6, 7, 8]

pytestmark = pytest.mark.usefixtures("at_once")


@pytest.mark.parametrize("fields", [GREEDY, SEEDED])
@pytest.mark.parametrize("kill_at", [0, 1, 2, 7, 20, 38])
def test_a_kill_at_any_token_changes_no_output(fields: dict, kill_at: int) -> None:
    cluster = Scripted()
    (sequence,) = cluster.start(PROMPT, **fields)
    for number in cluster.steps():
        if number == kill_at:
            next(r for r in cluster.alive if r.running or kill_at == 0).die()
    assert cluster.outputs[sequence] == expected(PROMPT, SamplingParams(**fields))
    assert cluster.fleet.num_lost == 1


def test_all_replicas_may_die_one_after_the_other() -> None:
    cluster = Scripted(3)
    sequences = [cluster.start([n, n + 1], **SEEDED)[0] for n in range(12)]
    for number in cluster.steps():
        if number in (3, 9, 15):
            cluster.alive[number // 6].die()
    for number, sequence in enumerate(sequences):
        assert cluster.outputs[sequence] == expected([number, number + 1], SamplingParams(**SEEDED))
    assert cluster.fleet.num_lost == 3


def test_samples_of_a_prompt_share_it_and_keep_their_own_random_numbers() -> None:
    cluster = Scripted()
    samples = cluster.start(PROMPT, n=3, **SEEDED)
    cluster.engine._flush()
    (home,) = [r for r in cluster.alive if r.commands]
    assert [type(c) for c in home.commands] == [Generate, Branch, Generate, Branch, Generate]
    assert home.num_computed == len(PROMPT)
    for number in cluster.steps():
        if number == 5:
            home.die()
    for index, sample in enumerate(samples):
        assert cluster.outputs[sample] == expected(PROMPT, SamplingParams(**SEEDED), index)


def test_an_unseeded_request_has_its_seed_from_here() -> None:
    cluster = Scripted()
    (sequence,) = cluster.start(PROMPT, temperature=1.0, max_tokens=30)
    for number in cluster.steps():
        if number == 4:
            next(r for r in cluster.alive if r.running).die()
    assert sequence.params.seed is not None
    assert cluster.outputs[sequence] == expected(PROMPT, sequence.params)
    live = cluster.engine.open(PROMPT)
    cluster.engine.resume(live, SamplingParams(temperature=1.0, max_tokens=30))
    cluster.finish()
    assert live.params.seed not in (None, sequence.params.seed)


def test_a_parked_sequence_is_computed_again_where_its_replica_has_died() -> None:
    cluster = Scripted()
    engine = cluster.engine
    sequence = engine.open(PROMPT)
    engine.resume(sequence, SamplingParams(**GREEDY))
    cluster.finish()
    output = cluster.outputs[sequence]
    engine.rewind(sequence, len(PROMPT) + 10)
    engine.extend(sequence, [1, 2, 3])
    next(r for r in cluster.alive if r.sessions).die()
    cluster.step()
    fork = engine.fork(sequence, len(PROMPT) + 4)
    for live in (sequence, fork):
        before = list(live.tokens)
        cluster.outputs[live] = []
        engine.resume(live, SamplingParams(**SEEDED))
        cluster.finish()
        assert cluster.outputs[live] == expected(before, SamplingParams(**SEEDED))
        assert before[: len(PROMPT) + 4] == [*PROMPT, *output[:4]]


def test_a_rewound_session_goes_on_in_its_replica_from_where_it_is() -> None:
    cluster = Scripted()
    sequence = cluster.engine.open(PROMPT)
    cluster.engine.resume(sequence, SamplingParams(**GREEDY))
    cluster.finish()
    cluster.engine.rewind(sequence, len(PROMPT) + 10)
    cluster.engine.extend(sequence, [1, 2, 3])
    before = list(sequence.tokens)
    cluster.outputs[sequence] = []
    cluster.engine.resume(sequence, SamplingParams(**SEEDED))
    (home,) = [link for link in cluster.fleet.links if link.num_generating]
    cluster.finish()
    command = home.channel.commands[-1]
    assert (command.length, list(command.rest)) == (len(PROMPT) + 10, [1, 2, 3])
    assert cluster.outputs[sequence] == expected(before, SamplingParams(**SEEDED))


def test_a_session_that_was_stopped_keeps_what_was_told() -> None:
    cluster = Scripted()
    sequence = cluster.engine.open(PROMPT)
    cluster.engine.resume(sequence, SamplingParams(**GREEDY))
    for _ in range(3):
        cluster.step()
    (home,) = [r for r in cluster.alive if r.running]
    home.work(5)  # told, and not yet taken
    cluster.engine.abort(sequence)
    cluster.step()
    assert len(sequence.tokens) == len(PROMPT) + 3
    assert any(isinstance(command, Stop) for command in home.commands)
    cluster.outputs[sequence] = []
    cluster.engine.resume(sequence, SamplingParams(**GREEDY))
    before = list(sequence.tokens)
    cluster.finish()
    assert cluster.outputs[sequence] == expected(before, SamplingParams(**GREEDY))


def test_new_requests_go_where_there_is_room_and_one_request_stays_together() -> None:
    keys = iter(["a", "a", "b", "b", "a", "b"])
    cluster = Scripted(key=lambda: next(keys))
    started = [cluster.start([n], **SEEDED)[0] for n in range(6)]
    homes = [cluster.engine._remotes[sequence].link.name for sequence in started]
    assert homes[0] == homes[1] == homes[4]
    assert homes[2] == homes[3] == homes[5]
    assert homes[0] != homes[2]
    cluster.finish()
    assert {count for _, count in cluster.engine._placement._homes.values()} == {0}


def test_a_request_spills_over_where_its_replica_is_full_and_another_is_not() -> None:
    cluster = Scripted(size=2, key=lambda: "a")
    started = [cluster.start([n], **SEEDED)[0] for n in range(6)]
    links = [cluster.engine._remotes[sequence].link.name for sequence in started]
    assert links[0] == links[1] != links[2]
    assert links[2] == links[3]
    cluster.finish()
    for number, sequence in enumerate(started):
        assert cluster.outputs[sequence] == expected([number], SamplingParams(**SEEDED))


def test_branches_of_a_request_go_on_together_after_a_kill() -> None:
    cluster = Scripted(3, size=8, key=lambda: "a")
    started = [cluster.start([n], **SEEDED)[0] for n in range(5)]
    cluster.step()
    next(r for r in cluster.alive if r.running).die()
    cluster.step()
    assert len({cluster.engine._remotes[sequence].link.name for sequence in started}) == 1
    cluster.finish()


def test_a_drained_replica_takes_nothing_new_and_ends_with_its_last_generation() -> None:
    cluster = Scripted()
    sequences = [cluster.start([n], **SEEDED)[0] for n in range(4)]
    cluster.step()
    before = cluster.alive
    cluster.fleet.scale(1)
    late = [cluster.start([n + 10], **SEEDED)[0] for n in range(3)]
    assert {cluster.engine._remotes[sequence].link.name for sequence in late} == {before[0].name}
    cluster.finish()
    cluster.step()
    deadline = time.monotonic() + 60
    while not before[1].has_left and time.monotonic() < deadline:
        time.sleep(0.01)
    assert before[1].has_left
    assert [link.name for link in cluster.fleet.links] == [before[0].name]
    cluster.fleet.scale(2)
    cluster.fleet.wait(2)
    assert len(cluster.fleet.links) == 2
    for number, sequence in enumerate([*sequences, *late]):
        prompt = [number if number < 4 else number + 6]
        assert cluster.outputs[sequence] == expected(prompt, SamplingParams(**SEEDED))


def test_at_most_half_of_the_keys_move_where_a_second_replica_comes_back() -> None:
    cluster = Scripted(size=10_000)
    places, choose = cluster.fleet.links, cluster.engine._placement.choose
    with_two = [choose(places, f"key {n}", None).name for n in range(200)]
    with_one = [choose(places[:1], f"key {n}", None).name for n in range(200)]
    assert 60 < sum(a != b for a, b in zip(with_two, with_one, strict=True)) <= 130
    assert with_two == [choose(places[::-1], f"key {n}", None).name for n in range(200)]


def test_a_replica_that_hangs_is_ended_and_replaced() -> None:
    cluster = Scripted(hang_seconds=0.3)
    (sequence,) = cluster.start(PROMPT, **SEEDED)
    cluster.step()
    (hung,) = [r for r in cluster.alive if r.running]
    hung.silent = True
    deadline = time.monotonic() + 60
    while not hung.is_dead and time.monotonic() < deadline:
        cluster.step()
    cluster.finish()
    assert hung.is_dead
    assert cluster.outputs[sequence] == expected(PROMPT, SamplingParams(**SEEDED))


def test_nothing_begins_in_a_replica_that_has_been_quiet() -> None:
    cluster = Scripted(size=64)
    quiet, other = cluster.fleet.links
    quiet.heard -= 2 * QUIET
    started = [cluster.start([n], **SEEDED)[0] for n in range(6)]
    assert {cluster.engine._remotes[sequence].link for sequence in started} == {other}
    cluster.step()  # it answers again
    (late,) = cluster.start([7], **SEEDED)
    assert cluster.engine._remotes[late].link is quiet
    cluster.finish()


def test_what_kills_every_replica_fails_and_others_go_on() -> None:
    cluster = Scripted()
    (deadly,) = cluster.start([1, 2, 3], **SEEDED)
    (other,) = cluster.start([4], **SEEDED)
    for _ in cluster.steps():
        for replica in cluster.alive:
            if any(running.tokens[:3] == [1, 2, 3] for running in replica.running.values()):
                replica.die()
        cluster.fleet.wait()
    assert isinstance(cluster.errors[deadly], RequestError)
    assert "died" in str(cluster.errors[deadly])
    assert cluster.outputs[other] == expected([4], SamplingParams(**SEEDED))


def test_a_generation_that_goes_on_outlives_any_number_of_deaths() -> None:
    cluster, params = Scripted(), {**SEEDED, "max_tokens": 20 * ENOUGH_TOKENS}
    prompt = next([n] for n in range(99) if END not in expected([n], SamplingParams(**params)))
    (sequence,) = cluster.start(prompt, **params)
    for number in cluster.steps():
        home = next((r for r in cluster.alive if r.running), None)
        if home is not None and number % (2 * ENOUGH_TOKENS) == 0:
            home.die()
            cluster.fleet.wait(2)
    assert cluster.fleet.num_lost > 2 * MAX_DEATHS
    assert cluster.outputs[sequence] == expected(prompt, SamplingParams(**params))


def test_a_replica_that_has_forgotten_an_ingress_lives_and_is_connected_to_again() -> None:
    cluster = Scripted()
    (sequence,) = cluster.start(PROMPT, **SEEDED)
    for number in cluster.steps():
        if number in range(5, 30, 5):  # more often than replicas may die
            next(r for r in cluster.alive if r.running).forget()
    assert cluster.outputs[sequence] == expected(PROMPT, SamplingParams(**SEEDED))
    assert not any(replica.is_dead for replica in cluster.opened)
    assert cluster.fleet.num_lost == 0
    assert len(cluster.opened) == 2 + 5


def test_without_any_replica_requests_wait_and_fail_when_none_starts() -> None:
    cluster = Scripted(1)
    (sequence,) = cluster.start(PROMPT, **SEEDED)
    cluster.step()
    cluster.failure = RuntimeError("no room")
    cluster.alive[0].die()
    cluster.finish()
    assert "no room" in str(cluster.errors[sequence])


def test_a_generation_waits_for_the_first_replica_that_comes_back() -> None:
    cluster = Scripted(1)
    (sequence,) = cluster.start(PROMPT, **SEEDED)
    for number in cluster.steps():
        if number == 6:
            cluster.alive[0].die()
    assert len(cluster.opened) == 2
    assert cluster.outputs[sequence] == expected(PROMPT, SamplingParams(**SEEDED))


def test_a_first_replica_that_cannot_start_says_why() -> None:
    def refuse(name: str, reply: object) -> None:
        raise UsageError("no such model", "nowhere", "Look again")

    fleet = fleet_module.Fleet(refuse, "replica", 2)
    with pytest.raises(UsageError, match="no such model"):
        fleet.wait()


def test_a_first_replica_has_three_attempts() -> None:
    attempts: list[str] = []

    def fail(name: str, reply: object) -> None:
        attempts.append(name)
        raise RuntimeError("the one of before is ending")

    fleet = fleet_module.Fleet(fail, "replica", 2)
    with pytest.raises(EngineStopped, match="is ending"):
        fleet.wait()
    assert [attempts.count(f"replica-{n}") >= 3 for n in (0, 1)] == [True, True]


def test_replicas_are_told_for_how_many_tokens_somebody_waits() -> None:
    cluster = Scripted()
    (sequence,) = cluster.start(PROMPT, **SEEDED)
    for count in (1, 16, 16, 17):
        cluster.engine.wait_for(sequence, count)
        cluster.engine._flush()
    reached = [c for r in cluster.alive for c in r.commands if isinstance(c, Reach)]
    assert [command.num_tokens for command in reached] == [16, 17]
    sequence.hold = len(PROMPT) + 5
    cluster.engine.wait_for(sequence, 1)
    cluster.engine._flush()
    assert [c for r in cluster.alive for c in r.commands][-1] == Reach(0, 5, 5)


def test_sequences_of_replicas_cannot_attend_to_each_other() -> None:
    cluster = Scripted(1)
    first, second = cluster.engine.open([1, 2]), cluster.engine.open([1, 3])
    with pytest.raises(ModelError, match="replicas"):
        cluster.engine.attend_to(first, {second: 1})
