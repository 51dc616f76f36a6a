"""``Settings``: how the server is run, beside its model."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from forethought import methods
from forethought.errors import ParameterError
from forethought.saved_file import check_folder
from forethought.scaffolding.settings import NON_NEGATIVE_INT, POSITIVE_INT, SECONDS, validated
from forethought.workers.routing import url_error

DEFAULT_MAX_GENERATIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and switches of one server.

    ===========================  ===================================================================
    ``served_model_names``       names that clients give; empty: the model's own
    ``allowed_methods``          what clients may name as methods beside those that are shipped:
                                 plug-ins, or ``"module:Name"``
    ``api_keys``                 of which each request must show one; empty: none is needed
    ``max_running``              requests that run at once; further ones wait
    ``max_waiting``              requests that wait; further ones are refused with status 429
    ``timeout``                  seconds that one request may take, waiting included; None: any
    ``drain_seconds``            at the end, how long running requests may take to finish
    ``max_body_bytes``           of a request; a larger one is refused with status 413
    ``max_body_values``          JSON values in it; more are refused with status 400
    ``receive_seconds``          that a request may take to arrive, its headers and its body each
    ``max_choices``              answers to one request: ``n`` times the methods joined by ``|``
    ``max_generations``          that the methods of one request may begin: the product of all their
                                 samples, branches and steps; more are refused with status 400
    ``stream_interval``          seconds in which new tokens of a stream are gathered; 0: none
    ``lists_methods``            list each method in front of a model as a model
    ``reasoning_in_content``     leave a thought in the content, with its markers
    ``allowed_hosts``            names in the header ``Host`` that are answered, beside those of
                                 this machine alone; empty: any
    ``cors_origins``             origins whose pages may call the server; empty: none but its own
    ``max_stored``               responses that are kept, shared equally by the keys; of a key's,
                                 the oldest finished one makes room
    ``max_stored_bytes``         memory that they take, roughly, shared in the same way
    ``store_seconds``            how long a finished response is kept
    ``response_dir``             folder of the files of responses, from which a server goes on where
                                 one has died; None: they are in memory alone
    ``mcp_servers``              URLs and commands of MCP servers, whose tools clients of the server
                                 may list and call
    ``otlp_endpoint``            collector that gets the spans of requests; None: none does
    ===========================  ===================================================================

    Raises:
        ParameterError: a value outside its range, or an empty name, key or origin.
        UsageError: a method that there is not, or that cannot be imported; a folder that cannot be
            written to.
    """

    served_model_names: Sequence[str] = ()
    allowed_methods: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    max_running: int = 64
    max_waiting: int = 256
    timeout: float | None = None
    drain_seconds: float = 30.0
    max_body_bytes: int = 8 * 2**20
    max_body_values: int = 1 << 18
    receive_seconds: float = 60.0
    max_choices: int = 128
    max_generations: int = DEFAULT_MAX_GENERATIONS
    stream_interval: float = 0.05
    lists_methods: bool = False
    reasoning_in_content: bool = False
    allowed_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    max_stored: int = 1000
    max_stored_bytes: int = 256 * 2**20
    store_seconds: float = 3600.0
    response_dir: str | None = None
    mcp_servers: Sequence[str] = ()
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        counts = (
            *("max_running", "max_body_bytes", "max_choices", "max_generations"),
            "max_body_values",
            *("max_stored", "max_stored_bytes"),
        )
        for name in counts:
            validated(name, getattr(self, name), POSITIVE_INT)
        validated("max_waiting", self.max_waiting, NON_NEGATIVE_INT)
        if self.timeout is not None:
            validated("timeout", self.timeout, SECONDS)
        for name in ("drain_seconds", "store_seconds", "receive_seconds"):
            validated(name, getattr(self, name), SECONDS)
        validated("stream_interval", self.stream_interval, TypeAdapter(float))
        if not 0 <= self.stream_interval <= 1:
            raise ParameterError(
                "invalid stream_interval",
                f"got {self.stream_interval}",
                "Give seconds between 0 and 1",
            )
        if self.otlp_endpoint is not None and (reason := url_error(self.otlp_endpoint)):
            raise ParameterError(
                "invalid otlp_endpoint", reason, "Write it as in http://127.0.0.1:4318"
            )
        if self.response_dir is not None:
            _check_response_dir(Path(self.response_dir))
        for name in (
            "served_model_names",
            "allowed_methods",
            "api_keys",
            "cors_origins",
            "allowed_hosts",
            "mcp_servers",
        ):
            if any(not text.strip() for text in getattr(self, name)):
                raise ParameterError(f"invalid {name}", "one of them is empty", "Leave it out")
        methods.closed(self.allowed_methods)


def _check_response_dir(folder: Path) -> None:
    if importlib.util.find_spec("fcntl") is None:
        why = "this system has no locks of files"
        raise ParameterError("response_dir is not possible here", why, "Leave it out")
    check_folder(folder)
