"""Serve a model over HTTP, with all methods: the APIs of OpenAI, Anthropic and ollama, a page at /.

Without a model: the embedded reasoner. Point any OpenAI client at http://127.0.0.1:8000/v1; a
method is chosen by the name of the model, as in majority_vote@8-reasoner, or by the field method.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought import assets
from forethought.cli import options, serve_options
from forethought.cli.judge import REWARD_SERVER, check_reward_model, reward_server_opener
from forethought.cli.serve_options import HOST, PORT
from forethought.errors import DependencyError, ParameterError, UsageError
from forethought.model_dir import find_model_dir

if TYPE_CHECKING:
    from forethought.cluster.link import Link
    from forethought.llm.async_llm import AsyncLLM
    from forethought.llm.tokenizer import Tokenizer
    from forethought.server.backends.backend import Backend
    from forethought.server.settings import Settings
    from forethought.workers.reward import RewardWorker
    from forethought.workers.reward_server import RewardServerWorker
    from forethought.workers.upstream import UpstreamWorker

_SECTION = "server"
"""Of the file of ``--config``: settings of the server."""
_LISTS = {
    "served_model_name": "served_model_names",
    "allow_method": "allowed_methods",
    "api_key": "api_keys",
    "cors_origin": "cors_origins",
    "allowed_host": "allowed_hosts",
    "mcp": "mcp_servers",
}
"""Options that may be given more than once, and the settings that they are."""
_SETTINGS = (
    "max_running",
    "max_waiting",
    "timeout",
    "drain_seconds",
    "max_body_bytes",
    "max_generations",
    "stream_interval",
    "lists_methods",
    "reasoning_in_content",
    "response_dir",
    "otlp_endpoint",
)
"""Options that are settings."""
_FILE_ONLY = (
    "max_body_values",
    "receive_seconds",
    "max_choices",
    "max_stored",
    "max_stored_bytes",
    "store_seconds",
)
"""Settings without an option."""
_OF_UPSTREAM = ("api_model", "tokenizer", "thinking_field", "thinks", "upstream_fields")
"""Options that belong to ``--upstream``."""
_JOINED = ("upstream", "upstream_fields")
"""Options of several values with commas between; lists in the file of ``--config``."""
_TEXTS = (
    *("host", "reward_model", "reward_url", *REWARD_SERVER, "upstream", *_OF_UPSTREAM),
    *("generation_config", "ray_address", "response_dir"),
)
_NUMBERS = ("port", "replicas", "prefill_replicas")
_FLAGS = ("no_rebalance",)
_SHAPE = "response_format"
_CONTINUES = "continue_final_message"
_HTTP_CLIENTS = ("httpx", "httpx2")
"""Loggers of versions of ``openai``, with a line for each request to another server."""
_EXAMPLES = 6
_METHODS = ("plain", "dynasor", "majority_vote")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    serve_options.add_model(parser)
    serve_options.add_replicas(parser.add_argument_group("replicas of the model, on Ray"))
    serve_options.add_backends(parser.add_argument_group("instead of a model"))
    server = parser.add_argument_group("the server")
    serve_options.add_clients(server)
    serve_options.add_limits(server)


def run(args: argparse.Namespace) -> int:
    """Serve until the process gets a signal to end."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise DependencyError.missing(error.name or "fastapi", "serve", "server") from error
    from forethought.server.app import create_app
    from forethought.server.runner import LogHandler, bind, serve

    config = read_config(args)
    settings = settings_of(args)
    check_tools(settings)
    host, port = address(args)
    line = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, handlers=[LogHandler(sys.stderr)])
    for name in _HTTP_CLIENTS:
        logging.getLogger(name).setLevel(logging.WARNING)
    with ExitStack() as opened:
        bound = opened.enter_context(bind(host, port))
        backend = opener(args, config)()
        opened.callback(backend.close)
        app = create_app(backend, settings)
        return serve(app, bound, settings.drain_seconds, _announce(settings, backend))


