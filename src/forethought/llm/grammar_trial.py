"""The process that tries whether a grammar can be compiled within limits of time and memory.

llguidance cannot be interrupted, and what a thread of the server compiles takes the server's
memory. So a grammar that might take for ever is first compiled here, in a process of its own that
the system ends at a limit: by a signal, which is the answer. Otherwise it exits with 0 and writes
what is wrong with the grammar, if anything is.

Input, as JSON: ``tokenizer`` (the text of a tokenizer.json), ``ends`` (ids that end an output),
``grammar`` (llguidance's), ``limits`` (of ``LLParserLimits``), ``stack_bytes``, ``memory_bytes``
and ``processor_seconds``. Arguments: directories to import from. Run by its path, it imports
nothing of the package.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def main() -> None:
    """Read a grammar, and compile it."""
    sys.path += [directory for directory in sys.argv[1:] if directory not in sys.path]
    request = json.load(sys.stdin.buffer)
    threading.stack_size(request["stack_bytes"])
    thread = threading.Thread(target=_compile, args=(request,))
    thread.start()
    thread.join()


def _compile(request: dict[str, Any]) -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokens = LLTokenizer(request["tokenizer"], eos_token=request["ends"] or None)
    _limit(resource.RLIMIT_AS, _bytes_in_use() + request["memory_bytes"])
    signal.setitimer(signal.ITIMER_PROF, request["processor_seconds"])  # of all threads, from here
    limits = LLParserLimits(**request["limits"])
    matcher = LLMatcher(tokens, request["grammar"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    sys.stdout.write(matcher.get_error())


def _bytes_in_use() -> int:
    """Of the address space, the stack included; a terabyte where the system does not say."""
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[0]) if statm.exists() else 2**28
    return pages * resource.getpagesize()


def _limit(which: int, most: int) -> None:
    """Lower a limit of this process; a lower one that it has already stays."""
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
