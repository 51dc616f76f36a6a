"""The layers of an Archon pipeline: read from a mapping, JSON or YAML, and checked before it runs.

::

    {"layers": [[{"type": "generator", "samples": 5, "temperature": 0.7}],
                [{"type": "critic"}],
                [{"type": "ranker", "top_k": 3}],
                [{"type": "fuser"}]]}

========================  ==========================================================================
``generator``             draws ``samples`` answers to the question; only in the first layer
``critic``                writes strengths and weaknesses of each candidate
``ranker``                orders the candidates, critiques read, and keeps the first ``top_k``
``fuser``                 writes ``samples`` answers out of all candidates, critiques read
``verifier``              checks each candidate and keeps the first ``top_k`` that are correct; if
                          none is, all go on
``unit_test_generator``   writes up to ``num_tests`` tests that an answer has to pass
``unit_test_evaluator``   says which tests each candidate passes, and keeps the ``top_k`` that pass
                          most
========================  ==========================================================================

A layer is a list, whose components run side by side: several generators, or several fusers, perhaps
of different models; a critic beside a unit-test generator; any other component alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from forethought.config.base import StrictModel
from forethought.errors import DependencyError, ParameterError, UnknownNameError
from forethought.strict_json import read_json

DEFAULT: Mapping[str, Any] = {
    "layers": [
        [{"type": "generator", "samples": 5, "temperature": 0.8}],
        [{"type": "critic"}],
        [{"type": "ranker", "top_k": 3}],
        [{"type": "fuser"}],
    ]
}
_Count = Annotated[int, Field(strict=True, ge=1)]


class Component(StrictModel):
    """What all components can be given."""

    type: str
    model: str | None = None
    """Tag of the worker; None: that of ``"generation"``."""
    temperature: float | None = Field(default=None, ge=0)
    """None: of a generator as the request says, of others 0.7 for fusers and else 0."""
    max_tokens: _Count | None = None
    """Of each call; None: as the request says."""


class Generator(Component):
    """Draws answers."""

    samples: _Count = 1


class Critic(Component):
    """Criticises each candidate."""


class Ranker(Component):
    """Orders the candidates."""

    top_k: _Count = 1


class Fuser(Component):
    """Writes one answer out of all candidates."""

    samples: _Count = 1


class Verifier(Component):
    """Keeps correct candidates."""

    top_k: _Count | None = None


class UnitTestGenerator(Component):
    """Writes tests."""

    num_tests: _Count = 5


class UnitTestEvaluator(Component):
    """Orders the candidates by the tests that they pass."""

    top_k: _Count | None = None


COMPONENTS: Mapping[str, type[Component]] = {
    "generator": Generator,
    "critic": Critic,
    "ranker": Ranker,
    "fuser": Fuser,
    "verifier": Verifier,
    "unit_test_generator": UnitTestGenerator,
    "unit_test_evaluator": UnitTestEvaluator,
}
_BESIDE = (frozenset({"generator"}), frozenset({"fuser"}))
_NOTES = frozenset({"critic", "unit_test_generator"})
"""They add notes, and leave the candidates as they are."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Layers of components."""

    layers: tuple[tuple[Component, ...], ...]

    @property
    def models(self) -> list[str]:
        """The worker tags that are named, each once."""
        named = [
            component.model
            for layer in self.layers
            for component in layer
            if component.model is not None
        ]
        return list(dict.fromkeys(named))

    @property
    def num_calls(self) -> int:
        """Calls of the model at most; a fuser counts each candidate that it reads."""
        total, candidates = 0, 1
        for layer in self.layers:
            samples = sum(
                component.samples for component in layer if isinstance(component, Generator | Fuser)
            )
            reads = [
                isinstance(component, Fuser | Critic | Verifier | UnitTestEvaluator)
                for component in layer
            ]
            total += max(1, samples) * (candidates * sum(reads) if any(reads) else len(layer))
            candidates = samples or candidates
        return total

    def to_dict(self) -> dict[str, Any]:
        """The mapping that it was read from, without unset fields."""
        return {
            "layers": [
                [component.model_dump(exclude_none=True) for component in row]
                for row in self.layers
            ]
        }


def load(source: Pipeline | Mapping[str, Any] | str | Path) -> Pipeline:
    """The pipeline itself, or that of a mapping or of a file (``.json``, ``.yaml``, ``.yml``).

    Raises:
        ParameterError: it cannot be read, or a layer cannot be run; names the layer.
        UnknownNameError: a component's type does not exist.
        DependencyError: a YAML file, and pyyaml is not installed.
    """
    if isinstance(source, Pipeline):
        return source
    values = source if isinstance(source, Mapping) else _read(Path(source))
    layers = values.get("layers") if isinstance(values, Mapping) else None
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise _invalid("layers", f"got {layers!r}", "Give a list of layers, each a list")
    unknown = values.keys() - {"layers", "name"}
    if unknown:
        raise ParameterError.unknown("a pipeline", unknown, ("layers", "name"))
    layers_read = tuple(_layer(f"layers[{n}]", layer) for n, layer in enumerate(layers))
    _check(layers_read)
    return Pipeline(layers_read)


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix not in (".yaml", ".yml"):
            return read_json(text)
        try:
            yaml = importlib.import_module("yaml")
        except ImportError as error:
            raise DependencyError.missing("pyyaml", "reading YAML", "archon") from error
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"cannot read the pipeline {path}",
            str(error).split("\n")[0],
            "Give a mapping, or a .json or .yaml file",
        ) from error


def _layer(name: str, values: Any) -> tuple[Component, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise _invalid(name, f"got {values!r}", "Give a list of components")
    return tuple(_component(f"{name}[{n}]", item) for n, item in enumerate(values))


def _component(name: str, values: Any) -> Component:
    if not isinstance(values, Mapping) or "type" not in values:
        raise _invalid(name, f"got {values!r}", 'Give a mapping with "type"')
    kind = values["type"]
    if not isinstance(kind, str) or kind not in COMPONENTS:
        raise UnknownNameError(f"type in {name}", str(kind), COMPONENTS)
    try:
        return COMPONENTS[kind](**values)
    except ParameterError as error:
        raise ParameterError(f"{name}: {error.what}", error.why, error.fix) from error


def _check(layers: Sequence[Sequence[Component]]) -> None:
    """Refuse an order of components that cannot work."""
    has_tests = False
    for number, layer in enumerate(layers):
        name, kinds = f"layers[{number}]", {component.type for component in layer}
        if (kinds == {"generator"}) != (number == 0):
            raise _invalid(
                name,
                f"it has {', '.join(sorted(kinds))}",
                "Put all generators, and nothing else, into the first layer",
            )
        alone = len(layer) == 1 or kinds in _BESIDE
        if not alone and not (kinds <= _NOTES and len(kinds) == len(layer)):
            raise _invalid(
                name,
                f"{', '.join(component.type for component in layer)} cannot run side by side",
                "Give each a layer of its own",
            )
        if "unit_test_evaluator" in kinds and not has_tests:
            raise _invalid(
                name, "there are no unit tests yet", "Put a unit_test_generator before it"
            )
        has_tests = has_tests or "unit_test_generator" in kinds


def _invalid(name: str, why: str, fix: str) -> ParameterError:
    return ParameterError(f"invalid {name} of a pipeline", why, fix)