def address(args: argparse.Namespace) -> tuple[str, int]:
    """Host and port to listen at; raises ParameterError if there is no such port."""
    port = PORT if args.port is None else args.port
    if not 0 <= port < 1 << 16:
        raise ParameterError("invalid port", f"got {port}", "Give 0 to 65535")
    return args.host or HOST, port


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The fields for the engine in the file of ``--config``.

    What its section ``server`` sets, and no option does, becomes an attribute of ``args``.

    Raises:
        UsageError: an unreadable file, or an unknown field or wrong type in the section.
    """
    fields = {} if args.config is None else options.load_config_file(args.config)
    section = fields.pop(_SECTION, None) or {}
    if not isinstance(section, dict):
        raise ParameterError(
            f"invalid section {_SECTION}", f"it holds {section!r:.80}", "Write fields by name"
        )
    names = (*_NUMBERS, *_FLAGS, *_TEXTS, *_LISTS, *_SETTINGS, *_FILE_ONLY)
    if unknown := section.keys() - set(names):
        raise ParameterError.unknown(f"the section {_SECTION} of {args.config}", unknown, names)
    for name, value in section.items():
        if value is not None and getattr(args, name, None) is None:
            setattr(args, name, _of_section(name, value))
    return fields


def check_tools(settings: Settings) -> None:
    """Connect to the MCP servers once; raises UsageError if one cannot be reached, or no request
    could offer their tools to a model.
    """
    if not settings.mcp_servers:
        return
    from pydantic import TypeAdapter, ValidationError

    from forethought.server.protocol.chat_request import ToolList
    from forethought.workers.mcp import MCPWorker

    async def tools() -> list[dict[str, Any]]:
        worker = MCPWorker(settings.mcp_servers)
        try:
            return await worker.list_tools()
        finally:
            await worker.async_shutdown()

    try:
        TypeAdapter(ToolList).validate_python(asyncio.run(tools()))
    except ValidationError as error:
        complaint = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, complaint['loc']))} {complaint['msg']}".strip()
        fix = "Start its server with other tools, or leave it out"
        raise UsageError("the tools of the MCP servers fit in no request", why, fix) from None


def _of_section(name: str, value: Any) -> Any:
    """A value in the section ``server``, as the option has it."""
    texts = [value] if isinstance(value, str) else value
    if name in _LISTS or name in _JOINED:
        is_valid = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
        value = texts if name in _LISTS or not is_valid else ",".join(texts)
    elif name in _TEXTS:
        is_valid = isinstance(value, str)
    elif name in (*_NUMBERS, *_FLAGS, "lists_methods", "reasoning_in_content"):
        is_valid = type(value) is (int if name in _NUMBERS else bool)
    else:
        is_valid = True  # ``Settings`` checks it
    if not is_valid:
        raise ParameterError(
            f"invalid {name} in the section {_SECTION}", f"got {value!r:.80}", "See its option"
        )
    return value


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the options stand for; raises ParameterError for a value outside its
    range.
    """
    from forethought.server.hosts import is_loopback
    from forethought.server.settings import Settings

    environment = filter(None, os.environ.get("FORETHOUGHT_API_KEYS", "").split(","))
    fields = {name: getattr(args, name, None) for name in (*_SETTINGS, *_FILE_ONLY)}
    fields |= {name: getattr(args, option) for option, name in _LISTS.items()}
    fields["api_keys"] = [*(args.api_key or ()), *environment]
    if args.allowed_host is None and is_loopback(address(args)[0]):
        fields["allowed_hosts"] = [address(args)[0]]
    return Settings(**{name: value for name, value in fields.items() if value is not None})


def opener(
    args: argparse.Namespace, config: Mapping[str, Any] | None = None
) -> Callable[[], Backend]:
    """A function that opens what the options choose; raises UsageError if they contradict each
    other.

    ``config`` has fields for the engine, in place of those in the file of ``--config``.
    """
    shared = () if args.upstream is None else ("tool_format",)
    has_model = options.has_model_options(args, config, left_out=shared)
    has_model |= args.kv_events_config is not None
    chosen = [args.upstream is not None, args.worker is not None, has_model]
    if sum(chosen) > 1:
        raise ParameterError(
            "contradictory options",
            "a model on this machine, --upstream and --worker exclude each other",
            "Give one of them",
        )
    if not has_engine(args) and args.generation_config is not None:
        why = "another server, or a script, answers with its own"
        raise ParameterError("--generation-config needs a model on this machine", why, "")
    if args.replicas is None and args.ray_address is not None:
        why = "it is where these run"
        raise ParameterError("--ray-address needs --replicas", why, "Give how many")
    if args.replicas is None and args.prefill_replicas is not None:
        why = "it is how many of these compute prompts for the others"
        raise ParameterError("--prefill-replicas needs --replicas", why, "Give how many in all")
    if args.replicas is None and args.no_rebalance:
        why = "there is one engine"
        raise ParameterError("--no-rebalance needs --replicas", why, "Leave it out")
    if args.replicas is not None and not has_engine(args):
        why = "another server, or a script, answers"
        raise ParameterError("--replicas are of a model", why, "Leave it out")
    if args.worker is not None:
        _refuse_judge(args)
        return _scripted(args.worker)
    if args.upstream is not None:
        return _upstream(args)
    for name in _OF_UPSTREAM:
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ParameterError(f"{option} needs --upstream", "it is about the servers there", "")
    return _engine(args, config)


