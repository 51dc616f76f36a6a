"""``Entrance``: where a process takes connections, and what tells those of its own from others."""

from __future__ import annotations

import hmac
import secrets
import socket
from typing import NamedTuple, Self

LOOPBACK = "127.0.0.1"
SECRET_BYTES = 32
HELLO_SECONDS = 5.0
"""For the first bytes of a connection: who sends a byte at a time keeps others out for no longer.
"""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between TCP's probes of the other machine, and how many are not
answered before it is given up.
"""


class Entrance(NamedTuple):
    """An address, and the secret that comes first on a connection to it. It is told through Ray, to
    processes of the cluster.
    """

    host: str
    port: int
    secret: bytes

    @classmethod
    def of(cls, listening: socket.socket) -> Self:
        """That of a socket, with a new secret."""
        host, port = listening.getsockname()[:2]
        return cls(host, port, secrets.token_bytes(SECRET_BYTES))

    def connect(self, hello: bytes, seconds: float) -> socket.socket:
        """A connection that has sent the secret and ``hello``. Raises OSError, at the latest after
        these seconds.
        """
        connected = socket.create_connection((self.host, self.port), seconds)
        configure(connected)
        connected.sendall(self.secret + hello)
        connected.settimeout(None)
        return connected

    def admits(self, secret: bytes) -> bool:
        """Whether a connection began with the secret."""
        return hmac.compare_digest(secret, self.secret)


def configure(connected: socket.socket) -> None:
    """Have TCP send at once, and notice that the other machine has gone."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # macOS has not all of them
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
