"""Mutation tests: break one line of the package at a time and see whether its tests notice.

Each mutant replaces a short text that stands exactly once in its file, in a temporary copy of the
tracked files; the tests named with it run there, up to the first failure. A mutant that no test
notices is *alive*: either a test is missing, or the line has no effect and can go. An anchor that is
not in its file any more is reported as *not found*, and has to be written anew here.

    python scripts/mutants.py                      all of them, one after the other
    python scripts/mutants.py kv/ scheduler        those whose file has one of these texts in its path
    python scripts/mutants.py --jobs 2             two at a time
    python scripts/mutants.py --list               what there is

Prints one line per mutant and one JSON line last. Leaves 1 if one is alive or its tests do not pass
without it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/forethought")
TIMEOUT_SECONDS = 600
"""Of one run of tests; a mutant that takes longer counts as killed."""
_NO_TESTS_FAILED, _SOME_TESTS_FAILED, _INTERRUPTED = 0, 1, 2  # exit codes of pytest


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: below the package.
        original: a text that stands there exactly once.
        replacement: what is written in its place.
        tests: arguments of pytest that select the tests expected to fail.
    """

    file: str
    original: str
    replacement: str
    tests: str


@dataclass(frozen=True)
class Finding:
    """What became of a mutant: ``outcome`` is killed, alive, not found or broken tests."""

    mutant: Mutant
    outcome: str
    seconds: float
    detail: str = ""

    def __str__(self) -> str:
        mutant = self.mutant
        change = f"{_line(mutant.original)} -> {_line(mutant.replacement)}"
        return f"{self.outcome:12} {self.seconds:5.1f} s  {mutant.file}: {change}  {self.detail}"


KV = "tests/kv"
MUTANTS = [
    # ---- kv -------------------------------------------------------------------------------------
    Mutant(
        "kv/table.py",
        "% self._pool.page_size != 0 and self._pool.refs[self.pages[-1]] > 1",
        "% self._pool.page_size != 0 and self._pool.refs[self.pages[-1]] > 2",
        KV,
    ),
    Mutant("kv/table.py", "del self.digests[length // self._pool.page_size :]", "pass", KV),
    Mutant("kv/table.py", " and not self._pool.is_kept(tail)", "", KV),
    # ---- engine ---------------------------------------------------------------------------------
    Mutant(
        "engine/admission.py",
        "self._check_wishes(params)\n        self._check_length(len(tokens) + 1)",
        "self._check_wishes(params)\n        self._check_length(len(tokens))",
        "tests/engine/test_engine.py",
    ),
    Mutant(
        "engine/scheduler.py",
        "urgent.params.priority >= last.params.priority",
        "urgent.params.priority > last.params.priority",
        "tests/engine/test_scheduler.py",
    ),
    Mutant("engine/scheduler.py", "left //= 2", "pass", "tests/engine/test_scheduler.py"),
    Mutant(
        "engine/commit.py",
        "verdict.path[size - 1 :]",
        "verdict.path[size:]",
        "tests/engine/test_speculation.py -k 'stop_token or beyond_max_tokens'",
    ),
    Mutant(
        "engine/speculation.py",
        "sequence.limit - len(sequence.tokens) - 1  #",
        "sequence.limit - len(sequence.tokens)  #",
        "tests/engine/test_speculation.py -k 'stop_token or beyond_max_tokens'",
    ),
    Mutant(
        "engine/loop.py",
        "companion.invalidate(row.sequence.table, row.start, row.stop + row.nodes)",
        "pass",
        "tests/engine/test_speculation.py -k 'written_anew'",
    ),
    # ---- model/sampling -------------------------------------------------------------------------
    Mutant(
        "model/sampling/law.py",
        "torch.searchsorted(rising, min_p * likeliest)",
        "torch.searchsorted(rising, min_p * likeliest, right=True)",
        "tests/model/test_sampling.py",
    ),
    # ---- scaffolding ----------------------------------------------------------------------------
    Mutant(
        "scaffolding/driver.py",
        'branch.on_failure == "raise" or self.run.ledger.exhausted is not None',
        'branch.on_failure == "raise"',
        "tests/scaffolding/test_driver.py tests/scaffolding/test_budget.py",
    ),
    # ---- methods --------------------------------------------------------------------------------
    Mutant(
        "methods/dynasor.py",
        "earliest = probes[missing - 1]",
        "earliest = probes[-1]",
        "tests/methods/test_dynasor.py",
    ),
    Mutant(
        "methods/probes.py",
        "self._left < 1",
        "self._left <= 1",
        "tests/methods/test_dynasor.py",
    ),
]


