"""The controllers of one request: stacks of methods, one after the other, and several choices.

``Dispatch`` is the prototype of the server's one ``ScaffoldingLlm``: it runs the controller that a
request brings along. So all requests share workers, threads and the limit of running requests, and
all parts of a request share its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forethought import methods
from forethought.errors import BudgetExceeded, ParameterError
from forethought.methods import Method, MethodTable
from forethought.methods.stack import SAMPLES, StackedMethod, parameters, split, stack
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import Task
from forethought.scaffolding.controller import Controller, ConversationForm
from forethought.scaffolding.parallel import ParallelProcess, Process
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.server.method_settings import schema_of
from forethought.server.names import Composition

NUM_SAMPLES = 8
"""Samples of a method that would draw a single one, as on the command line."""
_INNER, _REWARD, _STREAMING = "generation_controller", "reward_controller", "streaming"

Asking = Callable[[str], Any]
"""The prompt of the same conversation with another text as its last question."""


class Dispatch(Controller):
    """Runs the controller that is given with the request."""

    def generate(self, prompt: Any, *, controller: Controller, **kwargs: Any) -> Process:  # type: ignore[override]
        """Let ``controller``, which was made for this request, answer ``prompt``."""
        return (yield from controller.generate(prompt, **kwargs))


class Pipeline(Controller):
    """Methods one after the other: each gets the answer of the one before it as its question.

    Only the last one streams to the caller; the others run in branches. Where the budget ends
    before a method has a text, the answer is that of the method before it.

    Args:
        asking: makes the prompts of all but the first.
        visible: the part of a text that is its answer, without a thought.
    """

    def __init__(
        self, controllers: Sequence[Controller], asking: Asking, visible: Callable[[str], str]
    ) -> None:
        super().__init__()
        self.controllers, self._asking, self._visible = list(controllers), asking, visible

    def generate(self, prompt: Any, **kwargs: Any) -> Process:
        """Run them; raises BudgetExceeded if the budget is spent before the first one has a
        text.
        """
        result: Any = None
        try:
            for controller in self.controllers[:-1]:
                running = ParallelProcess([_Answering(controller, prompt, kwargs)], [[]])
                yield running
                result = running.branches[0].result
                answer = self._visible(_text(result))
                prompt, kwargs = self._asking(answer), {**kwargs, "question": answer}
            return (yield from self.controllers[-1].generate(prompt, **kwargs))
        except BudgetExceeded:
            if result is None:
                raise
            return result


class Choices(Controller):
    """Several answers to one prompt, each in a branch of its own whose path is its index."""

    def __init__(self, controllers: Sequence[Controller]) -> None:
        super().__init__()
        self.controllers = list(controllers)

    def generate(self, prompt: Any, **kwargs: Any) -> Process:
        """Run them concurrently; returns the output of each.

        One that has no text as the budget is spent is empty, with finish reason ``length``; if all
        are, BudgetExceeded is raised.
        """
        params = sampling.checked("sampling_params", kwargs.pop("sampling_params", None))
        answering = []
        for index, controller in enumerate(self.controllers):
            choice_params = dict(params)
            if index and choice_params.get("seed") is not None:
                choice_params["seed"] = sampling.derived_seed(choice_params["seed"], index)
            choice_kwargs = {**kwargs, "sampling_params": choice_params}
            answering.append(_Choice(controller, prompt, choice_kwargs))
        running = ParallelProcess(answering, [[] for _ in answering])
        yield running
        spent = [choice.spent for choice in answering if choice.spent is not None]
        if len(spent) == len(answering):
            raise spent[0]
        return [_first(branch.result) or ScaffoldingOutput("") for branch in running.branches]


class _Answering(Controller):
    """Lets a controller answer a prompt in a branch, whose result is what it returns."""

    def __init__(self, controller: Controller, prompt: Any, kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._controller, self._prompt, self._kwargs = controller, prompt, kwargs

    def process(self, tasks: Sequence[Task], **kwargs: Any) -> Process:
        return (yield from self._controller.generate(self._prompt, **self._kwargs))


class _Choice(_Answering):
    """One of several answers: where the budget leaves it without a text (``spent`` is the reason),
    the others go on.
    """

    spent: BudgetExceeded | None = None

    def process(self, tasks: Sequence[Task], **kwargs: Any) -> Process:
        try:
            return (yield from super().process(tasks, **kwargs))
        except BudgetExceeded as error:
            self.spent = error
            return ScaffoldingOutput("", finish_reason="length")


def _first(output: Any) -> ScaffoldingOutput | None:
    return (output[0] if output else None) if isinstance(output, list) else output


def _text(output: Any) -> str:
    first = _first(output)
    return "" if first is None else first.text or ""


def compose(
    composition: Composition,
    settings: Mapping[str, Any],
    *,
    innermost: Callable[[], Controller],
    reward: Controller | None,
    streaming: bool,
    num_choices: int,
    pipeline: tuple[Asking, Callable[[str], str]],
) -> Controller:
    """The controller of a request.

    Args:
        settings: for a composition of one stack of methods.
        innermost: makes what generates inside the innermost methods.
        reward: scores answers for methods that take a reward controller; None: there is none.
        streaming: whether the text of methods is streamed where they can.
        num_choices: how often each choice is answered.
        pipeline: ``asking`` and ``visible`` of ``Pipeline``.

    Raises:
        UsageError: an unknown method or setting, or methods that do not go together.
    """
    if settings and not composition.is_one_stack:
        raise ParameterError(
            "method_params with several methods",
            f"they would belong to any of {composition.spec!r}",
            "Leave them out, or use one method",
            param="method_params",
        )
    table = composition.table
    for stages in composition.choices:
        for stage in stages:
            schema_of(table).check(stage, settings)

    def answering(stages: Sequence[str]) -> Controller:
        controllers = [
            _stacked(stage, table, settings, innermost, reward, streaming) for stage in stages
        ]
        return controllers[0] if len(controllers) == 1 else Pipeline(controllers, *pipeline)

    choices = [answering(stages) for stages in composition.choices for _ in range(num_choices)]
    return choices[0] if len(choices) == 1 else Choices(choices)


def check_generations(controller: Controller, limit: int) -> None:
    """Refuse a composition that could begin too many generations, before any is made.

    Raises ParameterError if the product of samples, branches and steps is above ``limit``.
    """
    if (count := controller.num_generations()) > limit:
        factors = " x ".join(f"{factor:,}" for factor in _factors(controller)) or "1"
        raise ParameterError(
            "the method would begin too many generations",
            f"{factors} make up to {count:,}, and this server allows {limit:,} for a request",
            "Ask for fewer samples, branches or steps (the server's --max-generations)",
            param="method",
        )


def _factors(controller: Controller) -> list[int]:
    """The numbers above 1 along its largest chain of controllers, the outermost first."""
    inner = controller.inner_controllers()
    largest = max(inner, key=lambda member: member.num_generations(), default=None)
    number = controller.fan_out()
    if largest is not None and len(inner) > 1:
        total = sum(member.num_generations() for member in inner)
        number *= -(-total // max(1, largest.num_generations()))
    rest = [] if largest is None else _factors(largest)
    return [number, *rest] if number > 1 else rest


def streams_truly(composition: Composition) -> bool:
    """Whether the text that its methods stream is a final part of the answer.

    Others, such as votes, stream their samples, and the answer is known at their end.
    """
    last = (composition.split(stages[-1])[-1] for stages in composition.choices)
    return all(_STREAMING in method.parameters for method in last)


def _generates(method: StackedMethod) -> bool:
    """Whether a method generates without another one inside."""
    return method.name != "plain" and _INNER not in method.parameters


def refuse_conversation(
    controller: Controller,
    table: MethodTable,
    missing: Callable[[str], str | None],
    *,
    as_text: bool,
) -> None:
    """Refuse a method, or one inside it, that cannot answer a conversation here.

    Args:
        table: has its name.
        missing: what a method of a name lacks here.
        as_text: whether a chat template has made a text of it.

    Raises:
        ParameterError: there is one.
    """
    for member in methods.with_inner(controller):
        name = table.name_of(member)
        if member.conversation == ConversationForm.NONE:
            raise ParameterError(
                f"method {name} answers no conversation",
                "it puts a text of its own before the prompt",
                "Use /v1/completions",
            )
        if member.conversation == ConversationForm.TEXT and not as_text:
            raise ParameterError(
                f"method {name} cannot run in front of another server's chats",
                "it continues a text, which a chat does not take",
                "Start this server with --tokenizer (it does not go with forced calls, shapes and "
                "reasoning_effort), use /v1/completions with a prompt in the model's own format, "
                "or a method that draws whole answers, such as majority_vote",
            )
        if not as_text and (reason := missing(name)):
            raise ParameterError(f"method {name} cannot answer a chat here", reason)


def needs_text(composition: Composition) -> bool:
    """Whether one of its methods takes no prompt of token ids."""
    stages = [stage for stages in composition.choices for stage in stages]
    stacked = (method for stage in stages for method in composition.split(stage))
    return any(method.joins_texts for method in stacked)


def _takes_reward(settings: Mapping[str, Any]) -> bool:
    """Whether the server's reward model belongs to these settings: not to a vote, nor to a policy
    that was fitted on how probes agree.
    """
    policy = settings.get("policy")
    if isinstance(policy, Mapping) and policy.get("difficulty") != "score":
        return False
    return settings.get("selection") != "vote"


def _stacked(
    spec: str,
    table: MethodTable,
    settings: Mapping[str, Any],
    innermost: Callable[[], Controller],
    reward: Controller | None,
    streaming: bool,
) -> Controller:
    names, values = parameters(spec, table), dict(settings)
    stacked = split(spec, table)
    drawing = [method for method in stacked if method.draws_samples]
    if drawing and drawing[-1].samples is None and drawing[-1].parameters[SAMPLES] == 1:
        values.setdefault(SAMPLES, NUM_SAMPLES)
    if _REWARD in names and _REWARD not in values:
        if reward is not None and _takes_reward(names | values):
            values[_REWARD] = reward
        elif reward is None and names[_REWARD] is Method.REQUIRED:
            raise ParameterError(
                f"method {spec} needs a reward model",
                "it chooses by its scores, and this server has none",
                "Start the server with --reward-model or --reward-url",
            )
    if "on_failure" in names:  # one sample that fails is no failure of the others
        values.setdefault("on_failure", "drop")
    first = stacked[0]
    if first.name in methods.REWARDS:
        raise ParameterError(
            f"method {first.name} answers nothing by itself",
            "it scores the answers of another method",
            f'Give it to one, as in best_of_n with "reward_controller": "{first.name}"',
        )
    if first.name == "plain" and len(stacked) == 1:
        if values:
            raise ParameterError.unknown("method 'plain'", values, ())
        return innermost()
    if streaming and _STREAMING in names and first.name != "plain":
        values.setdefault(_STREAMING, True)
    inner = None if _generates(first) or _INNER in values else innermost()
    return stack(spec, innermost=inner, method_table=table, **values)
