"""Replicas as actors of Ray, which starts them where there is room and says when one has died."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forethought import __version__
from forethought.cluster.connection import Connection
from forethought.cluster.link import Channel, Reply, model_of
from forethought.cluster.messages import Command, Copied, Description
from forethought.cluster.replica import Replica, Status
from forethought.errors import DependencyError, EngineStopped, ForethoughtError, ParameterError

log = logging.getLogger(__name__)

NAMESPACE = "forethought"
"""Of the actors in a cluster of Ray."""
_OBJECT_STORE = 128 * 2**20
"""Bytes of a Ray that is started here: messages are small."""
_CONNECT_SECONDS = 10.0
_LEAVE_SECONDS = 3.0
_STATUS_SECONDS = 10.0
"""In which a replica answers its operator; one that loads its model does not yet."""
_HELP = (
    "Start it with: ray start --head; where it checks tokens, ~/.ray/auth_token must be its own, "
    "and RAY_AUTH_MODE token"
)
_TOKEN = Path.home() / ".ray" / "auth_token"
"""Of a cluster of Ray that checks who joins it."""


def start_ray(address: str | None, num_actors: int) -> None:
    """Join the cluster of Ray at an address, or start one on this machine; nothing, where this
    process has done so already.

    Raises:
        DependencyError: Ray is not installed.
        ParameterError: there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None and _TOKEN.is_file():  # as ``ray start`` does; ``ray.init`` does not
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    ray = _ray()
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": "ERROR"}
    if address is None:
        options |= {
            "address": "local",
            "num_cpus": max(num_actors, os.cpu_count() or 1),
            "object_store_memory": _OBJECT_STORE,
            "include_dashboard": False,
            "log_to_driver": False,
            "_system_config": {"worker_niceness": 0},  # by default all else goes before replicas
        }
    else:
        _check_reachable(address)
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise ParameterError(f"Ray cannot be used {where}", str(error), _HELP) from error
    if address is None:
        log.info("Ray runs at %s", ray.get_runtime_context().gcs_address)


def _check_reachable(address: str) -> None:
    """Raises ParameterError if nothing listens at a host and port: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto"
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ParameterError(f"Ray cannot be used at {address}", str(error), _HELP) from error


@dataclass(frozen=True, slots=True)
class Resources:
    """What Ray reserves for each of the ``num_ranks`` processes of a replica."""

    num_cpus: int
    num_gpus: int
    num_ranks: int = 1

    @classmethod
    def share(cls, fields: Mapping[str, Any], num_replicas: int) -> Resources:
        """An equal share of the processors there are now, or as many as the ``LlmArgs`` in
        ``fields`` say; a GPU where there are some, unless these choose the CPU.
        """
        total, num_ranks = _ray().cluster_resources(), num_ranks_of(fields)
        threads = fields.get("num_threads")
        nodes = max(1, sum(name.startswith("node:") for name in total) - 1)
        share = int(total.get("CPU", 1) // max(num_replicas * num_ranks, nodes))
        num_cpus = threads if isinstance(threads, int) else max(1, share)
        on_cpu = str(fields.get("device", "auto")).startswith("cpu") or not total.get("GPU")
        return cls(num_cpus, 0 if on_cpu else 1, num_ranks)

    def check_capacity(self) -> None:
        """Raises ParameterError where the machines of the cluster are too small for the ranks of
        one replica, whatever else they do; a replica in one process waits for larger ones.
        """
        if self.num_ranks == 1:
            return
        machines = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
        capacity = sum(map(self._num_fitting, machines))
        if capacity < self.num_ranks:
            size = f"{self.num_cpus} CPUs" + (" and a GPU" if self.num_gpus else "")
            raise ParameterError(
                f"tensor_parallel_size={self.num_ranks} is not possible in this cluster of Ray",
                f"a rank takes {size}, and its machines have room for {capacity} such ranks",
                "Lower it or num_threads, or add machines: ray start --address",
                param="tensor_parallel_size",
            )

    def _num_fitting(self, machine: Mapping[str, float]) -> int:
        num_fitting = int(machine.get("CPU", 0) // self.num_cpus)
        return min(num_fitting, int(machine.get("GPU", 0))) if self.num_gpus else num_fitting


def num_ranks_of(fields: Mapping[str, Any]) -> int:
    """The ranks of a replica with these ``LlmArgs``."""
    return int(fields.get("tensor_parallel_size") or 1)


def name_of(fields: Mapping[str, Any]) -> str:
    """The beginning of the names of replicas with these ``LlmArgs``: an ingress that comes after
    another one finds those of the same model and version again, and no others.
    """
    text = repr([__version__, *sorted((name, str(value)) for name, value in fields.items())])
    return f"replica-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


class ReplicaActor(Replica):
    """A replica whose process has nothing else to do."""

    def retire(self) -> None:
        """End the other ranks and this process."""
        super().retire()
        os._exit(0)


class ActorOpener:
    """Finds or starts the actor of a name."""

    def __init__(
        self, arguments: Sequence[Any], resources: Resources, kind: type = ReplicaActor
    ) -> None:
        self._arguments, self._resources, self._kind = arguments, resources, kind

    def __call__(self, name: str, reply: Reply) -> ActorChannel:
        """The replica of a name, for one connection."""
        resources = self._resources
        actor = running_ray().remote(self._kind)
        options = actor.options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",  # outlives the ingress, and its driver
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            max_restarts=0,  # in its place another one is started: Ray's own takes seconds to tell
            scheduling_strategy="SPREAD" if resources.num_ranks == 1 else _bundle(name, resources),
        )
        group = name if resources.num_ranks > 1 else None
        return ActorChannel(options.remote(*self._arguments), reply, group)


def _bundle(name: str, resources: Resources) -> Any:
    """Where rank 0 of a replica is placed: the first bundle of a placement group of all its ranks,
    on one machine if there is room. It has the replica's name; one that a dead replica has left is
    removed.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray = running_ray()
    with contextlib.suppress(ValueError):
        ray.get_actor(name, NAMESPACE)
        return "DEFAULT"  # it is there
    release(name)
    bundle = {"CPU": resources.num_cpus, "GPU": resources.num_gpus}
    bundle = {kind: number for kind, number in bundle.items() if number}
    bundles = [bundle] * resources.num_ranks
    group = ray.util.placement_group(bundles, "PACK", name=name, lifetime="detached")
    return PlacementGroupSchedulingStrategy(group, 0)


