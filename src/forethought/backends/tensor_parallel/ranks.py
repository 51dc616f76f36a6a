"""Ranks 1 to n - 1, as rank 0 tells them what to do and ends them; a ``Launcher`` starts them.

*Commands* are objects whose ``run`` the rank calls, in order; what that returns, if anything, comes
back. A thread of rank 0 waits for the ends of the lifelines, so that the end of a process is
noticed whatever rank 0 is doing. A rank that has ended, or a command that fails on rank 0, ends
them all: the ranks' parts of the KV cache are no longer one state.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch

from forethought.backends.tensor_parallel.collectives import CollectiveError, Collectives
from forethought.backends.tensor_parallel.launcher import Launcher, LocalLauncher, RankProcess
from forethought.backends.tensor_parallel.shard import Shard
from forethought.errors import EngineStopped
from forethought.interrupts import deferred_interrupts

Result = TypeVar("Result")

FOLLOWED = "it has lost another rank"
"""Why a rank ends because another one has."""
_CAUSE_SECONDS = 5.0
"""How long the reason of a failure is waited for."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first thing that a rank is sent.

    Attributes:
        shard: that it has.
        device: that it computes on.
        load: further arguments of ``loader.load``.
        page_size: tokens of a page of its KV storage.
        num_threads: that it computes with on a CPU.
    """

    shard: Shard
    device: torch.device
    load: Mapping[str, Any]
    page_size: int
    num_threads: int


@dataclass(slots=True, eq=False)
class _State:
    """What the thread that waits for ends shares with its owner, which it does not keep alive."""

    processes: list[RankProcess]
    launcher: Launcher
    pid: int = field(default_factory=os.getpid)
    causes: dict[int, str] = field(default_factory=dict)
    """Why ranks have ended, by rank, in the order in which that was noticed."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    failure: tuple[str, str] | None = None
    """What has happened and why, if there are no ranks any more; each call raises it."""
    collectives: Collectives | None = None
    is_closing: bool = False

    def watch(self) -> None:
        """Record the end of each process; runs in a thread until all have ended."""
        remaining = {process.lifeline: process for process in self.processes}
        while remaining:
            for connection in wait(list(remaining)):
                process = remaining.pop(connection)  # type: ignore[call-overload]
                why = process.reason()
                process.lifeline.close()
                with self.changed:
                    self.causes[process.rank] = why
                    self.changed.notify_all()
                if not self.is_closing and self.collectives is not None:
                    self.collectives.abort()

    def first_cause(self) -> tuple[int, str] | None:
        """The rank that ended for a reason of its own, else any that ended; None: all run."""
        ended = sorted(self.causes.items(), key=lambda cause: cause[1] == FOLLOWED)
        return ended[0] if ended else None

    def wait_for_cause(self) -> tuple[int, str] | None:
        """The first cause, if a rank ends soon."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self.causes), _CAUSE_SECONDS)
            return self.first_cause()

    def end(self) -> None:
        """End all processes; in a forked child, which has none, nothing is done."""
        if os.getpid() != self.pid or self.is_closing:
            return
        self.is_closing = True
        if self.failure is not None or self.collectives is None:
            for process in self.processes:  # it may wait in a collective, or be loading
                process.kill()
        for process in self.processes:
            process.end()
        if self.collectives is not None:
            self.collectives.close()
        self.launcher.close()


class Ranks:
    """Ranks 1 to ``size - 1``.

    Args:
        size: ranks, with rank 0.
        launcher: starts them; by default on this machine.
    """

    def __init__(self, size: int, launcher: Launcher | None = None) -> None:
        self.size, self.launcher = size, launcher or LocalLauncher()
        self._state = _State([], self.launcher)
        self._end = weakref.finalize(self, self._state.end)  # also when the interpreter ends
        try:
            for process in self.launcher.start(size):
                self._state.processes.append(process)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._state.watch, name="forethought-ranks", daemon=True).start()

    @property
    def shard(self) -> Shard:
        """Rank 0's."""
        return Shard(0, self.size)

    @property
    def collectives(self) -> Collectives:
        """Rank 0's, once connected."""
        assert self._state.collectives is not None
        return self._state.collectives

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks from 1 on."""
        return [process.process_id for process in self._state.processes]

    @property
    def failure(self) -> str | None:
        """Which rank has ended, and the engine with it, and why; None: none has."""
        if self._state.failure is not None:
            return ": ".join(self._state.failure)
        cause = self._state.first_cause()
        return None if cause is None else f"it has lost rank {cause[0]} of {self.size}: {cause[1]}"

    def connect(
        self, device: torch.device, load: Mapping[str, Any], page_size: int, num_threads: int
    ) -> None:
        """Let every rank load its shard, and wait until all have.

        Args:
            device: rank 0's.
            load: arguments of ``loader.load``.
            page_size: tokens of a page.
            num_threads: of each rank, on a CPU.

        Raises:
            EngineStopped: one could not.
        """
        processes = self._state.processes
        for process in processes:
            shard = Shard(process.rank, self.size)
            rank_device = self.launcher.device(shard, device.type)
            self._send(process, Setup(shard, rank_device, load, page_size, num_threads))
        for process in processes:
            self._receive(process)
        try:
            meeting, store = self.launcher.meet(self.size)
            for process in processes:  # raises where one has ended since: nobody waits for it
                self._send(process, meeting)
            host = self.launcher.host
            self._state.collectives = Collectives(store, host, self.shard, device)
            self._state.collectives.meet()
        except CollectiveError as error:
            raise self._failed(error) from error

    def run(self, command: Any, local: Callable[[], Result]) -> Result:
        """Let every rank run a command, and rank 0 its part of it.

        Ctrl-C takes effect when that is done, so that no rank waits for one that has left.

        Args:
            command: with a method ``run``, picklable.
            local: rank 0's part.

        Raises:
            EngineStopped: a rank has ended, or rank 0 failed; then there are no ranks any more.
        """
        self.check()
        with deferred_interrupts():
            try:
                for process in self._state.processes:
                    self._send(process, command)
                return local()
            except EngineStopped:
                raise
            except Exception as error:
                raise self._failed(error) from error
            except BaseException as error:  # the other ranks are elsewhere now
                self._failed(error)
                raise

    def ask(self, command: Any) -> list[Any]:
        """What each other rank replies to a command. Raises as ``run``."""
        processes = self._state.processes
        return self.run(command, lambda: [self._receive(process) for process in processes])

    def check(self) -> None:
        """Raise ``EngineStopped`` unless all ranks run, in the process that started them."""
        state = self._state
        if state.failure is not None:
            raise EngineStopped(*state.failure, "Build a new one")
        if os.getpid() != state.pid:
            raise EngineStopped(
                "this engine does not run in a forked process",
                f"the ranks of its model belong to process {state.pid}",
                "Build it in the process that uses it",
            )
        if state.is_closing:
            raise EngineStopped("the engine has been shut down", fix="Build a new one")
        if state.causes:
            raise self._failed(None)

    def close(self) -> None:
        """End the processes and wait until they have ended. Closing twice is fine."""
        self._end()

    def _send(self, process: RankProcess, message: Any) -> None:
        try:
            process.commands.send(message)
        except OSError as error:  # it has ended
            raise self._failed(error) from error

    def _receive(self, process: RankProcess) -> Any:
        try:
            return process.commands.recv()
        except (EOFError, OSError) as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException | None) -> EngineStopped:
        """End all ranks, and record the cause."""
        state = self._state
        if state.failure is None:
            is_elsewhere = isinstance(error, CollectiveError | EOFError | OSError)
            cause = state.wait_for_cause() if is_elsewhere else state.first_cause()
            if cause is not None:
                state.failure = f"the engine has lost rank {cause[0]} of {self.size}", cause[1]
            elif is_elsewhere:
                state.failure = "the engine has lost a rank", f"one does not answer: {error}"
            else:
                why = f"rank 0 of {self.size} failed with {type(error).__name__}: {error}"
                state.failure = "the engine has stopped", why
            self.close()
        return EngineStopped(*state.failure, "Build a new one")
