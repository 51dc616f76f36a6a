"""Replicas as actors of Ray, which starts them where there is room and says when one has died."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forethought import __version__
from forethought.cluster.link import Reply
from forethought.cluster.messages import Command
from forethought.cluster.replica import Replica
from forethought.errors import DependencyError, EngineStopped, ForethoughtError, ParameterError

NAMESPACE = "forethought"
"""Of the actors in a cluster of Ray."""
_OBJECT_STORE = 128 * 2**20
"""Bytes of a Ray that is started here: messages are small."""
_LEAVE_SECONDS = 3.0
_HELP = (
    "Start it with: ray start --head; where it checks tokens, ~/.ray/auth_token must be its own, "
    "and RAY_AUTH_MODE token"
)
_TOKEN = Path.home() / ".ray" / "auth_token"
"""Of a cluster of Ray that checks who joins it."""


def start_ray(address: str | None, num_replicas: int) -> None:
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
            "num_cpus": max(num_replicas, os.cpu_count() or 1),
            "object_store_memory": _OBJECT_STORE,
            "include_dashboard": False,
            "log_to_driver": False,
            "_system_config": {"worker_niceness": 0},  # by default all else goes before replicas
        }
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise ParameterError(f"Ray cannot be used {where}", str(error), _HELP) from error


@dataclass(frozen=True, slots=True)
class Resources:
    """What Ray reserves for a replica."""

    num_cpus: int
    num_gpus: int

    @classmethod
    def share(cls, fields: Mapping[str, Any], num_replicas: int) -> Resources:
        """An equal share of the processors there are now, or as many as the ``LlmArgs`` in
        ``fields`` say; GPUs where there are some, unless these choose the CPU.
        """
        total = _ray().cluster_resources()
        threads = fields.get("num_threads")
        nodes = max(1, sum(name.startswith("node:") for name in total) - 1)
        share = int(total.get("CPU", 1) // max(num_replicas, nodes))
        num_cpus = threads if isinstance(threads, int) else max(1, share)
        on_cpu = str(fields.get("device", "auto")).startswith("cpu") or not total.get("GPU")
        return cls(num_cpus, 0 if on_cpu else int(fields.get("tensor_parallel_size") or 1))


def name_of(fields: Mapping[str, Any]) -> str:
    """The beginning of the names of replicas with these ``LlmArgs``: an ingress that comes after
    another one finds those of the same model and version again, and no others.
    """
    text = repr([__version__, *sorted((name, str(value)) for name, value in fields.items())])
    return f"replica-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


class ActorOpener:
    """Finds or starts the actor of a name."""

    def __init__(
        self, arguments: Sequence[Any], resources: Resources, kind: type = Replica
    ) -> None:
        self._arguments, self._resources, self._kind = arguments, resources, kind

    def __call__(self, name: str, reply: Reply) -> ActorChannel:
        """The replica of a name, for one connection."""
        actor = _running_ray().remote(self._kind)
        options = actor.options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",  # outlives the ingress, and its driver
            num_cpus=self._resources.num_cpus,
            num_gpus=self._resources.num_gpus,
            max_restarts=0,  # in its place another one is started: Ray's own takes seconds to tell
            scheduling_strategy="SPREAD",
        )
        return ActorChannel(options.remote(*self._arguments), reply)


class ActorChannel:
    """Messages to one actor, as one of its ingresses."""

    def __init__(self, actor: Any, reply: Reply) -> None:
        self._actor, self._reply, self._ingress = actor, reply, uuid.uuid4().hex

    def connect(self) -> None:
        """Ask for the description."""
        self._send(self._actor.connect)

    def tell(self, number: int, commands: Sequence[Command]) -> None:
        """Send commands."""
        self._send(self._actor.tell, number, commands)

    def ask(self) -> None:
        """Ask for updates."""
        self._send(self._actor.updates)

    def kill(self) -> None:
        """End the actor."""
        with contextlib.suppress(Exception):  # it has ended, or its cluster has
            _running_ray().kill(self._actor)

    def leave(self) -> None:
        """Leave the actor."""
        with contextlib.suppress(Exception):  # as above
            ray = _running_ray()
            if not ray.get(self._actor.leave.remote(self._ingress), timeout=_LEAVE_SECONDS):
                ray.kill(self._actor)

    def _send(self, method: Any, *arguments: Any) -> None:
        """Call a method of the actor, whose result is the reply, if it has one."""

        def done(future: Any) -> None:
            error = future.exception()
            result = _as_error(error) if error is not None else future.result()
            if result is not None:
                self._reply(result)

        try:
            _running_ray()
            answer = method.remote(self._ingress, *arguments)
        except Exception as error:  # as at the end of the program
            self._reply(_as_error(error))
        else:
            answer.future().add_done_callback(done)


def _as_error(error: BaseException) -> Exception:
    if isinstance(error, ForethoughtError):
        return error
    cause = getattr(error, "cause", None)
    if isinstance(cause, ForethoughtError):
        return cause
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return EngineStopped("the replica died", lines[0])


def check_ray() -> None:
    """Raises DependencyError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise DependencyError.missing("ray", "replicas", "ray")


def _running_ray() -> Any:
    """Raises EngineStopped at the end of the program: Ray would start anew with the next call."""
    ray = _ray()
    if not ray.is_initialized():
        raise EngineStopped("Ray has been shut down", "", "Open the model again")
    return ray


def _ray() -> Any:
    check_ray()
    import ray

    return ray
