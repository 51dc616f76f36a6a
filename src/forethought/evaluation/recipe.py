"""A method with its settings, as one row of a comparison; and variants of it for a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forethought.config.sampling import SamplingParams
from forethought.methods.stack import SAMPLES as _SAMPLES
from forethought.methods.stack import (
    refuse_greedy_samples,
    refuse_too_many_generations,
    split,
    stack,
)
from forethought.scaffolding.budget import Budget
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.worker import Worker


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row of a comparison."""

    name: str
    controller: Controller
    """Prototype; cloned for each problem."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields of every task, by name; they override the controller's."""
    chains: int = 1
    """Chains of thought that it runs at once for one problem."""
    workers: Mapping[Any, Worker] = field(default_factory=dict)
    """Workers by tag, beside the model's."""
    is_chat: bool = False
    """Whether its prompts are chats that ask the questions; otherwise they are the questions
    rendered by the chat template."""
    prompt_format: str | None = None
    """Its prompts as text, with ``{question}`` for the question; None: as the runner makes them."""
    budget: Budget = field(default_factory=Budget)
    """Limits for each attempt."""
    repeats: int = 1
    """Attempts at each problem, every one with another seed."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the method that were set, but for controllers; for reports and journals."""

    def to_dict(self) -> dict[str, Any]:
        """What decides its attempts, as plain values."""
        budget = {name: getattr(self.budget, name) for name in ("tokens", "calls", "seconds")}
        return {
            "name": self.name,
            "sampling_params": dict(self.sampling_params),
            "settings": {name: str(value) for name, value in self.settings.items()},
            "budget": budget,
            "repeats": self.repeats,
        }


def recipe(
    spec: str,
    *,
    samples: int = 8,
    temperature: float = 0.8,
    max_tokens: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Recipe:
    """The usual way to measure a method: greedy, unless it draws several samples.

    Args:
        spec: name of a method, or several as for ``stack``: ``"dynasor+majority_vote@8"``.
        samples: of the outermost method that draws several answers, where ``spec`` does not say.
        temperature: of those samples; every other method is greedy.
        max_tokens: of each chain; None: to the end of the context.
        settings: parameters of the method.

    Raises:
        UnknownNameError, ParameterError: as ``stack``; or the temperature of several samples is 0.
    """
    all_settings = dict(settings or {})
    drawing = [method for method in split(spec) if method.draws_samples]
    if drawing and drawing[-1].samples is None:
        all_settings.setdefault(_SAMPLES, samples)
    controller = stack(spec, **all_settings)
    several = bool(drawing) or getattr(controller, "draws_samples", False)
    params: dict[str, Any] = {"temperature": temperature if several else 0.0, "top_p": 1.0}
    if max_tokens is not None:
        params["max_tokens"] = max_tokens
    SamplingParams(**params)  # refuses values outside their ranges before anything runs
    refuse_too_many_generations(controller)
    refuse_greedy_samples(controller, params["temperature"])
    plain = {
        name: value for name, value in all_settings.items() if not isinstance(value, Controller)
    }
    return Recipe(spec, controller, params, _num_chains(controller), settings=plain)


def _num_chains(controller: Controller) -> int:
    """Chains of thought that a controller runs at once: the product of the samples."""
    settings = vars(controller)
    inner, concurrency = settings.get("generation_controller"), settings.get("concurrency")
    num_samples = int(settings.get(_SAMPLES, 1))
    if isinstance(concurrency, int):
        num_samples = min(num_samples, concurrency)
    return num_samples * _num_chains(inner) if isinstance(inner, Controller) else num_samples


def with_each_count(spec: str, counts: Sequence[str]) -> list[str]:
    """The stack with each number of samples, for its outermost method that draws several.

    The stack alone if none does, or ``@`` sets its number.

    Args:
        spec: names of methods, as for ``stack``.
        counts: numbers as text; ``stack`` refuses invalid ones.
    """
    stacked, parts = split(spec), spec.split("+")
    drawing = [index for index, method in enumerate(stacked) if method.draws_samples]
    if not drawing or stacked[drawing[-1]].samples is not None:
        return [spec]
    last = drawing[-1]
    return [
        "+".join([*parts[:last], f"{parts[last]}@{count.strip()}", *parts[last + 1 :]])
        for count in counts
    ]


def within_each(recipe: Recipe, budgets: Sequence[Budget | None]) -> list[Recipe]:
    """The recipe within each budget of tokens, which is appended to its name; None: unchanged."""
    return [
        recipe
        if budget is None
        else replace(recipe, name=f"{recipe.name} in {budget.tokens}", budget=budget)
        for budget in budgets
    ]
