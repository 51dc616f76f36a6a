"""Seconds of an engine's step, fitted to measured ones, and the limits of that engine.

::

    seconds = base(decodes) + a * context + b * prefilled + c * attended

=============  =====================================================================================
``decodes``    sequences that decode one token in the step
``context``    stored tokens of all of them
``prefilled``  tokens of prompts, of all chunks
``attended``   tokens before and at each of these, in all: p * stored + p * (p + 1) / 2 for a chunk
=============  =====================================================================================

The base is linear between the measured numbers of decodes, as processors are not linear in them
(flat until their units are busy), and goes on as between the last two. All other terms are linear,
and no coefficient is below 0. Errors of the fit are relative to the measured times.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forethought.errors import ParameterError, UsageError
from forethought.saved_file import save_text

if TYPE_CHECKING:
    from forethought.llm.llm import LLM

CONTEXTS = (64, 512, 4096)
"""Tokens of each sequence whose decodes are measured, or as many as fit."""
PROMPTS = (16, 64, 256, 1024, 4096)
"""Tokens of the prompts whose prefill is measured, or as many as fit into one step."""
MAX_BATCH_SIZE = 1 << 16
LIMITS = ("max_batch_size", "max_num_tokens", "kv_tokens", "kv_bytes")


class MeasuredStep(NamedTuple):
    """A step and its time; counts as in the table above."""

    decodes: int
    context: int
    prefilled: int
    attended: int
    ms: float


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """What a simulated replica is made from.

    Attributes:
        max_batch_size: sequences that run at once.
        max_num_tokens: per step.
        kv_tokens: that the KV cache holds.
        kv_bytes: of keys and values of one token.
        label: the model and the machine, for reports.
    """

    max_batch_size: int
    max_num_tokens: int
    kv_tokens: int
    kv_bytes: int
    steps: tuple[MeasuredStep, ...]
    label: str = ""

    def __post_init__(self) -> None:
        for name, value in self.limits().items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParameterError(f"invalid {name}", f"got {value!r}", "Give a number above 0")
        if self.max_batch_size > MAX_BATCH_SIZE:
            why = f"at most {MAX_BATCH_SIZE:,} are simulated"
            raise ParameterError(f"max_batch_size {self.max_batch_size} is too large", why)
        if self.max_num_tokens < self.max_batch_size:
            raise ParameterError(
                f"max_num_tokens {self.max_num_tokens} is too small",
                f"{self.max_batch_size} sequences decode at once (max_batch_size)",
                "Raise it, or lower max_batch_size",
            )

    @classmethod
    def load(cls, path: Path) -> MeasuredEngine:
        """Read a file of ``save``; raises UsageError if it is none."""
        fix = "Write one with forethought bench cluster --save-step-times FILE"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            steps = tuple(_read_step(step) for step in values["steps"])
            limits = {name: values[name] for name in LIMITS}
            engine = cls(**limits, steps=steps, label=str(values.get("label", "")))
            StepTimes.fit(engine)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise UsageError(f"no step times in {path}", why, fix) from error
        return engine

    def limits(self) -> dict[str, int]:
        """Those of ``LIMITS`` by name."""
        return {name: getattr(self, name) for name in LIMITS}

    def save(self, path: Path) -> None:
        """Write a JSON file that ``load`` reads."""
        values = asdict(self) | {"steps": [step._asdict() for step in self.steps]}
        save_text(path, json.dumps(values, indent=1) + "\n", "step times")


class StepTimes:
    """The fitted function.

    Args:
        base: seconds by the number of decodes, from 0 on.
        per_context: seconds; so are ``per_prefilled`` and ``per_attended``.
    """

    def __init__(
        self,
        base: Sequence[float],
        per_context: float = 0.0,
        per_prefilled: float = 0.0,
        per_attended: float = 0.0,
    ) -> None:
        self.base = list(base)
        self.per_context, self.per_prefilled = per_context, per_prefilled
        self.per_attended = per_attended

    @classmethod
    def fit(cls, engine: MeasuredEngine) -> StepTimes:
        """The least squares of an engine's steps; raises ParameterError unless there is a step with
        decodes alone and one with a prefill alone.
        """
        steps = engine.steps
        if not any(s.decodes and not s.prefilled for s in steps) or not any(
            s.prefilled and not s.decodes for s in steps
        ):
            raise ParameterError(
                "step times are missing",
                "a step that only decodes and one that only prefills are needed",
                "Measure both",
            )
        knots = sorted({0, *(step.decodes for step in steps)})
        rows = np.array([_terms(step, knots) for step in steps])
        seconds = np.array([step.ms / 1e3 for step in steps])
        solution = _non_negative(rows / seconds[:, None], np.ones(len(steps))).tolist()
        base = _line(knots, solution[:-3], engine.max_batch_size)
        return cls(base, *solution[-3:])

    def step(self, decodes: int, context: int, prefilled: int = 0, attended: int = 0) -> float:
        """Seconds of a step."""
        return (
            self.base[decodes]
            + self.per_context * context
            + self.per_prefilled * prefilled
            + self.per_attended * attended
        )


def attended_tokens(stored: int, count: int) -> int:
    """Tokens that a chunk of ``count`` tokens attends to after ``stored`` ones."""
    return count * stored + count * (count + 1) // 2


def measure_engine(llm: LLM, rounds: int = 3) -> MeasuredEngine:
    """Measure a model: decodes of several numbers and contexts, and prefills; medians over the
    rounds.
    """
    from forethought.bench.roofline import ModelCost

    engine = llm.lend("bench cluster").local_engine
    llm.take_back()
    limits, capacity = engine.limits, engine.capabilities.capacity
    cost = ModelCost.of(engine.runner.lm, engine.runner.storage.stored_dtype)
    steps = (
        *_decode_steps(llm, limits.max_batch_size, capacity, rounds),
        *_prefill_steps(llm, min(limits.max_num_tokens, llm.max_length - 1), rounds),
    )
    return MeasuredEngine(
        limits.max_batch_size, limits.max_num_tokens, capacity, cost.kv_bytes, steps
    )


def _decode_steps(
    llm: LLM, max_batch_size: int, capacity: int, rounds: int
) -> Iterator[MeasuredStep]:
    from forethought.bench.roofline import NUM_DECODED, measure_steps

    longest = llm.max_length - NUM_DECODED
    for context in sorted({min(size, longest) for size in CONTEXTS}):
        largest = min(max_batch_size, capacity // (context + NUM_DECODED))
        batches = sorted({*(2**power for power in range(largest.bit_length())), largest})
        for batch, _, seconds, _ in measure_steps(llm, batches, [context], rounds):
            stored = batch * (context + NUM_DECODED // 2)
            yield MeasuredStep(batch, stored, 0, 0, 1e3 * seconds)


def _prefill_steps(llm: LLM, longest: int, rounds: int) -> Iterator[MeasuredStep]:
    for length in sorted({min(size, longest) for size in PROMPTS}):
        seconds = _prefill_seconds(llm, length, rounds)
        yield MeasuredStep(0, 0, length, attended_tokens(0, length), 1e3 * seconds)


def _prefill_seconds(llm: LLM, length: int, rounds: int) -> float:
    """Median seconds of a step that computes a prompt of which nothing is cached."""
    from forethought.config.sampling import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    seconds = []
    for number in range(rounds + 1):  # the first one warms up
        source = np.random.default_rng([length, number])
        prompt = source.integers(0, len(llm.tokenizer), length).tolist()
        before = llm.stats
        llm.generate([prompt], params)
        seconds.append(max(1e-9, llm.stats.step_seconds - before.step_seconds))
    return float(np.median(seconds[1:]))


def _read_step(values: dict[str, Any]) -> MeasuredStep:
    step = MeasuredStep(**values)
    counts = step[:-1]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(f"a count of {values} is none")
    if not (isinstance(step.ms, int | float) and 0 < step.ms < math.inf):
        raise ValueError(f"ms of {values} is no time")
    return step


def _terms(step: MeasuredStep, knots: Sequence[int]) -> list[float]:
    """[knots + 3]: the weights of the base at its knots, then the linear terms."""
    weights = [0.0] * len(knots)
    weights[knots.index(step.decodes)] = 1.0
    return [*weights, float(step.context), float(step.prefilled), float(step.attended)]


def _non_negative(rows: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """[columns]: least squares; the lowest coefficient is fixed at 0 until none is below it."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    allowed = np.ones(rows.shape[1], bool)
    while True:
        solution = np.zeros(rows.shape[1])
        part = (rows / scale)[:, allowed]
        solution[allowed] = np.linalg.lstsq(part, target, rcond=None)[0]
        if solution.min() >= 0.0:
            return np.asarray(solution / scale)
        allowed[int(solution.argmin())] = False


def _line(knots: Sequence[int], values: Sequence[float], limit: int) -> list[float]:
    """[limit + 1]: linear between the knots, of which there are two, and after the last one as
    between the last two, but not falling.
    """
    line = []
    for count in range(limit + 1):
        after = min(max(bisect(knots, count), 1), len(knots) - 1)
        low, high = knots[after - 1], knots[after]
        slope = (values[after] - values[after - 1]) / (high - low)
        if count > high:
            slope = max(0.0, slope)
            line.append(values[after] + slope * (count - high))
        else:
            line.append(values[after - 1] + slope * (count - low))
    return line
