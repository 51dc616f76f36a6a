"""A contestant: an engine in its own process, with one form of the weights."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import Request, Settings

ROOT = Path(__file__).parents[2]
BASE = "transformers"
"""What ratios are to, unless the models are GGUF files."""


@dataclass(frozen=True)
class Entry:
    """What is run as a contestant."""

    engine: str
    python: str
    """Interpreter of its environment."""
    form: str = ""
    """Quantisation, as the engine calls it."""

    @property
    def label(self) -> str:
        """In tables."""
        return f"{self.engine} {self.form}".strip()


class Failed(Exception):
    """The engine refused, or its process ended."""


class Contestant:
    """The process of an entry, which ends with the context."""

    def __init__(self, entry: Entry, threads: int, log: Path) -> None:
        self.entry, self.label = entry, entry.label
        self.version = ""
        self.peak = 0
        """MiB, the highest so far."""
        self.loaded: dict[str, int] = {}
        """MiB once the model was loaded."""
        self._log = log.open("a", encoding="utf-8")
        paths = [str(ROOT), str(ROOT / "src")] if entry.engine == "forethought" else [str(ROOT)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [entry.python, "-m", "benchmarks.peers.worker", entry.engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def prepare(self, source: Path, folder: Path, settings: Settings) -> str:
        """Path of the model as this engine reads it."""
        values = {"source": str(source), "folder": str(folder), "settings": asdict(settings)}
        path: str = self._ask("prepare", values)["path"]
        return path

    def load(self, settings: Settings) -> None:
        """Load the model."""
        answer = self._ask("load", asdict(settings))
        self.version = answer["version"]
        self.loaded = {name: answer[name] for name in ("resident", "anonymous")}

    def generate(self, request: Request) -> dict[str, Any]:
        """``seconds``, ``first`` (seconds or None) and ``tokens``."""
        answer = self._ask("generate", asdict(request))
        self.peak = answer["peak"]
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _ask(self, verb: str, values: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"verb": verb, "values": values}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed("its process ended") from None
        line = self._process.stdout.readline()
        if not line:
            raise Failed("its process ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer


def prepared(entry: Entry, sources: list[Path], folder: Path, settings: Settings) -> list[str]:
    """Paths of models as the engine reads them, converted by a process that ends afterwards."""
    contestant = Contestant(entry, settings.threads, folder / f"{entry.engine}.log")
    try:
        paths = []
        for source in sources:
            path = hashlib.blake2b(str(source.absolute()).encode(), digest_size=4).hexdigest()
            target = folder / entry.engine / f"{source.name}-{path}"  # many are called alike
            target.mkdir(parents=True, exist_ok=True)
            paths.append(contestant.prepare(source, target, settings))
        return paths
    finally:
        contestant.close()
