"""``Entrance``: where a process takes connections, and what tells those of its own from others.

::

    connects                                          takes connections
    --------                                          -----------------
                                <-- challenge --      random bytes
    challenge, proof, hello     -->                   a proof that the secret is known
                                <-- proof --          that it is here, too
    what is read from now on    <-->

The secret is told through Ray and never sent: who reads the network cannot connect, and who has
taken the address of a process that has ended is not taken for it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from typing import NamedTuple, Self

LOOPBACK = "127.0.0.1"
SECRET_BYTES = CHALLENGE_BYTES = PROOF_BYTES = 32
HELLO_SECONDS = 5.0
"""For the first bytes of a connection: who sends a byte at a time keeps others out for no longer.
"""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between TCP's probes of the other machine, and how many are not
answered before it is given up.
"""


class Entrance(NamedTuple):
    """An address, and the secret of those who may connect to it. It is told through Ray, to
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
        """A connection that has sent ``hello``, both of whose sides know the secret. Raises
        OSError, at the latest after these seconds.
        """
        deadline = time.monotonic() + seconds
        connected = socket.create_connection((self.host, self.port), seconds)
        try:
            configure(connected)
            challenge = receive_exactly(connected, CHALLENGE_BYTES, deadline)
            nonce = secrets.token_bytes(CHALLENGE_BYTES)
            connected.sendall(nonce + self.proof(b"enter", challenge, nonce, hello) + hello)
            proof = receive_exactly(connected, PROOF_BYTES, deadline)
            if not hmac.compare_digest(proof, self.proof(b"admit", nonce, challenge)):
                raise ConnectionRefusedError("another process has its address")
            connected.settimeout(None)
        except BaseException:
            connected.close()
            raise
        return connected

    def proof(self, *parts: bytes) -> bytes:
        """What only who knows the secret can say of bytes; all but the last have fixed sizes."""
        return hmac.digest(self.secret, b"".join(parts), "sha256")


class Admission:
    """The first bytes of one connection to an entrance.

    Args:
        entrance: to which it was made.
        num_hello: bytes that the other side has to say.

    Attributes:
        challenge: is sent first.
        num_expected: bytes of the answer to it.
    """

    def __init__(self, entrance: Entrance, num_hello: int) -> None:
        self._entrance = entrance
        self.challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self.num_expected = CHALLENGE_BYTES + PROOF_BYTES + num_hello

    def admitted(self, answer: bytes) -> tuple[bytes, bytes] | None:
        """The hello, and the proof that is sent back; None: the other side does not know the
        secret.
        """
        other, rest = answer[:CHALLENGE_BYTES], answer[CHALLENGE_BYTES:]
        proof, hello = rest[:PROOF_BYTES], rest[PROOF_BYTES:]
        expected = self._entrance.proof(b"enter", self.challenge, other, hello)
        if len(answer) != self.num_expected or not hmac.compare_digest(proof, expected):
            return None
        return hello, self._entrance.proof(b"admit", other, self.challenge)


def receive_exactly(connected: socket.socket, size: int, deadline: float) -> bytes:
    """As many bytes, before the deadline of ``time.monotonic``; OSError if they do not come."""
    data = b""
    while len(data) < size:
        if (remaining := deadline - time.monotonic()) <= 0:
            raise TimeoutError("it has not said enough")
        connected.settimeout(remaining)
        if not (more := connected.recv(size - len(data))):
            raise ConnectionResetError("it has ended the connection")
        data += more
    return data


def configure(connected: socket.socket) -> None:
    """Have TCP send at once, and notice that the other machine has gone."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # macOS has not all of them
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
