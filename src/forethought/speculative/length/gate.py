"""When to try again: ever more seldom while trying brings nothing new.

[gate] A gate that closes while drafts are seldom accepted, and opens again when they are.

The field's gates close for good. This one sends out a few short drafts now and then, and opens when
what they show would be enough at full length. Knows nothing about time: see ``goodput`` for that.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from forethought.speculative.length.base import LengthRequest, StepRecord


class Backoff:
    """Counts steps between tries.

    Args:
        first: steps before the first try, and before each try after news.
        last: most steps between tries.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.interval = first
        """Steps before the next try."""
        self._waited = 0

    @property
    def due(self) -> bool:
        """Whether it is time."""
        return self._waited >= self.interval

    def wait(self) -> None:
        """A step without a try."""
        self._waited += 1

    def tried(self, news: bool) -> None:
        """A try: with news the next one comes soon, without in twice the time."""
        self._waited = 0
        self.interval = self._first if news else min(2 * self.interval, self._last)


log = logging.getLogger(__name__)

PROBE_DEPTH, PROBE_REQUESTS = 2, 4
"""Levels of a probing draft, and most requests that probe in one step."""
PROBE_DRAFTS = 8
"""Most probing drafts, and most steps, that are waited for before the gate decides."""
FIRST_PAUSE, LAST_PAUSE = 8, 256
"""Steps between rounds of probes, at first and at most. When nothing changes, a closed gate comes
to let through fewer than ``PROBE_DRAFTS + PROBE_REQUESTS`` short drafts in ``LAST_PAUSE`` steps."""
HYSTERESIS = 0.05
"""How far above the threshold the rate must be for the gate to open again."""


class AcceptanceGate:
    """Allows drafts while enough of the drafted tokens are accepted.

    Open, it keeps the last ``window`` verified drafts, of all requests together; once there were as
    many since it opened and the share of accepted among their levels is below ``threshold``, it
    closes. (A chain has as many levels as tokens; a tree has fewer.) Closed, it probes, and after
    each round of probes it either opens or waits twice as long for the next. A gate that closes
    soon after it opened goes on with the long pauses.

    Args:
        window: drafts; at least 1.
        threshold: accepted tokens among the levels drafted, 0 to 1.
    """

    def __init__(self, window: int, threshold: float) -> None:
        self._window, self._threshold = window, threshold
        self._drafts: deque[tuple[int, int]] = deque()  # (depth, accepted)
        self._drafted = self._accepted = 0
        self._depth = 1  # of the deepest draft while it was open
        self._seen = 0  # drafts since it opened
        self._pause = Backoff(FIRST_PAUSE, LAST_PAUSE)
        self._turn = 0
        self._probed = 0  # steps of the current round of probes
        self.open = True
        """Whether drafts have their full length."""
        self.reason = "acceptance: open, nothing is known yet"

    @property
    def rate(self) -> float | None:
        """Accepted tokens among the levels of the drafts that count; None without any."""
        return self._accepted / self._drafted if self._drafted else None

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """The full lengths, or zeros, or zeros but for a few short probes."""
        if self.open:
            return [request.max_draft_len for request in requests]
        lengths = [0] * len(requests)
        if self._pause.due:
            self._probed += 1
            for turn in range(min(PROBE_REQUESTS, len(requests))):
                place = (self._turn + turn) % len(requests)
                lengths[place] = min(PROBE_DEPTH, requests[place].max_draft_len)
            self._turn += PROBE_REQUESTS
        return lengths

    def observe(self, record: StepRecord) -> None:
        """Count the drafts of the step, and decide."""
        if not self._probed:
            self._pause.wait()
        for _, depth, accepted in record.requests:
            self._count(depth, accepted)
        if self.open:
            self._close_or_not()
        elif len(self._drafts) >= min(self._window, PROBE_DRAFTS) or self._probed >= PROBE_DRAFTS:
            self._open_or_not()

    def _count(self, depth: int, accepted: int) -> None:
        self._drafts.append((depth, accepted))
        self._drafted += depth
        self._accepted += accepted
        self._seen += 1
        if self.open:
            self._depth = max(self._depth, depth)
        while len(self._drafts) > self._window:
            old_depth, old_accepted = self._drafts.popleft()
            self._drafted -= old_depth
            self._accepted -= old_accepted

    def _close_or_not(self) -> None:
        full = len(self._drafts) == self._window
        rate = self.rate
        if not full or rate is None or rate >= self._threshold:
            if rate is not None:
                self.reason = f"acceptance: open, {rate:.2f} of the drafted tokens are accepted"
            return
        # Long enough open to say that this is news, and not the same again.
        self._pause.tried(news=self._seen >= 4 * self._window)
        self.open = False
        self._say(
            f"closed, {rate:.2f} of the drafted tokens are accepted", f"{self._threshold:.2f}"
        )

    def _open_or_not(self) -> None:
        self._probed = 0
        rate = self._full_rate()
        needed = min(self._threshold + HYSTERESIS, 1.0)
        if rate >= needed:
            self.open = True
            self._say(
                f"open, {rate:.2f} of the tokens of full drafts are expected", f"{needed:.2f}"
            )
        else:
            self._pause.tried(news=False)
            self._say(
                f"closed, {rate:.2f} of the tokens of full drafts would be accepted",
                f"{needed:.2f}; next probe in {self._pause.interval} steps",
            )

    def _full_rate(self) -> float:
        """What the probes let expect of drafts of full depth.

        Short drafts have higher rates than long ones, whose later tokens are lost with the first
        rejected one: the chance of a token, tested behind accepted ones only, is carried over.
        """
        if not self._drafts:
            return 0.0  # nothing was proposed
        tested = sum(min(accepted + 1, depth) for depth, accepted in self._drafts)
        chance = self._accepted / tested
        return sum(chance**level for level in range(1, self._depth + 1)) / self._depth

    def _say(self, what: str, limit: str) -> None:
        self.reason = f"acceptance: {what} (limit {limit})"
        log.debug("%s", self.reason)
        self._drafts.clear()
        self._drafted = self._accepted = self._seen = 0
