"""Where the processes of ranks run: ``Launcher``, and ``LocalLauncher``, which starts them here.

A rank's process has two connections to rank 0. *Commands* go down the first one, and replies come
back; the second one, the *lifeline*, is closed when the process ends.

An interpreter is started for each rank, not a fork, and not ``multiprocessing``, which would import
the program's main module once more.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
from typing_extensions import override

from forethought.backends.tensor_parallel.collectives import LOOPBACK, FileMeeting, Meeting
from forethought.backends.tensor_parallel.shard import Shard

END_SECONDS = 5.0
"""How long the end of a process is waited for."""
_MAIN = """
import signal
for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
    signal.signal(number, signal.SIG_IGN)
from forethought.backends.tensor_parallel.process import main
main()
"""
"""What a rank's interpreter runs. Signals that reach all processes of a program are for rank 0: it
may have requests to finish, and the ranks end with it. They are ignored before torch is imported,
which takes seconds."""


class RankProcess(ABC):
    """The process of one rank, as rank 0 sees it.

    Args:
        rank: from 1 on.
        process_id: on its machine.
        commands: this end of the first connection.
        lifeline: of the second one.
    """

    def __init__(
        self, rank: int, process_id: int, commands: Connection, lifeline: Connection
    ) -> None:
        self.rank, self.process_id = rank, process_id
        self.commands, self.lifeline = commands, lifeline

    def reason(self) -> str:
        """Why it has ended, once the lifeline has something to read or is closed."""
        with suppress(EOFError, OSError):
            return str(self.lifeline.recv())
        return self._end_status() or "its process has closed its connection"

    @abstractmethod
    def kill(self) -> None:
        """End it whatever it does, without waiting."""

    @abstractmethod
    def end(self) -> None:
        """Close the commands, and end it if it does not end by itself."""

    def _end_status(self) -> str | None:
        """How a process without a last word has ended; None: that is not known."""
        return None


class Launcher(ABC):
    """Starts the processes of the ranks from 1 on.

    Attributes:
        is_local: whether all ranks share the processors and GPUs of this machine.
    """

    is_local: ClassVar[bool]

    @property
    @abstractmethod
    def host(self) -> str:
        """The address at which other ranks reach this process in sums on CPUs."""

    @abstractmethod
    def start(self, size: int) -> Iterator[RankProcess]:
        """Start the ranks of a model that is cut into ``size``. Raises OSError, EngineStopped."""

    @abstractmethod
    def device(self, shard: Shard, device_type: str) -> torch.device:
        """Where a rank computes, by the name that its process has for it."""

    @abstractmethod
    def meet(self, size: int) -> tuple[Meeting, Any]:
        """Where the others meet this rank, and the store of this one. Raises CollectiveError."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the ranks had in common, once they have ended."""

    def release(self) -> None:
        """Give up what is reserved for all ranks, as this process is about to end, too."""


class LocalProcess(RankProcess):
    """The process of a rank on this machine."""

    def __init__(
        self, rank: int, popen: subprocess.Popen[bytes], commands: Connection, lifeline: Connection
    ) -> None:
        super().__init__(rank, popen.pid, commands, lifeline)
        self.popen = popen

    @classmethod
    def start(cls, rank: int, directory: str) -> LocalProcess:
        """Start an interpreter that finds the same modules as this one, to remove a directory."""
        (here, there), (own_end, lifeline) = Pipe(), Pipe(duplex=False)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        passed = there.fileno(), lifeline.fileno()
        try:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, *map(str, passed), directory],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        finally:
            there.close()
            lifeline.close()
        return cls(rank, popen, here, own_end)

    @override
    def kill(self) -> None:
        self.popen.kill()

    @override
    def end(self) -> None:
        self.commands.close()
        try:
            self.popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    @override
    def _end_status(self) -> str | None:
        with suppress(subprocess.TimeoutExpired):
            status = self.popen.wait(END_SECONDS)
            how = f"with status {status}" if status >= 0 else f"by {_signal_name(-status)}"
            return f"its process ended {how}"
        return None


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


class LocalLauncher(Launcher):
    """Starts ranks on this machine, which meet through a file in a private directory."""

    is_local = True

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="forethought-ranks-")

    @property
    @override
    def host(self) -> str:
        return LOOPBACK

    @override
    def start(self, size: int) -> Iterator[LocalProcess]:
        return (LocalProcess.start(rank, self._directory) for rank in range(1, size))

    @override
    def device(self, shard: Shard, device_type: str) -> torch.device:
        return shard.device(device_type)

    @override
    def meet(self, size: int) -> tuple[Meeting, Any]:
        meeting = FileMeeting(Path(self._directory) / "meeting")
        return meeting, meeting.store(size)

    @override
    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