def has_engine(args: argparse.Namespace) -> bool:
    """Whether a model on this machine answers."""
    return args.upstream is None and args.worker is None


def _refuse_judge(args: argparse.Namespace) -> None:
    for name in ("reward_model", "reward_url"):
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ParameterError(
                f"{option} has nothing to score", "a script's answers are given", "Leave it out"
            )


def _judge_opener(
    args: argparse.Namespace, default: str = "none"
) -> Callable[[], RewardWorker | RewardServerWorker | None]:
    """A function that opens the reward model that the options choose, or ``default``."""
    if (open_server := reward_server_opener(args)) is not None:
        return open_server
    model = args.reward_model or default
    check_reward_model(None if model == "none" else model)

    def open_local() -> RewardWorker | None:
        if model == "none":
            return None
        try:
            from forethought.workers.reward import RewardWorker
        except ModuleNotFoundError as error:
            missing = error.name or "torch"
            raise DependencyError.missing(missing, "--reward-model", "local") from error
        return RewardWorker(model)

    return open_local


def _scripted(words: Sequence[str]) -> Callable[[], Backend]:
    kind, path = words
    if kind != "scripted":
        raise ParameterError(f"unknown worker {kind!r}", "there is scripted", "--worker scripted F")
    from forethought.server.backends.scripted_backend import ScriptedBackend, read_script

    script = read_script(Path(path))
    return lambda: ScriptedBackend(script)


def _upstream(args: argparse.Namespace) -> Callable[[], Backend]:
    from forethought.server.backends.remote_backend import RemoteBackend
    from forethought.workers.upstream import UpstreamWorker

    name: str | None = args.api_model
    fields = _upstream_fields(args.upstream_fields)
    worker = UpstreamWorker(
        [url.strip() for url in args.upstream.split(",")],
        name or "",
        api_key=os.environ.get("OPENAI_API_KEY"),
        extensions=[name for name in fields if name != _CONTINUES],
        continues_chats=_CONTINUES in fields,
        thinking_field=args.thinking_field,
        thinks=options.thinks_of(args),
    )

    open_judge = _judge_opener(args)
    if args.tool_format is not None and args.tokenizer is None:
        why = "the upstream server reads the calls of chats without one"
        raise ParameterError("--tool-format needs --tokenizer", why, "Give it, or leave both out")
    if args.tokenizer is not None:
        find_model_dir(args.tokenizer, weights=False)

    def open_backend() -> Backend:
        tokenizer = None if args.tokenizer is None else _tokenizer(args.tokenizer)
        if name is None:
            worker.model = asyncio.run(_first_model(worker))
        elif tokenizer is not None:
            asyncio.run(_ask_lengths(worker))
        return RemoteBackend(
            worker,
            worker.model,
            tokenizer=tokenizer,
            judge=open_judge(),
            tool_format=args.tool_format,
        )

    return open_backend


def _tokenizer(name: str) -> Tokenizer:
    """The tokenizer in a local directory, of the Hub or of an embedded model.

    Raises UsageError if there is none or it has no chat template, DependencyError without
    ``transformers``.
    """
    try:
        from forethought.llm.tokenizer import Tokenizer
    except ModuleNotFoundError as error:
        raise DependencyError.missing(
            error.name or "transformers", "--tokenizer", "local"
        ) from error
    tokenizer = Tokenizer.load(find_model_dir(name, weights=False))
    if not tokenizer.hf.chat_template:
        why = "it makes the prompts of conversations"
        raise ParameterError(f"--tokenizer {name} has no chat template", why, "Name another one")
    return tokenizer


