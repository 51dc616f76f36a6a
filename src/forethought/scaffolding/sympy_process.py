"""The process that compares formulas: ``["a", "b"]`` per line in, ``true`` or ``false`` out.

It prints ``true`` once when it is ready, and leaves when its input ends. See ``equivalence``.
"""

from __future__ import annotations

import json
import signal
import sys


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    from math_verify import parse, verify

    def boxed(answer: str) -> object:
        return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)

    def say(verdict: bool) -> None:
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()

    say(True)
    for line in sys.stdin:
        try:
            one, other = map(boxed, json.loads(line))
            same = verify(one, other, timeout_seconds=None) or verify(
                other, one, timeout_seconds=None
            )
        except Exception:
            same = False
        say(bool(same))


if __name__ == "__main__":
    main()
