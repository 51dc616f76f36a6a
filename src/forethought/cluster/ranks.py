"""Ranks of tensor parallelism as actors of Ray, on the machines of a replica's placement group.

The replica is rank 0, in the group's first bundle. It listens at a port of its machine and starts
an actor in each other bundle, which connects to it and serves the two connections as a process on
the same machine does::

    replica: rank 0                                actor: rank r
    ---------------                                -------------
    listens, starts the actors   -- by Ray -->     address, secret, rank
                                 <-- TCP ---       commands: a proof, rank, process id
                                 <-- TCP ---       lifeline: the same
    Setup, Meeting, commands     --- TCP -->       ``process.serve``, as on one machine

The actors belong to the replica: Ray ends them with it, whatever they do, and with their group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from typing_extensions import override

from forethought.assets import reasoner_dir
from forethought.backends.tensor_parallel.collectives import Meeting, PortMeeting
from forethought.backends.tensor_parallel.launcher import Launcher, RankProcess
from forethought.backends.tensor_parallel.process import serve
from forethought.backends.tensor_parallel.shard import Shard
from forethought.cluster.actors import Resources, node_host, running_ray
from forethought.cluster.entrance import (
    HELLO_SECONDS,
    Admission,
    Entrance,
    configure,
    receive_exactly,
)
from forethought.config.engine import LlmArgs
from forethought.errors import EngineStopped
from forethought.model_dir import find_model_dir

START_SECONDS = 180.0
"""In which all ranks of a replica connect to it; each imports torch first."""
_HELLO = struct.Struct("!?II")
"""What a rank says first on a connection: whether it is the lifeline, rank, process id.
"""


def connect(entrance: Entrance, rank: int, is_lifeline: bool) -> tuple[Connection, str]:
    """A connection of a rank to rank 0; and the address of its machine, as rank 0 sees it."""
    hello = _HELLO.pack(is_lifeline, rank, os.getpid())
    connected = entrance.connect(hello, START_SECONDS)
    host: str = connected.getsockname()[0]
    return Connection(connected.detach()), host


def _accepted_connection(accepted: socket.socket) -> Connection:
    accepted.settimeout(None)
    configure(accepted)
    return Connection(accepted.detach())


class Rank:
    """An actor that is a rank other than 0."""

    def serve(
        self, entrance: Entrance, rank: int, fields: Mapping[str, Any], directory: str | None
    ) -> None:
        """Serve rank 0 until it ends, and end the process.

        Args:
            entrance: of rank 0.
            rank: that this one is.
            fields: of ``LlmArgs``: each machine finds the model under its name.
            directory: as of ``Replica``.
        """
        commands, host = connect(entrance, rank, is_lifeline=False)
        lifeline, _ = connect(entrance, rank, is_lifeline=True)
        try:
            model_dir = _model_dir(fields, directory)
        except Exception as error:
            lifeline.send(f"{type(error).__name__}: {error}")
        else:
            serve(commands, lifeline, host, model_dir)
        os._exit(0)  # a communicator may wait for a rank


def _model_dir(fields: Mapping[str, Any], directory: str | None) -> Any:
    if directory is not None:
        with contextlib.suppress(OSError):
            os.chdir(directory)
    args = LlmArgs.from_dict(dict(fields))
    return find_model_dir(args.model or reasoner_dir(), args.revision, code=args.trust_remote_code)


class RankActor(RankProcess):
    """The actor of a rank, as rank 0 sees it."""

    def __init__(self, actor: Any, hello: tuple[int, int], ends: tuple[Connection, Connection]):
        super().__init__(*hello, *ends)
        self._actor = actor

    @override
    def kill(self) -> None:
        _kill(self._actor)

    @override
    def end(self) -> None:
        self.commands.close()
        self.kill()

    @override
    def _end_status(self) -> str:
        return f"its process {self.process_id} has ended, or its machine"


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # it has ended, or its cluster has
        running_ray().kill(actor)


class RankActors(Launcher):
    """Starts ranks in the placement group of the replica in whose process it is.

    Args:
        resources: of each rank.
        fields: of ``LlmArgs``.
        directory: as of ``Replica``.
    """

    is_local = False

    def __init__(
        self, resources: Resources, fields: Mapping[str, Any], directory: str | None
    ) -> None:
        self._resources, self._fields, self._directory = resources, fields, directory
        self._refs = list[Any]()

    @property
    @override
    def host(self) -> str:
        return node_host()

    @override
    def device(self, shard: Shard, device_type: str) -> torch.device:
        """The GPU that Ray has reserved for the rank is the only one that its process sees."""
        return torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)

    @override
    def meet(self, size: int) -> tuple[Meeting, Any]:
        return PortMeeting.open(self.host, size)

    @override
    def start(self, size: int) -> Iterator[RankProcess]:
        actors = dict[int, Any]()
        with socket.create_server((self.host, 0), backlog=2 * size) as listener:
            entrance = Entrance.of(listener)
            try:
                for rank in range(1, size):
                    actors[rank] = self._start(rank, entrance)
                return iter(self._accepted(listener, entrance, actors))
            except BaseException:
                for actor in actors.values():
                    _kill(actor)
                raise

    def _start(self, rank: int, entrance: Entrance) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = running_ray()
        group = ray.util.get_current_placement_group()
        actor = ray.remote(Rank).options(
            num_cpus=self._resources.num_cpus,
            num_gpus=self._resources.num_gpus,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        )
        started = actor.remote()
        self._refs.append(started.serve.remote(entrance, rank, self._fields, self._directory))
        return started

    def _accepted(
        self, listener: socket.socket, entrance: Entrance, actors: Mapping[int, Any]
    ) -> list[RankActor]:
        """The ranks, once all of them have connected twice."""
        ends, process_ids = dict[tuple[int, bool], Connection](), dict[int, int]()
        listener.settimeout(1.0)
        deadline = time.monotonic() + START_SECONDS
        while len(ends) < 2 * len(actors):
            self._check_started(deadline)
            with contextlib.suppress(TimeoutError):
                accepted, _ = listener.accept()
                if (hello := _hello(accepted, entrance)) is not None:
                    is_lifeline, rank, process_ids[rank] = hello
                    ends[rank, is_lifeline] = _accepted_connection(accepted)
        return [
            RankActor(actor, (rank, process_ids[rank]), (ends[rank, False], ends[rank, True]))
            for rank, actor in actors.items()
        ]

    def _check_started(self, deadline: float) -> None:
        """Raises EngineStopped where an actor has ended, or it takes too long."""
        ray = running_ray()
        ended, _ = ray.wait(self._refs, timeout=0)
        if ended:
            try:
                ray.get(ended[0])
            except ray.exceptions.RayError as error:
                why = str(error).strip().splitlines()[0]
                raise EngineStopped("a rank does not start", why, "See its log") from error
        if time.monotonic() > deadline:
            why = f"not all have connected within {START_SECONDS:.0f} s"
            raise EngineStopped("ranks do not start", why, "Let the machines reach each other")

    @override
    def close(self) -> None:
        self._refs.clear()

    @override
    def release(self) -> None:
        """Remove the placement group, with which Ray ends the replica, too."""
        with contextlib.suppress(Exception):  # as above
            ray = running_ray()
            ray.util.remove_placement_group(ray.util.get_current_placement_group())


def _hello(accepted: socket.socket, entrance: Entrance) -> tuple[bool, int, int] | None:
    """What a rank says first; None: it is none, and its connection is closed."""
    admission, deadline = Admission(entrance, _HELLO.size), time.monotonic() + HELLO_SECONDS
    with contextlib.suppress(OSError):
        accepted.sendall(admission.challenge)
        answer = receive_exactly(accepted, admission.num_expected, deadline)
        if (admitted := admission.admitted(answer)) is not None:
            hello, proof = admitted
            accepted.sendall(proof)
            is_lifeline, rank, process_id = _HELLO.unpack(hello)
            return is_lifeline, rank, process_id
    accepted.close()
    return None
