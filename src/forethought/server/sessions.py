"""Sessions of agents: the requests of one are placed together, with those of its children.

A client names its session in a header (``X-Session-Id``, or Dynamo's ``X-Dynamo-Session-Id``) or in
the body (``nvext.agent_context``), and with it perhaps the session that has started this one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from forethought.errors import ParameterError
from forethought.server.protocol.body import Generating

MAX_SESSIONS = 1 << 16
"""That are remembered; the least recently used are forgotten."""
MAX_LENGTH = 256
"""Characters of an id."""
_HEADERS = (b"x-dynamo-session-id", b"x-session-id")
_PARENT_HEADERS = (b"x-dynamo-parent-session-id", b"x-parent-session-id")


class AgentSession(NamedTuple):
    """The session of a request, and the one that has started it; empty: none is named."""

    id: str = ""
    parent: str = ""

    @classmethod
    def read(cls, headers: Mapping[bytes, bytes]) -> AgentSession:
        """That of the headers; raises ParameterError for an id that is too long."""
        texts = []
        for names in (_HEADERS, _PARENT_HEADERS):
            name, value = next(((n, headers[n]) for n in names if headers.get(n)), (b"", b""))
            if len(value) > MAX_LENGTH:
                why = f"it has {len(value)} characters, and at most {MAX_LENGTH} are allowed"
                raise ParameterError(f"invalid header {name.decode()}", why, "Send a shorter id")
            texts.append(value.decode("latin-1"))
        return cls(*texts)

    @classmethod
    def of(cls, session: AgentSession, body: Generating) -> AgentSession:
        """The session of the headers, or else that of the body."""
        context = None if body.nvext is None else body.nvext.agent_context
        if session.id or context is None:
            return session
        return cls(context.session_id, context.parent_session_id or "")


class PlacementKeys:
    """The key under which the requests of a session are placed: that of the first of its ancestors
    that is known.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._keys: OrderedDict[tuple[str, str], str] = OrderedDict()
        """By tenant and session."""

    def find(self, tenant: str, session: AgentSession) -> str | None:
        """The key of a session of a tenant; None: there is no session."""
        if not session.id:
            return None
        entry = (tenant, session.id)
        key = self._keys.get(entry)
        if key is None and session.parent:
            key = self.find(tenant, AgentSession(session.parent))
        self._keys[entry] = key = key or f"{tenant}/{session.id}"
        self._keys.move_to_end(entry)
        if len(self._keys) > self._max_sessions:
            self._keys.popitem(last=False)
        return key
