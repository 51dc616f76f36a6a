"""Serve a model over HTTP, with all methods: OpenAI's API, and a page at /.

Without a model: the embedded reasoner. Point any OpenAI client at http://127.0.0.1:8000/v1; a
method is chosen by the name of the model, as in majority_vote@8-reasoner, or by the field method.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from forethought import assets
from forethought.cli import options
from forethought.errors import DependencyError, ParameterError

if TYPE_CHECKING:
    from forethought.server.backends import Backend
    from forethought.server.settings import Settings

_EXAMPLES = 6
_METHODS = ("plain", "dynasor", "majority_vote")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "model_name",
        nargs="?",
        metavar="MODEL",
        help="local directory, Hub id or embedded model (default: the embedded reasoner)",
    )
    options.add_model_options(parser)
    parser.add_argument(
        "--reward-model",
        metavar="DIR",
        help="scores answers for best_of_n and searches; none: without one (default: for the "
        "embedded reasoner its own, else none)",
    )
    backends = parser.add_argument_group("instead of a model")
    backends.add_argument(
        "--upstream",
        metavar="URL[,URL]",
        help="base URLs of OpenAI-compatible servers, as in http://host:8000/v1; their key is read "
        "from OPENAI_API_KEY",
    )
    backends.add_argument("--api-model", metavar="NAME", help="name of the model there")
    backends.add_argument(
        "--worker",
        nargs=2,
        metavar=("scripted", "FILE"),
        help="answer from a script (JSON or YAML), to test clients without a model",
    )
    server = parser.add_argument_group("the server")
    server.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    server.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any free one")
    server.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="require one of these keys (again for more); FORETHOUGHT_API_KEYS holds them too, "
        "with commas between",
    )
    server.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="names for clients"
    )
    server.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN")
    server.add_argument("--max-running", type=int, metavar="N", help="requests at once")
    server.add_argument("--max-waiting", type=int, metavar="N", help="requests in the queue")
    server.add_argument("--timeout", type=float, metavar="S", help="seconds for a request")
    server.add_argument("--drain-seconds", type=float, metavar="S", help="to finish at the end")
    server.add_argument("--max-body-bytes", type=int, metavar="N", help="of a request")
    server.add_argument(
        "--stream-interval", type=float, metavar="S", help="in which new tokens are gathered"
    )
    server.add_argument(
        "--reasoning-in-content",
        action="store_true",
        default=None,
        help="leave thoughts in the content, with their markers",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until the process is told to end."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise DependencyError.missing(error.name or "fastapi", "serve", "server") from error
    from forethought.server.app import create_app
    from forethought.server.runner import serve

    settings = settings_of(args)
    if not 0 <= args.port < 1 << 16:
        raise ParameterError("invalid --port", f"got {args.port}", "Give 0 to 65535")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with ExitStack() as opened:
        backend = opener(args)()
        opened.callback(backend.close)
        app = create_app(backend, settings)
        return serve(
            app, args.host, args.port, settings.drain_seconds, _announce(settings, backend)
        )


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the options stand for.

    Raises:
        ParameterError: a value outside its range.
    """
    from forethought.server.settings import Settings

    keys = [*args.api_key, *filter(None, os.environ.get("FORETHOUGHT_API_KEYS", "").split(","))]
    names = (
        "max_running",
        "max_waiting",
        "timeout",
        "drain_seconds",
        "max_body_bytes",
        "stream_interval",
        "reasoning_in_content",
    )
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return Settings(
        served_model_names=args.served_model_name,
        api_keys=keys,
        cors_origins=args.cors_origin,
        **given,
    )


def opener(args: argparse.Namespace) -> Callable[[], Backend]:
    """A function that opens what the options choose.

    Raises:
        UsageError: options that contradict each other.
    """
    if args.model_name is not None:
        if args.model is not None:
            raise ParameterError("the model is given twice", "as MODEL and as --model", "Once")
        args.model = options.model_path(args.model_name)
    chosen = [args.upstream is not None, args.worker is not None, options.has_model_options(args)]
    if sum(chosen) > 1:
        raise ParameterError(
            "contradictory options",
            "a model on this machine, --upstream and --worker exclude each other",
            "Give one of them",
        )
    if args.worker is not None:
        return _scripted(args.worker)
    if args.upstream is not None:
        return _upstream(args.upstream, args.api_model)
    if args.api_model is not None:
        raise ParameterError("--api-model needs --upstream", "it names a model there", "")
    return _engine(args)


def _scripted(given: Sequence[str]) -> Callable[[], Backend]:
    kind, path = given
    if kind != "scripted":
        raise ParameterError(f"unknown worker {kind!r}", "there is scripted", "--worker scripted F")
    from forethought.server.backends import ScriptedBackend, read_script

    script = read_script(Path(path))
    return lambda: ScriptedBackend(script)


def _upstream(urls: str, name: str | None) -> Callable[[], Backend]:
    if not name:
        raise ParameterError("--upstream needs --api-model", "the name of the model there", "")
    try:
        from openai import AsyncOpenAI
    except ModuleNotFoundError as error:
        raise DependencyError.missing("openai", "--upstream", "openai") from error
    from forethought.scaffolding.workers.openai import OpenaiWorker
    from forethought.server.backends import RemoteBackend

    client = AsyncOpenAI(base_url=urls, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    return lambda: RemoteBackend(OpenaiWorker(client, name), name)


def _engine(args: argparse.Namespace) -> Callable[[], Backend]:
    fields = options.llm_args_of(args)
    open_llm = options.llm_opener(fields)
    is_reasoner = options.is_reasoner(fields)
    reward = args.reward_model or (assets.PREFIX + "prm" if is_reasoner else "none")

    def open_backend() -> Backend:
        from forethought.scaffolding.workers.reward import RewardWorker
        from forethought.server.backends import EngineBackend

        judge = None if reward == "none" else RewardWorker(reward)
        try:
            llm = open_llm()
        except BaseException:
            if judge is not None:
                judge.shutdown()
            raise
        name = str(fields.get("model") or assets.REASONER)
        return EngineBackend(llm, _label(name), judge=judge, examples=_examples(name))

    return open_backend


def _label(model: str) -> str:
    """The name of a model for clients: that of its directory, or of the Hub without the owner."""
    return Path(model).name or model


def _examples(model: str) -> list[dict[str, str]]:
    """Questions of an embedded model's own problems; none for others."""
    if not assets.is_embedded(model):
        return []
    found = assets.problems(model)[:_EXAMPLES]
    return [
        {
            "title": _title(problem["question"]),
            "prompt": problem["question"],
            "method": _METHODS[number % len(_METHODS)],
        }
        for number, problem in enumerate(found)
    ]


def _title(question: str) -> str:
    words = question.split()
    return question if len(words) <= 8 else " ".join(words[:8]) + " …"


def _announce(settings: Settings, backend: Backend) -> Callable[[str], None]:
    """Writes where the server is, once it is."""
    name = (list(settings.served_model_names) or [backend.name])[0]

    def announce(url: str) -> None:
        print(f"{name}: {url} (the page), {url}/v1 (OpenAI's API)", file=sys.stderr, flush=True)

    return announce