def release(group: str) -> None:
    """Remove a placement group, if there is one of this name: Ray ends what runs there."""
    with contextlib.suppress(Exception):  # there is none, or the cluster has ended
        ray = running_ray()
        ray.util.remove_placement_group(ray.util.get_placement_group(group))


class ActorChannel:
    """Messages to one actor, as one of its ingresses: over a connection of their own, or by calls
    of the actor where its machine cannot be reached past Ray.

    Args:
        actor: of the replica.
        reply: takes its answers.
        group: the name of the placement group of its ranks, which ends with it; None: it has none.
    """

    def __init__(self, actor: Any, reply: Reply, group: str | None = None) -> None:
        self._actor, self._reply, self._group = actor, reply, group
        self._ingress = uuid.uuid4().hex
        self._connection: Connection | None = None

    def connect(self) -> None:
        """Ask for the description, which is replied once there is a connection."""
        self._send(self._actor.connect, node_host(), reply=self._described)

    def _described(self, answer: Any) -> None:
        """In a thread of Ray, which does not wait."""
        if isinstance(answer, Description) and answer.entrance is not None:
            threading.Thread(target=self._open, args=(answer,), daemon=True).start()
        else:
            self._reply(answer)

    def _open(self, answer: Description) -> None:
        assert answer.entrance is not None, "it has one"
        try:
            self._connection = Connection.open(answer.entrance, self._ingress)
            self._reply(self._connection)
        except OSError as error:
            where = f"{answer.entrance.host}:{answer.entrance.port}"
            log.warning(
                "no connection to a replica at %s: %s. Calls of Ray take its place", where, error
            )
        finally:
            self._reply(answer)

    def tell(self, number: int, commands: Sequence[Command]) -> None:
        """Send commands."""
        if self._connection is not None:
            self._connection.tell(number, commands)
        else:
            self._send(self._actor.tell, number, commands)

    def ask(self) -> None:
        """Ask for updates."""
        if self._connection is not None:
            self._connection.ask()
        else:
            self._send(self._actor.updates)

    def copy(self, handle: int, target: Channel) -> None:
        """Have the pages of a session brought to another actor, through Ray's object store."""
        assert isinstance(target, ActorChannel), "all replicas are actors"
        try:
            running_ray()
            pages = self._actor.pages.remote(self._ingress, handle)
        except Exception as error:  # as at the end of the program
            target._reply(Copied(handle, error=_as_error(error)))
            return
        failed = partial(Copied, handle)
        receive = target._actor.receive
        target._send(receive, handle, pages, as_failure=lambda e: failed(error=e))

    def drain(self) -> None:
        """Have all ingresses of the actor leave it."""
        self._actor.drain.remote()

    def kill(self) -> None:
        """End the actor, and its ranks."""
        with contextlib.suppress(Exception):  # it has ended, or its cluster has
            running_ray().kill(self._actor)
        if self._group is not None:
            release(self._group)

    def leave(self) -> None:
        """Leave the actor."""
        with contextlib.suppress(Exception):  # as above
            ray = running_ray()
            if not ray.get(self._actor.leave.remote(self._ingress), timeout=_LEAVE_SECONDS):
                self.kill()

    def _send(
        self,
        method: Any,
        *arguments: Any,
        as_failure: Callable[[Exception], Any] = lambda e: e,
        reply: Reply | None = None,
    ) -> None:
        """Call a method of the actor, whose result is the reply, if it has one; so is what
        ``as_failure`` makes of its error.
        """
        reply = reply or self._reply

        def done(future: Any) -> None:
            error = future.exception()
            result = as_failure(_as_error(error)) if error is not None else future.result()
            if result is not None:
                reply(result)

        try:
            running_ray()
            answer = method.remote(self._ingress, *arguments)
        except Exception as error:  # as at the end of the program
            reply(as_failure(_as_error(error)))
        else:
            answer.future().add_done_callback(done)


