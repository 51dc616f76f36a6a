"""The reward model of the commands: a ``Judge`` on this machine or on a server, and its options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forethought.errors import DependencyError, ParameterError
from forethought.evaluation.journal import fingerprint
from forethought.methods import Method
from forethought.methods.stack import parameters
from forethought.model_dir import checked_model_dir, find_model_dir
from forethought.rewards.prm_controller import PRMController, StepAggregation
from forethought.scaffolding.reward_controller import NativeRewardController
from forethought.scaffolding.worker import Worker
from forethought.workers.routing import shown_url, url_error

if TYPE_CHECKING:
    from forethought.workers.reward import RewardWorker
    from forethought.workers.reward_server import RewardServerWorker

_REWARD = "reward_controller"
REWARD_SERVER = ("reward_api_model", "reward_endpoint", "reward_tokenizer", "reward_step_format")
"""Options that belong to ``--reward-url``."""


@dataclass(frozen=True, slots=True)
class Judge:
    """A reward model that scores answers."""

    worker: RewardWorker | RewardServerWorker

    @property
    def controller(self) -> NativeRewardController:
        """Scores steps or whole answers, as the model was trained to."""
        by_step = self.worker.by_step
        return PRMController.of(self.worker) if by_step else NativeRewardController()

    def step_controller(self, aggregation: StepAggregation) -> NativeRewardController:
        """The same for a search, whose answers are scored before they are complete."""
        if not self.worker.by_step:
            return self.controller
        return PRMController.of(self.worker, aggregation=aggregation)

    @property
    def workers(self) -> dict[Any, Worker]:
        """By tag."""
        return {NativeRewardController.WorkerTag.REWARD: self.worker}


def judged_by(spec: str, controller: NativeRewardController | None) -> dict[str, Any]:
    """The setting that gives a stack of methods its judge; empty if it takes none."""
    return {_REWARD: controller} if controller is not None and _REWARD in parameters(spec) else {}


def is_judged(settings: Collection[str]) -> bool:
    """Whether these settings of a method include a judge."""
    return _REWARD in settings


def configure_judge(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose a reward model, on this machine or on a server."""
    parser.add_argument(
        "--reward-model",
        metavar="DIR",
        help="directory, or Hub id, of the reward model that scores for best_of_n; forethought/prm "
        "judges the steps of the embedded reasoner",
    )
    add_reward_server_options(parser)


