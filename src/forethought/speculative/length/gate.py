"""The acceptance gate: no drafts while few of their tokens are accepted.

While it is closed it sends a few short drafts now and then, and opens when these let expect enough
acceptance at full length. It does not measure time: see ``goodput.py``.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence

from forethought.speculative.length.policy import LengthRequest, SkippedSteps, StepRecord

log = logging.getLogger(__name__)

PROBE_DEPTH, PROBE_REQUESTS = 2, 4
"""Levels of a probing draft, and the number of requests that may probe in one step."""
PROBE_DRAFTS = 8
"""The gate decides after this many probing drafts, or this many steps of probing."""
FIRST_PAUSE, LAST_PAUSE = 8, 256
"""Steps between rounds of probes, at first and at most. While nothing changes, a closed gate lets
through fewer than ``PROBE_DRAFTS + PROBE_REQUESTS`` short drafts in ``LAST_PAUSE`` steps."""
HYSTERESIS = 0.05
"""How far above the threshold the expected rate must be for the gate to open again."""


class Backoff:
    """Exponential back-off: counts steps between tries, ever more while tries bring nothing new.

    Args:
        first: steps before the first try, and before each try after news.
        last: greatest number of steps between tries.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.interval = first
        """Steps before the next try."""
        self._waited = 0

    @property
    def left(self) -> int:
        """Steps before the next try; not above 0: it is due."""
        return self.interval - self._waited

    @property
    def due(self) -> bool:
        """Whether it is time for a try."""
        return self.left <= 0

    def wait(self, steps: int = 1) -> None:
        """Count steps without a try."""
        self._waited += steps

    def hasten(self) -> None:
        """The next try is due."""
        self._waited = self.interval

    def tried(self, news: bool) -> None:
        """Count a try; without news the pause before the next one doubles."""
        self._waited = 0
        self.interval = self._first if news else min(2 * self.interval, self._last)


class AcceptanceGate:
    """Allows drafts while enough of the drafted tokens are accepted.

    Open, it keeps the last ``window`` verified drafts of all requests. Once that many were verified
    since it opened and fewer than ``threshold`` of their levels were accepted, it closes, at the
    end of a call if several steps are one. (A chain has as many levels as tokens; a tree has
    fewer.) Closed, it probes, and after each round of probes it either opens or doubles the pause
    before the next one. A gate that closes soon after it opened keeps its long pauses.

    Args:
        window: number of drafts; at least 1.
        threshold: accepted tokens per drafted level, 0 to 1.
    """

    def __init__(self, window: int, threshold: float) -> None:
        self._window, self._threshold = window, threshold
        self._drafts: deque[tuple[int, int]] = deque()  # (depth, accepted)
        self._drafted = self._accepted = 0
        self._depth = 1  # of the deepest draft while it was open
        self._num_since_open = 0
        self._pause = Backoff(FIRST_PAUSE, LAST_PAUSE)
        self._next_row = 0
        self._num_probed = 0  # steps of the current round of probes
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
            self._num_probed += 1
            for offset in range(min(PROBE_REQUESTS, len(requests))):
                row = (self._next_row + offset) % len(requests)
                lengths[row] = min(PROBE_DEPTH, requests[row].max_draft_len)
            self._next_row += PROBE_REQUESTS
        return lengths

    def observe(self, record: StepRecord) -> None:
        """Count the drafts of the step, or of all steps of a call, and decide."""
        if not self._num_probed:
            self._pause.wait(record.num_steps)
        for _, depth, accepted in record.requests:
            if depth:
                self._count(depth, accepted)
        if self.open:
            self._maybe_close()
        elif (
            len(self._drafts) >= min(self._window, PROBE_DRAFTS) or self._num_probed >= PROBE_DRAFTS
        ):
            self._maybe_open()

    def skip(self) -> int:
        """While it is closed, the steps before the next probes."""
        return 0 if self.open else max(self._pause.left, 0)

    def hold(self) -> float:
        """For all while it is open: it closes at the end of a call; else up to the next probes."""
        return math.inf if self.open else max(self._pause.left, 1)

    def skipped(self, steps: SkippedSteps) -> None:
        """Count them."""
        self._pause.wait(steps.num_steps)

    def age(self, num_steps: int) -> None:
        """Count them as steps without a probe."""
        self._pause.wait(num_steps)

    def _count(self, depth: int, accepted: int) -> None:
        self._drafts.append((depth, accepted))
        self._drafted += depth
        self._accepted += accepted
        self._num_since_open += 1
        if self.open:
            self._depth = max(self._depth, depth)
        while len(self._drafts) > self._window:
            old_depth, old_accepted = self._drafts.popleft()
            self._drafted -= old_depth
            self._accepted -= old_accepted

    def _maybe_close(self) -> None:
        full = len(self._drafts) == self._window
        rate = self.rate
        if not full or rate is None or rate >= self._threshold:
            if rate is not None:
                self.reason = f"acceptance: open, {rate:.2f} of the drafted tokens are accepted"
            return
        # Closing soon after it opened is no news: the long pauses go on.
        self._pause.tried(news=self._num_since_open >= 4 * self._window)
        self.open = False
        self._report(
            f"closed, {rate:.2f} of the drafted tokens are accepted", f"{self._threshold:.2f}"
        )

    def _maybe_open(self) -> None:
        self._num_probed = 0
        rate = self._full_rate()
        needed = min(self._threshold + HYSTERESIS, 1.0)
        if rate >= needed:
            self.open = True
            self._report(
                f"open, {rate:.2f} of the tokens of full drafts are expected", f"{needed:.2f}"
            )
        else:
            self._pause.tried(news=False)
            self._report(
                f"closed, {rate:.2f} of the tokens of full drafts would be accepted",
                f"{needed:.2f}; next probe in {self._pause.interval} steps",
            )

    def _full_rate(self) -> float:
        """The rate that the probes let expect at full depth.

        Short drafts have higher rates than long ones, which lose all tokens after the first
        rejected one; so the acceptance of a token whose ancestors were accepted is extrapolated.
        """
        if not self._drafts:
            return 0.0  # nothing was proposed
        tested = sum(min(accepted + 1, depth) for depth, accepted in self._drafts)
        alpha = self._accepted / tested
        return sum(alpha**level for level in range(1, self._depth + 1)) / self._depth

    def _report(self, what: str, limit: str) -> None:
        self.reason = f"acceptance: {what} (limit {limit})"
        log.debug("%s", self.reason)
        self._drafts.clear()
        self._drafted = self._accepted = self._num_since_open = 0
