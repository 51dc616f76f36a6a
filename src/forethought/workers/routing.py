"""Which of several servers gets a request: the decisions of a router, without its connections.

Cache-aware routing as in SGLang's router, whose thresholds are the defaults. A request goes to

1. the server that has had the other requests of the same method request (its sticky key), so that
   its branches find their prefix in one cache; else, while the loads are in balance, the one that
   has had the last request of its session;
2. the least loaded server, if the loads are out of balance: the largest exceeds the smallest by
   more than ``imbalance_abs`` requests and by more than the factor ``imbalance_rel``;
3. the server that has seen the longest prefix of its prompt, if that is more than ``prefix_match``
   of the prompt;
4. the least loaded server; among equals the one that holds the fewest prefixes.

Servers that are down, that asked for a pause, or that have failed this request are left out as
long as there are others.
"""

from __future__ import annotations

import math
import re
import threading
import time
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from forethought.errors import ParameterError

BLOCK = 16
"""Characters of a prompt that are one block of the prefix tree."""
MAX_SESSIONS = 1 << 16
"""Sessions whose servers are remembered; the least recently used are forgotten."""
MAX_FAILURES = 3
"""Server errors (5xx) one after another after which a server counts as down."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Thresholds of the router; ``ParameterError`` if one is out of its range."""

    prefix_match: float = 0.3
    """Share of a prompt above which the server with the longest prefix gets it, from 0 to 1."""
    imbalance_abs: int = 64
    """Requests by which loads may differ."""
    imbalance_rel: float = 1.5
    """Factor by which loads may differ, at least 1."""
    max_blocks: int = 2**16
    """Blocks of prompts remembered per server; the least recently used are forgotten."""

    def __post_init__(self) -> None:
        checks = {
            "prefix_match": (0 <= self.prefix_match <= 1, "Give a share from 0 to 1"),
            "imbalance_abs": (self.imbalance_abs >= 0, "Give a number of requests, from 0"),
            "imbalance_rel": (self.imbalance_rel >= 1, "Give a factor of at least 1"),
            "max_blocks": (self.max_blocks >= 1, "Give a number of blocks, from 1"),
        }
        for name, (is_valid, fix) in checks.items():
            if not is_valid:
                raise ParameterError(f"invalid {name}", f"got {getattr(self, name)!r}", fix)


class PrefixTree:
    """The prompts that a server has received lately, as a tree of blocks of ``BLOCK`` characters.

    The key of a block is the hash of the text up to its end, so that a prefix is matched block by
    block. The text after the last whole block is left out.

    Args:
        max_blocks: the least recently used blocks beyond this number are removed, leaves first.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, text: str) -> int:
        """Characters of the longest prefix of ``text`` that is in the tree."""
        matched = 0
        for block in _chain(text):
            if block not in self._blocks:
                break
            matched += BLOCK
        return matched

    def insert(self, text: str) -> None:
        """Add the blocks of ``text``."""
        # The first block becomes the most recent one: a parent is never older than its children.
        for block in reversed(list(_chain(text))):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Remove all blocks."""
        self._blocks.clear()


def _chain(text: str) -> list[int]:
    keys, key = [], 0
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        key = hash((key, text[start : start + BLOCK]))
        keys.append(key)
    return keys


class UpstreamServer:
    """The router's state of a server.

    Attributes:
        url: of its API, such as ``http://host:8000/v1``, without user and password.
        authorization: the header for the URL's user and password; None: it has none.
        is_healthy: it answered lately, or has not been asked yet.
        num_in_flight: requests that it has been sent and that are not over.
        num_requests: those it has been sent so far.
        num_failures: server errors since it last answered.
        resumes_at: when it may be asked again, on the router's clock.
        prefixes: the prompts that it has received.
    """

    def __init__(self, url: str, max_blocks: int) -> None:
        self.url, self.authorization = shown_url(url), basic_authorization(url)
        self.is_healthy = True
        self.num_in_flight = self.num_requests = self.num_failures = 0
        self.resumes_at = -math.inf
        self.prefixes = PrefixTree(max_blocks)

    def __repr__(self) -> str:
        health = "healthy" if self.is_healthy else "down"
        return f"<{self.url} {health}, {self.num_in_flight} in flight>"