def add_reward_server_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose a reward model on a server."""
    parser.add_argument(
        "--reward-url",
        metavar="URL",
        help="in place of --reward-model: base URL of a server of a reward model, such as vLLM's "
        "or SGLang's, as in http://host:8001/v1; its key is read from OPENAI_API_KEY",
    )
    parser.add_argument(
        "--reward-api-model", metavar="NAME", help="of the model there (default: the first listed)"
    )
    parser.add_argument(
        "--reward-endpoint",
        metavar="NAME",
        help="what scores a whole answer there: classify (default), or score, for models of pairs",
    )
    parser.add_argument(
        "--reward-tokenizer",
        metavar="DIR",
        help="tokenizer of the model there, a local directory or a Hub id, for steps, and for "
        "servers whose classify takes no messages",
    )
    parser.add_argument(
        "--reward-step-format",
        metavar="NAME",
        help="the model there scores steps, by pooling: chat, continuation, skywork or "
        "math_shepherd",
    )


def wants_judge(args: argparse.Namespace) -> bool:
    """Whether the options choose a reward model."""
    return args.reward_model is not None or args.reward_url is not None


def reward_server_opener(args: argparse.Namespace) -> Callable[[], RewardServerWorker] | None:
    """A function that opens the worker of ``--reward-url``; None: it is not given.

    Raises:
        ParameterError: options that contradict each other, or no URL.
        DependencyError: the client is not installed.
    """
    url = args.reward_url
    if url is None:
        for name in REWARD_SERVER:
            if getattr(args, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ParameterError(
                    f"{option} needs --reward-url", "it is about the server there", "Give both"
                )
        return None
    if args.reward_model is not None:
        raise ParameterError(
            "contradictory options",
            "--reward-model is on this machine, --reward-url elsewhere",
            "Give one of them",
        )
    if reason := url_error(url):
        raise ParameterError(
            f"invalid --reward-url {shown_url(url)!r}", reason, "Write it as in http://host:8001/v1"
        )
    try:
        from openai import AsyncOpenAI
    except ModuleNotFoundError as error:
        raise DependencyError.missing("openai", "--reward-url", "openai") from error
    from forethought.workers.reward_server import RewardServerWorker

    directory, step_format = args.reward_tokenizer, args.reward_step_format
    endpoint: Any = args.reward_endpoint or "classify"
    RewardServerWorker.check(endpoint, directory, step_format)
    if directory is not None:
        find_model_dir(directory, weights=False)

    def open_worker() -> RewardServerWorker:
        tokenizer = None if directory is None else reward_tokenizer(directory)
        client = AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
        return RewardServerWorker(
            client,
            args.reward_api_model,
            endpoint=endpoint,
            tokenizer=tokenizer,
            step_format=step_format,
        )

    return open_worker


def check_reward_model(model: str | None) -> None:
    """Find the directory of a reward model on this machine before torch is imported.

    Raises UsageError if there is no such model, or the directory holds none.
    """
    if model is not None:
        checked_model_dir(model, kind="reward model")


def reward_tokenizer(name: str) -> Any:
    """The tokenizer in a local directory or of the Hub.

    Raises UsageError if there is none, DependencyError if ``transformers`` is not installed.
    """
    try:
        from forethought.llm.tokenizer import Tokenizer
    except ModuleNotFoundError as error:
        missing = error.name or "transformers"
        raise DependencyError.missing(missing, "--reward-tokenizer", "local") from error
    return Tokenizer.load(find_model_dir(name, weights=False)).hf


def check_judge(
    args: argparse.Namespace, specs: Sequence[str], setting_names: Collection[str]
) -> None:
    """Raises ParameterError if a method needs a reward model and none is given, or none could use
    it.

    ``specs`` are the stacks of methods, ``setting_names`` those of the settings that are given.
    """
    reward_server_opener(args)
    judged = [spec for spec in specs if _REWARD in parameters(spec)]
    needing = [spec for spec in judged if parameters(spec)[_REWARD] is Method.REQUIRED]
    if needing and not wants_judge(args) and _REWARD not in setting_names:
        raise ParameterError(
            f"method {needing[0]} needs a reward model",
            "it chooses by its scores",
            "Give --reward-model DIR, or --reward-url URL",
        )
    if wants_judge(args) and not judged:
        option = "--reward-model" if args.reward_url is None else "--reward-url"
        raise ParameterError(
            f"{option} has nothing to score",
            f"{', '.join(specs)} does not choose by scores",
            "Leave it out, or use best_of_n",
        )


def judge_settings(args: argparse.Namespace) -> dict[str, Any] | None:
    """Identifies the reward model in a journal; None: there is none."""
    if args.reward_url is not None:
        options = {name: getattr(args, name) for name in REWARD_SERVER}
        return {"url": shown_url(args.reward_url), **{k: v for k, v in options.items() if v}}
    model = args.reward_model
    return None if model is None else {"model": model, "files": fingerprint(find_model_dir(model))}


@contextmanager
def open_judge(args: argparse.Namespace) -> Iterator[Judge | None]:
    """The reward model that the options choose, shut down at the end; None if they choose none.

    Raises UsageError if it cannot be opened.
    """
    if (open_server := reward_server_opener(args)) is not None:
        with open_server() as scorer:
            yield Judge(scorer)
        return
    if args.reward_model is None:
        yield None
        return
    with open_local_judge(args.reward_model) as judge:
        yield judge


@contextmanager
def open_local_judge(model: str) -> Iterator[Judge]:
    """The reward model in a local directory or of the Hub, shut down at the end.

    Raises UsageError if it cannot be opened.
    """
    try:
        from forethought.workers.reward import RewardWorker
    except ModuleNotFoundError as error:
        raise DependencyError.missing(error.name or "torch", "--reward-model", "local") from error
    with RewardWorker(model) as worker:
        yield Judge(worker)
