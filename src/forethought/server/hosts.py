"""Which names in the header ``Host`` a server answers to.

A page of another site can have its own name resolved to a loopback address (DNS rebinding). Its
requests are then of the same origin for the browser, which lets it read the answers of a server
that only this machine can reach. Their ``Host`` still has that site's name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from forethought.server.http import HttpError

_MISDIRECTED = 421


def is_loopback(name: str) -> bool:
    """Whether a name or an address can be of this machine alone."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_host(hosts: Sequence[bytes], allowed: Sequence[str]) -> None:
    """Refuse a request to another name than ``allowed``: ``*.example.com`` allows those below one,
    ``*`` all; names of this machine alone are always allowed.

    Raises HttpError (421) if there is not exactly one header ``Host``, or it has another name.
    """
    shown = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
    name = _name(shown)
    if name and (is_loopback(name) or any(_matches(name, pattern.lower()) for pattern in allowed)):
        return
    raise HttpError(
        _MISDIRECTED,
        f"this server does not answer to the Host {shown[:100]!r}: start it with --allowed-host",
        code="host_not_allowed",
    )


def _name(host: str) -> str:
    """The name in a header ``Host``, without its port; empty if it is none."""
    host = host.strip().lower()
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        return name if bracket and (not port or port[0] == ":") else ""
    name, _, port = host.partition(":")
    return name.rstrip(".") if not port or port.isdecimal() else ""


def _matches(name: str, pattern: str) -> bool:
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))