def main() -> int:
    """Run the mutants that were asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", help="only mutants of files whose path has this text")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    arguments = parser.parse_args()
    wanted = [
        mutant
        for mutant in MUTANTS
        if not arguments.files or any(text in mutant.file for text in arguments.files)
    ]
    if arguments.list:
        for mutant in wanted:
            print(f"{mutant.file}: {_line(mutant.original)} -> {_line(mutant.replacement)}")
        return 0
    findings = run(wanted, max(1, arguments.jobs))
    counts = Counter(finding.outcome for finding in findings)
    for finding in findings:
        if finding.outcome != "killed":
            print(finding)
    print(json.dumps({"script": "mutants", "mutants": len(wanted), **counts}))
    return int(bool(counts["alive"] or counts["broken tests"]))


def run(mutants: Sequence[Mutant], jobs: int) -> list[Finding]:
    """Try each mutant in one of ``jobs`` copies of the tracked files."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(_copy(Path(directory) / str(number)))

        def judge(tests: str) -> bool:
            copy = copies.get()
            try:
                return _pytest(copy, tests)[0] == _NO_TESTS_FAILED
            finally:
                copies.put(copy)

        def attempt(mutant: Mutant) -> Finding:
            copy = copies.get()
            try:
                finding = _try(copy, mutant, passing[mutant.tests])
            finally:
                copies.put(copy)
            print(finding, flush=True)
            return finding

        with ThreadPoolExecutor(jobs) as pool:
            selections = list(dict.fromkeys(mutant.tests for mutant in mutants))
            passing = dict(zip(selections, pool.map(judge, selections), strict=True))
            return list(pool.map(attempt, mutants))


def _try(copy: Path, mutant: Mutant, passes: bool) -> Finding:
    """Apply one mutant, run its tests, put the file back."""
    path = copy / PACKAGE / mutant.file
    text = path.read_text() if path.exists() else ""
    if text.count(mutant.original) != 1:
        return Finding(mutant, "not found", 0.0)
    if not passes:
        return Finding(mutant, "broken tests", 0.0, f"without the mutant: {mutant.tests}")
    began = time.perf_counter()
    try:
        path.write_text(text.replace(mutant.original, mutant.replacement))
        code, detail = _pytest(copy, mutant.tests)
    finally:
        path.write_text(text)
    if code == _NO_TESTS_FAILED:
        outcome = "alive"
    else:
        outcome = "killed" if code in (_SOME_TESTS_FAILED, _INTERRUPTED) else "broken tests"
    return Finding(mutant, outcome, time.perf_counter() - began, detail)


def _pytest(copy: Path, tests: str) -> tuple[int, str]:
    """Run tests up to the first failure: pytest's exit code, and which test failed."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-m", "not slow"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",  # a stale one would hide a mutant of the same size
        "OMP_NUM_THREADS": "1",
    }
    command = f"{sys.executable} -m pytest {' '.join(map(repr, options))} {tests}"
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            shell=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _SOME_TESTS_FAILED, "timed out"
    failed = [line.split()[1] for line in done.stdout.split("\n") if line.startswith("FAILED ")]
    return done.returncode, failed[0].partition("::")[2] if failed else ""


def _copy(target: Path) -> Path:
    """The tracked files as they are in the working tree."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def _line(text: str) -> str:
    """A text on one line, shortened."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else line[:57] + "...")


if __name__ == "__main__":
    sys.exit(main())