def _as_error(error: BaseException) -> Exception:
    cause = getattr(error, "cause", None) or error  # Ray's own is of both kinds, and all traceback
    if isinstance(cause, ForethoughtError):
        return cause
    if cause is not error:
        return EngineStopped("the replica died", f"{type(cause).__name__}: {cause}")
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return EngineStopped("the replica died", lines[0])


def statuses() -> dict[str, Status | None]:
    """The replicas in the cluster of Ray that was joined, by their names; None: it does not answer,
    as it hangs, loads its model or has just died.
    """
    ray, answers = running_ray(), dict[str, Any]()
    for name in sorted(ray.util.list_named_actors()):
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            answers[name] = ray.get_actor(name, NAMESPACE).status.remote()
    if answers:
        ray.wait([*answers.values()], num_returns=len(answers), timeout=_STATUS_SECONDS)
    return {name: _status(ray, answer) for name, answer in answers.items()}


def _status(ray: Any, answer: Any) -> Status | None:
    try:
        return ray.get(answer, timeout=0)  # type: ignore[no-any-return]
    except ray.exceptions.RayError:
        return None


def drain_replica(name: str) -> None:
    """Have all ingresses leave a replica in the cluster of Ray that was joined.

    Raises ParameterError for a name that none has, that of a replica that does not answer, or that
    of the last one of a model.
    """
    replicas = statuses()
    if name not in replicas:
        names = ", ".join(replicas) or "none"
        raise ParameterError("no such replica", f"there is no {name!r}", f"There are: {names}")
    if replicas[name] is None:
        why = f"{name} does not answer"
        raise ParameterError("the replica cannot be drained", why, "Its servers replace it")
    model = model_of(name)
    others = [s for other, s in replicas.items() if other != name and model_of(other) == model]
    if not any(status is not None and not status.is_draining for status in others):
        why = "no other one of its model takes generations"
        raise ParameterError("the replica cannot be drained", why, "Start another one first")
    ray = running_ray()
    ray.get(ray.get_actor(name, NAMESPACE).drain.remote(), timeout=_STATUS_SECONDS)


def node_host() -> str:
    """The address at which the processes of the cluster of Ray reach those of this machine."""
    ray = running_ray()
    node = ray.get_runtime_context().get_node_id()
    return next(str(n["NodeManagerAddress"]) for n in ray.nodes() if n["NodeID"] == node)


def check_ray() -> None:
    """Raises DependencyError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise DependencyError.missing("ray", "replicas", "ray")


def running_ray() -> Any:
    """Raises EngineStopped at the end of the program: Ray would start anew with the next call."""
    ray = _ray()
    if not ray.is_initialized():
        raise EngineStopped("Ray has been shut down", "", "Open the model again")
    return ray


def _ray() -> Any:
    check_ray()
    import ray

    return ray
