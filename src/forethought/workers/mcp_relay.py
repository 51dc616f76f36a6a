"""A local MCP server whose messages have a limit; a program of its own, of the standard library.

::

    python -I mcp_relay.py 1048576 COMMAND [ARGUMENT ...]

Starts the command, which has the program's input, and passes on the lines that it writes. Of a
longer line no more than the limit is held: in its place comes an error for the call that it
answers, where one of its ends says which, and else the program ends, and the command with it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

_END = 256
"""Bytes at either end of a long message in which its id is looked for."""
_ID = rb'"id"\s*:\s*(\d{1,18}|"[\w-]{1,64}")'
_INTERNAL_ERROR = -32603
_VERSION = rb'"jsonrpc"\s*:\s*"2\.0"'
_AT_START = re.compile(rb"\s*\{\s*(?:" + _VERSION + rb"\s*,\s*)?" + _ID + rb"\s*,")
_AT_END = re.compile(rb"[,{]\s*" + _ID + rb"(?:\s*,\s*" + _VERSION + rb")?\s*\}\s*$")


class Unanswerable(Exception):
    """A message is too long, and does not say which call it answers."""


def main() -> int:
    """Relay until the command ends; returns its status."""
    limit, command = int(sys.argv[1]), sys.argv[2:]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            for line in bounded(server.stdout, limit):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
        except Unanswerable as error:
            sys.stderr.write(f"{command[0]}: {error}\n")
            server.kill()
    return server.returncode


def bounded(source: IO[bytes], limit: int) -> Iterator[bytes]:
    """The lines of ``source``, with an error in place of each that has more than ``limit`` bytes.

    Raises Unanswerable: such a line names no call.
    """
    while line := source.readline(limit + 1):
        if len(line) <= limit or line.endswith(b"\n"):
            yield line
        else:
            yield _error(line[:_END], _skip(source, line[-_END:]), limit)


def _skip(source: IO[bytes], tail: bytes) -> bytes:
    """Read to the end of a line; returns its last bytes."""
    while not tail.endswith(b"\n") and (chunk := source.readline(1 << 16)):
        tail = (tail + chunk)[-_END:]
    return tail


def _error(head: bytes, tail: bytes, limit: int) -> bytes:
    """The message in place of a long one."""
    reason = f"the message is larger than {limit:,} bytes"
    match = _AT_START.match(head) or _AT_END.search(tail)
    if match is None:
        raise Unanswerable(reason)
    error = {"code": _INTERNAL_ERROR, "message": reason}
    answer = {"jsonrpc": "2.0", "id": json.loads(match[1]), "error": error}
    return json.dumps(answer).encode() + b"\n"


if __name__ == "__main__":
    sys.exit(main())
