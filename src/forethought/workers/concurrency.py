"""How many requests a server gets at once: a limit that adapts to the server.

Additive increase, multiplicative decrease (AIMD, as TCP's congestion control; Chiu and Jain, 1989):
every answer raises the limit a little, and a sign of overload lowers it.

==========================================  =======================================================
refused (429, 5xx) or timed out             limit * ``BACK_OFF``; the request is sent again
first tokens ``tolerance`` times later       limit * ``EASE_OFF``
than the quickest times so far
an answer while the limit was in full use   limit + 1 / limit; + 1 until the first overload
==========================================  =======================================================

Requests that were in flight when the limit fell say nothing about the new one: their overload does
not lower it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self

from forethought.scaffolding.settings import POSITIVE_INT, validated

_logger = logging.getLogger(__name__)

BACK_OFF = 0.5
EASE_OFF = 0.9
TOLERANCE = 3.0
WINDOW = 8
"""Answers whose median time to the first token is one measurement."""
MIN_SECONDS = 0.05
"""Times to the first token below this are noise."""
NUM_TRIES = 8
"""Times that one request is sent before its refusal is raised."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a refused request is sent again; doubled at each further refusal of it."""
_OVERLOADED = (408, 429)


class AdaptiveConcurrency:
    """A limit of the requests in flight that adapts to the server.

    Requests of one event loop at a time may use it.

    ::

        async with concurrency.request() as request:
            answer = await request.send(lambda: client.completions.create(...))

    Args:
        most: the limit is never above it.
        first: limit to begin with.
        pause: seconds before the first repetition of a refused request, unless the server says.

    Attributes:
        limit: at present, from 1 to ``most``; its whole part counts.
        num_in_flight: requests that are sent and not over.
        num_refused: requests that were refused so far.
    """

    def __init__(self, most: int, first: int = 4, pause: float = FIRST_PAUSE) -> None:
        self.most = validated("most", most, POSITIVE_INT)
        self.limit = float(min(validated("first", first, POSITIVE_INT), most))
        self.num_in_flight = self.num_refused = 0
        self._pause = pause
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_slow_start = True
        self._era = 0  # how often the limit has fallen
        self._times: list[float] = []
        self._quickest = math.inf

    def request(self) -> _Request:
        """A request, which begins when there is capacity for it."""
        return _Request(self)

    # ---- capacity -----------------------------------------------------------------------------

    async def enter(self) -> None:
        """Wait for capacity, first come first served, and take it."""
        if self.num_in_flight < int(self.limit) and not self._waiting:
            self.num_in_flight += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # the capacity that it has been given meanwhile
            raise

    def leave(self) -> None:
        """Give capacity back."""
        self.num_in_flight -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.num_in_flight < int(self.limit):
            turn = self._waiting.popleft()
            if not turn.done():
                self.num_in_flight += 1
                turn.set_result(None)

    # ---- what the server says -----------------------------------------------------------------

    @property
    def era(self) -> int:
        """Changes whenever the limit falls."""
        return self._era

    def on_first_token(self, seconds: float, era: int) -> None:
        """Called with the seconds to the first token of a request that was sent in ``era``."""
        if era != self._era:
            return
        self._times.append(max(seconds, MIN_SECONDS))
        if len(self._times) < WINDOW:
            return
        middle, self._times = sorted(self._times)[WINDOW // 2], []
        self._quickest = min(self._quickest, middle)
        if middle > TOLERANCE * self._quickest:
            self._lower(EASE_OFF, f"first tokens take {middle:.2f} s, at best {self._quickest:.2f}")

    def on_answer(self, era: int) -> None:
        """Called when a request that was sent in ``era`` has been answered."""
        if era == self._era and self.num_in_flight >= int(self.limit):
            grown = self.limit + (1 if self._is_slow_start else 1 / self.limit)
            self.limit = min(float(self.most), grown)
            self._admit()

    def on_refused(self, era: int) -> None:
        """Called when a request that was sent in ``era`` has been refused, or has timed out."""
        self.num_refused += 1
        if era == self._era:
            self._lower(BACK_OFF, "the server is overloaded")

    def pause_before(self, number: int, error: Exception) -> float:
        """Seconds to wait before the repetition of a request that was refused ``number`` times."""
        seconds = retry_after(error)
        return back_off(number, self._pause) if seconds is None else seconds

    def _lower(self, factor: float, why: str) -> None:
        self.limit = max(1.0, self.limit * factor)
        self._is_slow_start, self._times = False, []
        self._era += 1
        _logger.info("%d requests at once from now on: %s", int(self.limit), why)


class _Request(AbstractAsyncContextManager["_Request"]):
    """A request in flight."""

    def __init__(self, concurrency: AdaptiveConcurrency) -> None:
        self._concurrency, self._is_inside = concurrency, False
        self._sent_at, self._era = 0.0, 0
        self._has_begun = False

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_inside:
            self._is_inside = False
            if kind is None:
                self._concurrency.on_answer(self._era)
            self._concurrency.leave()

    async def send(self, create: Callable[[], Awaitable[Any]]) -> Any:
        """Send it, and again while the server refuses it for overload; raises the last error."""
        for number in range(1, NUM_TRIES + 1):
            try:
                return await create()
            except Exception as error:
                if not is_overload(error):
                    raise
                self.on_refused()
                if number == NUM_TRIES:
                    raise
                await self._step_aside(self._concurrency.pause_before(number, error))
        raise AssertionError("unreachable")

    def on_refused(self) -> None:
        """Called when the server has refused it, and it is not sent again from here."""
        self._concurrency.on_refused(self._era)

    def on_token(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._concurrency.on_first_token(time.monotonic() - self._sent_at, self._era)

    async def _enter(self) -> None:
        await self._concurrency.enter()
        self._is_inside = True
        self._sent_at, self._era = time.monotonic(), self._concurrency.era

    async def _step_aside(self, seconds: float) -> None:
        """Leave the capacity to others for a time."""
        self._is_inside = False
        self._concurrency.leave()
        await asyncio.sleep(seconds)
        await self._enter()


def back_off(number: int, first: float) -> float:
    """Seconds before a request that was refused ``number`` times is sent again.

    Random between half of ``first * 2 ** (number - 1)`` and all of it, so that requests that were
    refused together are not repeated together.
    """
    return min(LONGEST_PAUSE, first * 2.0 ** (number - 1)) * random.uniform(0.5, 1.0)


def is_overload(error: Exception) -> bool:
    """Whether a server has refused a request for its load, or has not answered in time."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status in _OVERLOADED or status >= 500
    return any("Timeout" in kind.__name__ for kind in type(error).__mro__)


def retry_after(error: Exception) -> float | None:
    """The seconds that the server asks to wait, at most ``LONGEST_PAUSE``."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        return min(LONGEST_PAUSE, max(0.0, float(headers.get("retry-after", ""))))
    except (TypeError, ValueError):
        return None
