"""``Migration``: sequences that move to another replica while they generate (Llumnix, OSDI 2024).

::

    ingress                source                         target
    -------                ------                         ------
    Copy             -->   what is stored by now    -->   stored in pages there
      (it generates)                                <--   Copied
    Copy, it ends    -->   the rest                 -->   stored after it
                     <--   Progress, ABORT          <--   Copied
    Generate         -------------------------------->    goes on from its last token

What is copied first may be in several parts, each while tokens are generated; the pause is from the
source's last step to the target's first one. Until the target has everything the source keeps its
session, and goes on with it if anything fails.

A prompt that a prefill replica computes is on its way from its first chunk on: one ``Copy`` after
the other waits for the next chunk, and that which finds the first token ends the generation, which
is held there until then.

Four rules decide which sequences move, by loads and lengths alone: a replica is drained, has much
more to do than another one, lacks pages for a prompt that waits for them, or only prefills.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from forethought.cluster.link import Link, Role
from forethought.cluster.messages import Close, Copied, Copy, Prepare
from forethought.cluster.remote import Remote
from forethought.engine.sequence import Sequence

log = logging.getLogger(__name__)

MAX_MOVES = 8
"""Sequences that move at once."""
FEW_TOKENS = 64
"""That are copied during a pause in any case; more, if they are few of those before."""
NUM_PAUSES = 1024
RETRY = 1.0
"""Seconds after a failed move in which its sequence stays where it is."""
MAX_PAUSE = 5.0
"""Seconds of a pause, or without an answer of the target to a part of what a sequence waits for,
after which it goes on where it was.
"""


class PlannedMove(NamedTuple):
    """A sequence that is to move."""

    remote: Remote
    target: Link


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """When sequences move because of the load: one replica has ``min_difference`` generations more
    than another one, and ``min_share`` of the batch, and ``ratio`` times as many.
    """

    min_difference: int = 4
    min_share: float = 0.125
    ratio: float = 1.5

    def applies_to(self, links: List[Link]) -> bool:
        """Whether the loads of these replicas differ so much."""
        loads = [link.load for link in links]
        most, least, capacity = max(loads), min(loads), links[0].capacity
        limit = max(self.min_difference, self.min_share * capacity)
        return most - least >= limit and most > self.ratio * least


@dataclass(eq=False, slots=True)
class _Move:
    """One sequence on its way."""

    remote: Remote
    source: Link
    target: Link
    handle: int
    """Of its session in the target."""
    generation: int | None
    """In progress when it began to move; None: it was parked."""
    num_generations: int
    """Of the sequence until then: those that begin later may change what was copied."""
    num_copied: int = 0
    """Tokens of the session in the target."""
    is_open: bool = False
    """Whether there is a session in the target."""
    num_bytes: int = 0
    prompt_length: int = 0
    """Tokens that the source computes for the target; 0: it has begun to generate as well."""
    is_last: bool = False
    """The source has been told to end the generation and to copy the rest."""
    started: float = 0.0
    """When the last part was asked for, as of ``time.monotonic``."""
    is_due: bool = False
    """A part is on its way, of which the target is going to tell."""
    is_held: bool = False
    """The source has told the first token after a prompt, and generates no further one."""
    is_paused: bool = False
    """The source has told its last tokens."""
    has_arrived: bool = False
    """The target has all tokens."""
    is_given_up: bool = False
    """It waits for the answer that is due, and for nothing else."""

    @property
    def is_current(self) -> bool:
        """Whether the sequence still does what it did when it began to move."""
        remote = self.remote
        is_same = remote.generation == self.generation
        return (
            is_same
            and remote.link is self.source
            and self.num_generations == remote.num_generations
        )


class Moving(Protocol):
    """What keeps the sequences."""

    def relocate(self, remote: Remote, link: Link, handle: int, length: int) -> None:
        """A session of the first ``length`` tokens is in another replica: go on with it there."""

    def go_on(self, remote: Remote) -> None:
        """The generation has ended where it is for a move that failed: go on there."""

    def release(self, remote: Remote) -> None:
        """The prompt of a sequence is not going to leave for its target: generate where it is."""

    def give_back(self, remote: Remote) -> None:
        """Give up the session of a parked sequence: its tokens are computed again."""

    def place_for(self, remote: Remote) -> Link | None:
        """Where a sequence that leaves its replica goes on; None: nothing takes any."""


@dataclass(slots=True)
class MigrationStats:
    """Counts of moves."""

    num_moved: int = 0
    num_prefilled: int = 0
    """Those of them whose prompts were computed for the target."""
    num_failed: int = 0
    num_tokens: int = 0
    """Of all of them, as they arrived."""
    num_bytes: int = 0
    """Of keys and values, and what belongs to them."""
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_PAUSES))
    """Seconds of the last ones, from when the source is told to end the generation until the first
    tokens have come from the target."""


class Migration:
    """Moves sequences of one ingress.

    Args:
        links: to all replicas; the list changes as they come and go.
        remotes: all sequences.
        handles: numbers of new sessions.
        rebalancing: None: no sequence moves because of the load.
    """

    def __init__(
        self,
        moving: Moving,
        links: list[Link],
        remotes: Mapping[Sequence, Remote],
        handles: Iterator[int],
        rebalancing: Rebalancing | None,
    ) -> None:
        self._moving, self._links, self._remotes = moving, links, remotes
        self._handles, self.rebalancing = handles, rebalancing
        self.stats = MigrationStats()
        self._moves: dict[int, _Move] = {}
        """By the handle in the target."""
        self._by_remote: dict[Remote, _Move] = {}
        """Those that are not given up."""
        self._planned: list[PlannedMove] = []
        self._settled = 0.0
        """When the loads changed last by a move, as of ``time.monotonic``."""

    # ---- one move -----------------------------------------------------------------------------

    def move(self, remote: Remote, target: Link) -> bool:
        """Begin to move a sequence; whether it can. One whose first token has not come is computed
        where it is until then, and its pages go over chunk by chunk.
        """
        source = remote.link
        is_possible = source is not None and source.is_up and source is not target and target.takes
        if not is_possible or not remote.can_move or remote in self._by_remote:
            return False
        assert source is not None
        numbers = remote.generation, remote.num_generations
        move = _Move(remote, source, target, next(self._handles), *numbers)
        if remote.generation is not None and not remote.has_begun and source.role is Role.PREFILL:
            move.prompt_length = len(remote.sequence.tokens)
            target.num_arriving += 1
        self._moves[move.handle] = self._by_remote[remote] = move
        params = remote.sequence.params
        if move.generation is not None and params.guided_decoding is not None:
            target.send(Prepare(params))
        self._copy(move)
        return True

    def is_moving(self, remote: Remote) -> bool:
        """Whether a sequence is on its way."""
        return remote in self._by_remote

    def is_prefilling(self, remote: Remote) -> bool:
        """Whether the prompt of a sequence is computed for another replica."""
        move = self._by_remote.get(remote)
        return move is not None and move.prompt_length > 0

    def arriving(self, target: Link) -> list[Remote]:
        """Sequences whose prompts are computed for a replica."""
        moves = self._by_remote.values()
        return [move.remote for move in moves if move.target is target and move.prompt_length]

    def copied(self, answer: Copied) -> None:
        """The target has answered."""
        move = self._moves.get(answer.handle)
        if move is None:  # its replica was lost
            return
        move.is_due = False
        num_new = answer.num_tokens - move.num_copied
        if answer.error is None:
            move.is_open, move.num_copied = True, answer.num_tokens
            move.num_bytes += answer.num_bytes
        if move.is_given_up or not move.is_current or answer.error is not None:
            self._give_up(move, answer.error)
        elif move.generation is None:
            if answer.num_left:
                self._copy(move)
            else:
                self._arrive(move)
        elif move.is_last or answer.has_ended:
            move.has_arrived = True
            if move.is_paused:
                self._arrive(move)
        elif move.prompt_length:
            self._copy(move)
        else:
            move.is_last = answer.num_left <= max(FEW_TOKENS, num_new // 8)
            self._copy(move)

    def began(self, remote: Remote) -> None:
        """The first tokens of a generation have come."""
        move = self._by_remote.get(remote)
        if move is not None and move.prompt_length:
            move.is_held, move.started = True, time.monotonic()

    def paused(self, remote: Remote) -> None:
        """The generation of a sequence has ended in its replica, and has told all tokens."""
        move = self._by_remote.get(remote)
        if move is None:  # it has failed meanwhile
            self._moving.go_on(remote)
            return
        move.is_paused = True
        if move.prompt_length:
            move.started = time.monotonic()
        if move.has_arrived:
            self._arrive(move)

    def resumed(self, remote: Remote) -> float:
        """The first tokens of a sequence have come from where it has moved to, after a pause, the
        seconds of which are returned.
        """
        pause = time.monotonic() - remote.paused_since
        self.stats.pauses.append(pause)
        remote.paused_since = 0.0
        return pause

    def lost(self, link: Link) -> None:
        """A replica is gone, before its sequences are placed elsewhere."""
        for move in [*self._moves.values()]:
            if move.target is link:
                move.is_due = False
                self._give_up(move, None)
            elif move.source is link:
                move.is_paused = False  # it goes on from its tokens, elsewhere
                self._give_up(move, None)

    def _copy(self, move: _Move) -> None:
        remote, source, target = move.remote, move.source, move.target
        assert source.channel is not None, "it is up"
        assert target.channel is not None, "it is up"
        move.started, move.is_due = time.monotonic(), True
        stop = remote.length if move.generation is None else float("inf")
        ended = move.generation if move.is_last or move.prompt_length else None
        part = Copy(remote.handle, move.handle, move.num_copied, stop, ended, move.prompt_length)
        source.send(part)
        source.channel.copy(move.handle, target.channel)

    def _arrive(self, move: _Move) -> None:
        del self._moves[move.handle]
        self._forget(move)
        self._settled = time.monotonic()
        self.stats.num_moved += 1
        self.stats.num_bytes += move.num_bytes
        self.stats.num_tokens += move.num_copied
        self.stats.num_prefilled += move.prompt_length > 0
        if move.generation is not None:
            move.remote.paused_since = move.started
        length = min(move.num_copied, len(move.remote.sequence.tokens))
        if move.generation is None:  # rewound meanwhile, perhaps
            length = min(length, move.remote.length)
        self._moving.relocate(move.remote, move.target, move.handle, length)

    def _give_up(self, move: _Move, error: Exception | None) -> None:
        """The sequence stays; its session in the target is closed, after an answer that is due."""
        if not move.is_due:
            self._moves.pop(move.handle, None)
            if move.is_open:
                move.target.send(Close(move.handle))
        if move.is_given_up:
            return
        move.is_given_up = True
        self._forget(move)
        if move.is_current:
            log.info("a sequence stays in %s: %s", move.source.name, error or "no answer came")
            self.stats.num_failed += 1
            move.remote.stays_until = time.monotonic() + RETRY
            if move.is_paused:
                self._moving.go_on(move.remote)
            elif move.prompt_length:
                self._moving.release(move.remote)

    def _forget(self, move: _Move) -> None:
        del self._by_remote[move.remote]
        move.target.num_arriving -= move.prompt_length > 0

    # ---- which sequences move -----------------------------------------------------------------

    def step(self) -> None:
        """Begin the moves that drains, lengths and loads ask for."""
        now = time.monotonic()
        for move in [*self._by_remote.values()]:
            waits = move.is_paused or move.is_held
            if not move.is_current or (waits and now - move.started > MAX_PAUSE):
                self._give_up(move, None)
        for link in self._links:
            if link.is_up and link.num_open and self._is_left(link):
                self._drain(link, now)
        if not self._num_moves and self._has_settled():
            self._planned = self._plan(now)
        while self._planned and self._num_moves < MAX_MOVES:
            self.move(*self._planned.pop(0))

    @property
    def _num_moves(self) -> int:
        """Those in progress, but for prompts that are computed for their target."""
        return sum(not move.prompt_length for move in self._by_remote.values())

    def _is_left(self, link: Link) -> bool:
        """Whether sequences leave a replica: it is drained, or is there to prefill."""
        is_apart = link.role is Role.PREFILL and any(other.decodes for other in self._links)
        return link.is_draining or is_apart

    def _has_settled(self) -> bool:
        """Whether all loads are as of after the last move."""
        return all(link.heard > self._settled for link in self._links if link.decodes)

    def _plan(self, now: float) -> list[PlannedMove]:
        ready, rule = [link for link in self._links if link.decodes], self.rebalancing
        waits = any(link.engine_load.waiting for link in ready)
        if len(ready) < 2 or not (waits or (rule and rule.applies_to(ready))):
            return []
        running = [r for r in self._remotes.values() if r.generation is not None]
        movable = [r for r in running if r.can_move and r.stays_until <= now]
        moves = make_room(ready, movable) if waits else []
        return moves or (balance(ready, movable, rule) if rule else [])

    def _drain(self, link: Link, now: float) -> None:
        for remote in [r for r in self._remotes.values() if r.link is link]:
            if self._num_moves >= MAX_MOVES:
                return
            is_parked = remote.generation is None
            if self.is_moving(remote) or not (is_parked or remote.stays_until <= now):
                continue
            target = self._moving.place_for(remote)
            if target is None or target is link:
                return
            if is_parked and (remote.stays_until or not remote.length):
                self._moving.give_back(remote)  # it has failed once, or nothing is there
            else:
                self.move(remote, target)


def balance(ready: List[Link], remotes: Iterable[Remote], rule: Rebalancing) -> list[PlannedMove]:
    """Moves from the replica with the most generations to the one with the fewest, after which the
    two have equally many, roughly.

    Whole requests move, those with the fewest tokens first; of a request that is too large for it,
    the shortest sequences.
    """
    if not rule.applies_to(ready):
        return []
    source = max(ready, key=lambda link: (link.load, link.name))
    target = min(ready, key=lambda link: (link.load, link.name))
    num_moves, num_free = (source.load - target.load) // 2, target.num_free_tokens
    requests = defaultdict[object, list[Remote]](list)
    for remote in sorted(remotes, key=_by_length):
        if remote.link is source:
            requests[remote if remote.key is None else remote.key].append(remote)
    groups = sorted(requests.values(), key=lambda group: sum(map(_num_tokens, group)))
    moves: list[PlannedMove] = []
    whole = [group for group in groups if len(group) <= num_moves]
    for group in whole or groups[:1]:
        if whole and len(moves) + len(group) > num_moves:
            continue
        moves += [PlannedMove(remote, target) for remote in group]
    sizes = itertools.accumulate(_num_tokens(move.remote) for move in moves)
    fitting = sum(size < num_free for size in sizes)
    return moves[: min(fitting, num_moves)]


def make_room(ready: List[Link], remotes: List[Remote]) -> list[PlannedMove]:
    """Moves for the first prompt that waits for pages: it moves where they are free; if that is
    nowhere, and all replicas together have enough, shorter sequences leave its replica.
    """
    for source in ready:
        count = source.engine_load.waiting
        late = [r for r in remotes if r.link is source and not r.has_begun]
        late = sorted(late, key=lambda r: r.generation or 0)[-count:] if count else []
        if not late or _num_tokens(late[0]) < source.num_free_tokens:
            continue
        others = [link for link in ready if link is not source and link.load < link.capacity]
        shorter = [r for r in remotes if r.link is source and r.has_begun]
        return _room_for(late[0], source, others, sorted(shorter, key=_by_length))
    return []


def _room_for(
    late: Remote, source: Link, others: list[Link], shorter: list[Remote]
) -> list[PlannedMove]:
    needed, free = _num_tokens(late), {link: link.num_free_tokens for link in others}
    roomy = [link for link in others if free[link] > needed]
    if roomy:
        return [PlannedMove(late, max(roomy, key=lambda link: (free[link], link.name)))]
    moves: list[PlannedMove] = []
    available = source.num_free_tokens
    for remote in shorter:
        size = _num_tokens(remote)
        target = max(free, key=lambda link: (free[link], link.name), default=None)
        if available > needed or target is None or free[target] <= size or size >= needed:
            break
        moves.append(PlannedMove(remote, target))
        free[target] -= size
        available += size
    return moves if available > needed else []


def _num_tokens(remote: Remote) -> int:
    return len(remote.sequence.tokens)


def _by_length(remote: Remote) -> tuple[int, int]:
    return _num_tokens(remote), remote.handle