class Router:
    """Chooses servers; safe to use from several threads.

    Args:
        urls: of the servers.
        routing: its thresholds.
        clock: seconds; only differences count.

    Raises:
        ParameterError: no URL, an invalid one, or the same one twice.
    """

    def __init__(
        self,
        urls: Sequence[str],
        routing: Routing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.routing = routing or Routing()
        checked = checked_urls(urls)
        self.servers = [UpstreamServer(url, self.routing.max_blocks) for url in checked]
        self._sticky: dict[str, UpstreamServer] = {}
        self._sessions: OrderedDict[str, UpstreamServer] = OrderedDict()
        self._clock, self._lock = clock, threading.Lock()

    def choose(
        self,
        text: str,
        key: str | None = None,
        tried: Collection[UpstreamServer] = (),
        session: str | None = None,
    ) -> UpstreamServer:
        """The server for a request, which counts as in flight until ``release``.

        Args:
            text: of the prompt.
            key: requests with the same key go to the same server.
            tried: servers that have failed the request.
            session: those of one go to the same server while the loads are in balance.
        """
        with self._lock:
            candidates = self._candidates(tried)
            sticky = self._sticky.get(key) if key is not None else None
            if sticky not in candidates and not self._is_imbalanced(candidates):
                sticky = self._sessions.get(session) if session is not None else None
            server = sticky if sticky in candidates else self._best(text, candidates)
            assert server is not None, "there is at least one candidate"
            if key is not None:
                self._sticky[key] = server
            if session is not None:
                self._remember(session, server)
            server.prefixes.insert(text)
            server.num_in_flight += 1
            server.num_requests += 1
            return server

    def release(self, server: UpstreamServer) -> None:
        """Called when a request that ``server`` was chosen for is over."""
        with self._lock:
            server.num_in_flight -= 1

    def forget(self, key: str) -> None:
        """Called when no more requests have this key."""
        with self._lock:
            self._sticky.pop(key, None)

    # ---- what servers do ----------------------------------------------------------------------

    def answered(self, server: UpstreamServer) -> None:
        """Called when ``server`` has answered a request, or a health check."""
        with self._lock:
            server.is_healthy, server.num_failures = True, 0

    def busy(self, server: UpstreamServer, seconds: float) -> None:
        """Called when a busy ``server`` has refused a request: it is avoided for ``seconds``."""
        with self._lock:
            server.resumes_at = max(server.resumes_at, self._clock() + seconds)

    def failed(self, server: UpstreamServer) -> None:
        """Called for an answer with a server error; several in a row take the server down."""
        with self._lock:
            server.num_failures += 1
            if server.num_failures >= MAX_FAILURES:
                self._take_down(server)

    def lost(self, server: UpstreamServer) -> None:
        """Called when ``server`` cannot be reached, or does not answer."""
        with self._lock:
            self._take_down(server)

    def seconds_until_ready(self, tried: Collection[UpstreamServer] = ()) -> float:
        """How long the next choice has to pause; 0.0 if a server may be asked at once."""
        with self._lock:
            times = [server.resumes_at for server in self._candidates(tried)]
            return max(0.0, min(times) - self._clock())

    def _remember(self, session: str, server: UpstreamServer) -> None:
        self._sessions[session] = server
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def _take_down(self, server: UpstreamServer) -> None:
        server.is_healthy = False
        server.prefixes.clear()  # one that comes back begins with an empty cache

    # ---- choosing -----------------------------------------------------------------------------

    def _candidates(self, tried: Collection[UpstreamServer]) -> list[UpstreamServer]:
        now = self._clock()
        healthy = [server for server in self.servers if server.is_healthy]
        ready = [server for server in healthy if server.resumes_at <= now]
        for group in (ready, healthy, ready or healthy or self.servers):
            if new := [server for server in group if server not in tried]:
                return new
        return ready or healthy or self.servers

    def _best(self, text: str, candidates: list[UpstreamServer]) -> UpstreamServer:
        if not self._is_imbalanced(candidates):
            matches = {server: server.prefixes.match(text) for server in candidates}
            longest = max(candidates, key=lambda server: (matches[server], -server.num_in_flight))
            if matches[longest] > self.routing.prefix_match * len(text):
                return longest
        return min(candidates, key=lambda server: (server.num_in_flight, len(server.prefixes)))

    def _is_imbalanced(self, candidates: list[UpstreamServer]) -> bool:
        loads = [server.num_in_flight for server in candidates]
        smallest, largest = min(loads), max(loads)
        is_far = largest - smallest > self.routing.imbalance_abs
        return is_far and largest > self.routing.imbalance_rel * smallest


def checked_urls(urls: Sequence[str]) -> list[str]:
    """The URLs of servers; one without a path gets ``/v1``.

    Raises:
        ParameterError: no URL, an invalid one, or the same one twice, whatever user it names.
    """
    if isinstance(urls, str) or not urls:
        raise ParameterError("no upstream servers", "urls is text or empty", "Give a list of URLs")
    by_host: dict[str, str] = {}
    for url in urls:
        shown = shown_url(url)
        if reason := url_error(url):
            raise ParameterError(
                f"invalid URL {shown!r}", reason, "Write it as in http://host:8000/v1"
            )
        ending = "" if urlsplit(url.rstrip("/")).path else "/v1"
        key = shown.rstrip("/") + ending
        if key in by_host:
            raise ParameterError("the same server twice", f"got {shown!r}", "Leave one of them out")
        by_host[key] = url.rstrip("/") + ending
    return list(by_host.values())


def url_error(url: str) -> str:
    """Why a text is not the URL of a server; empty if it is. Quotes no part of the text."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number in 0..65535
    except ValueError:
        return "its host or port cannot be read"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "it does not begin with http:// or https:// and a host"
    return ""


def shown_url(url: str) -> str:
    """A URL without user and password, for messages, logs and metrics."""
    if url_error(url):  # where the password ends is not known
        return re.sub(r"//.*@", "//", url)
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def basic_authorization(url: str) -> str | None:
    """The ``Authorization`` header that stands for the user and password in a URL."""
    parts = urlsplit(url)
    if parts.username is None:
        return None
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {b64encode(pair.encode()).decode()}"
