"""Writes the test set that is shipped with the countdown model.

python -m countdown.problems --out problems.jsonl
"""

import argparse
import json
from pathlib import Path

from forethought.evaluation.generated.countdown import (
    Problem,
    expression,
    fixed_test_problems,
    solve,
)


def record(problem: Problem) -> dict[str, object]:
    """A problem with a solution as it is shipped; ``answer`` is one of many."""
    steps = solve(problem)
    assert steps is not None, "problems drawn here have solutions"
    return {
        "question": problem.question,
        "answer": expression(steps),
        "numbers": list(problem.numbers),
        "target": problem.target,
    }


def main() -> None:
    """Read the command line and write the test set, one JSON object per line."""
    parser = argparse.ArgumentParser(description="Write the held-out test problems.")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--count", type=int, default=150, help="problems of each size")
    options = parser.parse_args()
    lines = [json.dumps(record(problem)) + "\n" for problem in fixed_test_problems(options.count)]
    options.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