def _upstream_fields(fields: str | None) -> list[str]:
    """The extensions of ``OpenaiWorker`` in ``--upstream-fields``, and whether chats go on;
    ParameterError for others.
    """
    from forethought.workers.openai import EXTENSIONS

    extension_names = {_CONTINUES: _CONTINUES}
    extension_names |= {_SHAPE if name == "guided_decoding" else name: name for name in EXTENSIONS}
    named = [name.strip() for name in fields.split(",")] if fields else []
    if unknown := set(named) - extension_names.keys():
        raise ParameterError.unknown("--upstream-fields", unknown, extension_names)
    return [extension_names[name] for name in named]


async def _ask_lengths(worker: UpstreamWorker) -> None:
    """Have the worker ask for the contexts of the models, if the servers are up already."""
    try:
        await worker.upstream.ask_lengths()
    finally:
        await worker.async_shutdown()


async def _first_model(worker: UpstreamWorker) -> str:
    try:
        models = await worker.upstream.models()
    finally:
        await worker.async_shutdown()
    if not models:
        raise ParameterError("no model at --upstream", "none is listed", "Give --api-model")
    return models[0]


def _engine(args: argparse.Namespace, config: Mapping[str, Any] | None) -> Callable[[], Backend]:
    if args.kv_events_config is not None:
        file = options.load_config_file(args.config) if config is None and args.config else config
        config = {**(file or {}), "kv_events_config": args.kv_events_config}
    fields = options.llm_args_of(args, config)
    is_reasoner = assets.is_reasoner(fields.get("model"))
    open_judge = _judge_opener(args, assets.PREFIX + "prm" if is_reasoner else "none")
    open_llm = options.llm_opener(fields)
    if args.replicas is not None:
        open_llm = _replicas_opener(fields, args)
    uses_model_sampling = options.uses_model_sampling(args)

    def open_backend() -> Backend:
        from forethought.server.backends.engine_backend import EngineBackend

        judge = open_judge()
        try:
            llm = open_llm()
        except BaseException:
            if judge is not None:
                judge.shutdown()
            raise
        name = str(fields.get("model") or assets.REASONER)
        return EngineBackend(
            llm,
            _label(name),
            judge=judge,
            examples=_examples(name),
            uses_model_sampling=uses_model_sampling,
            replicas=_replicas(llm) if args.replicas is not None else (),
        )

    return open_backend


def _replicas_opener(fields: Mapping[str, Any], args: argparse.Namespace) -> Callable[[], AsyncLLM]:
    """A function that opens replicas; raises UsageError for options that they cannot honour."""
    from forethought.cluster.worker import check_replicas, open_llm

    num_prefill = args.prefill_replicas or 0
    check_replicas(fields, args.replicas, num_prefill)
    return lambda: open_llm(
        replicas=args.replicas,
        prefill_replicas=num_prefill,
        ray_address=args.ray_address,
        rebalance=not args.no_rebalance,
        **fields,
    )


def _replicas(llm: AsyncLLM) -> Sequence[Link]:
    from forethought.cluster.worker import links_of

    return links_of(llm)


def _label(model: str) -> str:
    """The name of a model for clients: that of its directory, or of the Hub without the owner."""
    return Path(model).name or model


def _examples(model: str) -> list[dict[str, str]]:
    """Questions of an embedded model's own problems; none for others."""
    if not assets.is_embedded(model):
        return []
    problems = assets.problems(model)[:_EXAMPLES]
    return [
        {
            "title": _title(problem["question"]),
            "prompt": problem["question"],
            "method": _METHODS[number % len(_METHODS)],
        }
        for number, problem in enumerate(problems)
    ]


def _title(question: str) -> str:
    words = question.split()
    return question if len(words) <= 8 else " ".join(words[:8]) + " …"


def _announce(settings: Settings, backend: Backend) -> Callable[[str], None]:
    name = (list(settings.served_model_names) or [backend.name])[0]

    def announce(url: str) -> None:
        print(f"{name}: {url} (the page), {url}/v1 (OpenAI's API)", file=sys.stderr, flush=True)

    return announce
