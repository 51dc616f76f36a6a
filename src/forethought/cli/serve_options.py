"""The options of ``forethought serve``, group by group."""

from __future__ import annotations

import argparse
from typing import Any

from forethought.cli import options
from forethought.cli.judge import add_reward_server_options
from forethought.strict_json import read_json

HOST, PORT = "127.0.0.1", 8000
"""Where a server listens by default."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model, and what judges its answers."""
    options.add_model_argument(parser)
    options.add_model_options(parser)
    options.add_adapter_option(parser, "clients name it as model BASE:NAME (again for more)")
    parser.add_argument(
        "--kv-events-config",
        type=_json_object,
        metavar="JSON",
        help="publish what the prefix cache gains and loses over ZMQ, for routers, in vLLM's form: "
        """'{"endpoint": "tcp://*:5557"}'""",
    )
    parser.add_argument(
        "--reward-model",
        metavar="DIR",
        help="scores answers for best_of_n and searches; none: without one (default: for the "
        "embedded reasoner its own, else none)",
    )
    add_reward_server_options(parser)


def _json_object(text: str) -> dict[str, Any]:
    """An option that is a JSON object."""
    try:
        value = read_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("it is no JSON object")
    return value


def add_replicas(replicas: argparse._ArgumentGroup) -> None:
    """The same model in several processes."""
    replicas.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="have N processes compute, here or on the machines of a cluster of Ray; where one "
        "dies, its requests go on in another one; with --tensor-parallel-size T, each is T of them",
    )
    replicas.add_argument(
        "--prefill-replicas",
        type=int,
        metavar="M",
        help="M of the N replicas compute long prompts for the others, which generate "
        "(disaggregated prefill): long prompts then hold up no stream; short ones, and those that "
        "the others have cached, are not sent over (default: 0)",
    )
    replicas.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="of the cluster's head, as in 10.0.0.1:6379; auto: the one that runs on this machine "
        "(default: Ray is started here, with the server)",
    )
    replicas.add_argument(
        "--no-rebalance",
        action="store_true",
        default=None,
        help="leave sequences in a replica that has much more to do than another one",
    )


def add_backends(backends: argparse._ArgumentGroup) -> None:
    """What answers in place of a model."""
    backends.add_argument(
        "--upstream",
        metavar="URL[,URL]",
        help="base URLs of OpenAI-compatible servers, as in http://host:8000/v1; their key is read "
        "from OPENAI_API_KEY",
    )
    backends.add_argument(
        "--api-model", metavar="NAME", help="of the model there (default: the first they list)"
    )
    backends.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="tokenizer of the model there, with its chat template: a local directory or a Hub id. "
        "Needed for methods that continue their own text, such as dynasor; needs transformers",
    )
    backends.add_argument(
        "--thinking-field",
        metavar="NAME",
        help="that server's own field for a thinking budget (vLLM: thinking_token_budget)",
    )
    options.add_thinks_option(backends)
    backends.add_argument(
        "--upstream-fields",
        metavar="NAME[,NAME]",
        help="fields beyond OpenAI's API that it takes, such as top_k and min_p; response_format: "
        "in completions, too; continue_final_message: in chats, which go on with it where their "
        "server dies",
    )
    backends.add_argument(
        "--worker",
        nargs=2,
        metavar=("scripted", "FILE"),
        help="answer from a script (JSON or YAML), to test clients without a model",
    )


def add_clients(server: argparse._ArgumentGroup) -> None:
    """Where it listens, who may use it, and what clients see."""
    server.add_argument("--host", help=f"default: {HOST}, this machine only")
    server.add_argument("--port", type=int, help=f"default: {PORT}; 0: any free one")
    server.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="require one of these keys (again for more); FORETHOUGHT_API_KEYS holds them too, "
        "with commas between",
    )
    server.add_argument(
        "--allow-method",
        action="append",
        metavar="NAME",
        help="let clients name this method, too (again for more): a plug-in, or module:Name; it "
        "runs in this process",
    )
    server.add_argument(
        "--mcp",
        action="append",
        metavar="SERVER",
        help="let clients list and call the tools of this MCP server, as the page does: a URL, or "
        "a command that starts it (again for more)",
    )
    server.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names for clients (default: the last part of the model's)",
    )
    options.add_generation_config_option(server)
    server.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="let pages of this origin call the server (again for more; default: none)",
    )
    server.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="answer to this name in the header Host, as a proxy may pass it on (again for more; "
        "*.example.com: any below it, *: any). Default: where --host is of this machine alone, "
        "its own names; else any",
    )
    server.add_argument(
        "--list-methods",
        action="store_true",
        default=None,
        dest="lists_methods",
        help="list each method in front of the model as a model, for clients that choose from a "
        "list",
    )
    server.add_argument(
        "--reasoning-in-content",
        action="store_true",
        default=None,
        help="leave thoughts in the content, with their markers",
    )


def add_limits(server: argparse._ArgumentGroup) -> None:
    """What a request may take, and who is told."""
    server.add_argument(
        "--max-running",
        type=int,
        metavar="N",
        help="requests at once; further ones wait (default: 64)",
    )
    server.add_argument(
        "--max-waiting",
        type=int,
        metavar="N",
        help="requests that wait; further ones get 429 (default: 256)",
    )
    server.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds for a request, waiting included (default: no limit)",
    )
    server.add_argument(
        "--drain-seconds",
        type=float,
        metavar="S",
        help="that running requests have to finish after SIGTERM (default: 30)",
    )
    server.add_argument(
        "--max-body-bytes", type=int, metavar="N", help="of a request (default: 8 MiB)"
    )
    server.add_argument(
        "--max-generations",
        type=int,
        metavar="N",
        help="that the methods of one request may begin: the product of their samples, branches "
        "and steps (default: 65536)",
    )
    server.add_argument(
        "--stream-interval",
        type=float,
        metavar="S",
        help="seconds between two chunks of a stream (default: 0.05)",
    )
    server.add_argument(
        "--response-dir",
        metavar="DIR",
        help="keep the responses of /v1/responses in files here, too, from which this server, or "
        "another one with this folder, goes on with them where one has died (default: in memory "
        "alone)",
    )
    server.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send the spans of requests to this OpenTelemetry collector, by OTLP over HTTP, as in "
        "http://127.0.0.1:4318",
    )
