"""Seconds of an engine's step, fitted to measured ones, and the limits of that engine.

::

    seconds = base(decodes) + a * context + b * prefilled + c * attended + (d + e * decodes) * calls

=============  =====================================================================================
``decodes``    sequences that decode one token in the step
``context``    stored tokens of all of them
``prefilled``  tokens of prompts, of all chunks
``attended``   tokens before and at each of these, in all: p * stored + p * (p + 1) / 2 for a chunk
``calls``      of the engine: 1, or 1 / n for one of n decode steps that are made in one call
=============  =====================================================================================

The base is linear between the measured numbers of decodes, as processors are not linear in them
(flat until their units are busy), and goes on as between the last two. All other terms are linear,
and no coefficient is below 0. Errors of the fit are relative to the measured times, but to no less
than a share of the usual one: the difference of two noisy times may be next to nothing.
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
from forethought.strict_json import read_json

if TYPE_CHECKING:
    from forethought.llm.llm import LLM

CONTEXTS = (64, 512, 4096)
"""Tokens of each sequence whose decodes are measured, or as many as fit."""
PROMPTS = (16, 64, 256, 1024, 4096)
"""Tokens of the prompts whose prefill is measured, or as many as fit into one step."""
MAX_BATCH_SIZE = 1 << 16
LIMITS = ("max_batch_size", "max_num_tokens", "kv_tokens", "kv_bytes", "steps_per_call")
_NUM_LINEAR = 5
LEAST_SHARE = 0.02
"""Of the median time, to which errors are relative at least."""


class MeasuredStep(NamedTuple):
    """A step and its time; counts as in the table above."""

    decodes: int
    context: int
    prefilled: int
    attended: int
    calls: float
    ms: float


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """What a simulated replica is made from.

    Attributes:
        max_batch_size: sequences that run at once.
        max_num_tokens: per step.
        kv_tokens: that the KV cache holds.
        kv_bytes: of keys and values of one token.
        steps_per_call: decode steps that are made in one call at most.
        label: the model and the machine, for reports.
    """

    max_batch_size: int
    max_num_tokens: int
    kv_tokens: int
    kv_bytes: int
    steps: tuple[MeasuredStep, ...]
    steps_per_call: int = 1
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
            values = read_json(path.read_text(encoding="utf-8"))
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
        linear: the coefficients a to e, in seconds.
        steps_per_call: of decodes alone.
    """

    def __init__(self, base: Sequence[float], linear: Sequence[float], steps_per_call: int) -> None:
        self.base, self.steps_per_call = list(base), steps_per_call
        self.per_context, self.per_prefilled, self.per_attended, *per_call = linear
        self._per_call, self._per_decode = per_call

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
        scale = np.maximum(seconds, LEAST_SHARE * np.median(seconds))
        solution = _non_negative(rows / scale[:, None], seconds / scale).tolist()
        base = _line(knots, solution[:-_NUM_LINEAR], engine.max_batch_size)
        return cls(base, solution[-_NUM_LINEAR:], engine.steps_per_call)

    def call(self, decodes: int) -> float:
        """Seconds that a call takes beside its steps."""
        return self._per_call + self._per_decode * decodes

    def step(self, decodes: int, context: int, prefilled: int = 0, attended: int = 0) -> float:
        """Seconds of a step without its call."""
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
    longest = min(llm.max_length, capacity) - 1
    timer = _StepTimer(llm, rounds, longest, engine.num_decode_steps)
    pages = engine.pool.page_size, capacity
    return MeasuredEngine(
        limits.max_batch_size,
        limits.max_num_tokens,
        capacity,
        cost.kv_bytes,
        (
            *timer.decodes(limits.max_batch_size, *pages),
            *timer.prefills(limits.max_num_tokens),
        ),
        engine.num_decode_steps,
    )


@dataclass(frozen=True, slots=True)
class _StepTimer:
    llm: LLM
    rounds: int
    longest: int
    """Tokens of a prompt at most."""
    steps_per_call: int

    def decodes(self, max_batch_size: int, page_size: int, capacity: int) -> Iterator[MeasuredStep]:
        """Steps of several per call, and steps of one."""
        from forethought.bench.roofline import NUM_DECODED, measure_steps

        longest = max(page_size, (self.longest - NUM_DECODED) // page_size * page_size)
        for context in sorted({min(size, longest) for size in CONTEXTS}):
            largest = max(1, min(max_batch_size, capacity // (context + NUM_DECODED + page_size)))
            batches = sorted({*(2**power for power in range(largest.bit_length())), largest})
            for batch, _, seconds, _ in measure_steps(self.llm, batches, [context], self.rounds):
                stored = batch * (context + NUM_DECODED // 2)
                yield MeasuredStep(batch, stored, 0, 0, 1 / self.steps_per_call, 1e3 * seconds)
                yield from self._single(batch, context)

    def _single(self, batch: int, context: int) -> Iterator[MeasuredStep]:
        """A decode that is a call of its own: of prompts that are cached but for their last tokens,
        where the engine caches them.
        """
        prompts = self._prompts(batch, context + 1, 0)
        times = [self._seconds(prompts, batch) for _ in range(self.rounds + 1)][1:]
        if all(times):
            ms = 1e3 * float(np.median(times))
            yield MeasuredStep(batch, batch * context, 0, 0, 1, ms)

    def prefills(self, max_num_tokens: int) -> Iterator[MeasuredStep]:
        """Steps that compute a prompt of which nothing is cached."""
        longest = min(max_num_tokens, self.longest)
        for length in sorted({min(size, longest) for size in PROMPTS}):
            seconds = [
                self._seconds(self._prompts(1, length, number), length)
                for number in range(self.rounds + 1)  # the first one warms up
            ]
            if all(seconds[1:]):
                ms, attended = 1e3 * float(np.median(seconds[1:])), attended_tokens(0, length)
                yield MeasuredStep(0, 0, length, attended, 1, ms)

    def _prompts(self, batch: int, length: int, number: int) -> list[list[int]]:
        source = np.random.default_rng([batch, length, number])
        prompts: list[list[int]] = source.integers(
            0, len(self.llm.tokenizer), [batch, length]
        ).tolist()
        return prompts

    def _seconds(self, prompts: list[list[int]], num_computed: int) -> float:
        """Of the step that gives each prompt a token; 0 if it is not one that computes as many."""
        from forethought.config.sampling import SamplingParams

        before = self.llm.stats
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self.llm.generate(prompts, params)
        after = self.llm.stats
        is_one = after.steps - before.steps == 1
        has_computed = after.prefilled - before.prefilled == num_computed
        return after.step_seconds - before.step_seconds if is_one and has_computed else 0.0


def _read_step(values: dict[str, Any]) -> MeasuredStep:
    step = MeasuredStep(**values)
    counts = step[:-2]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(f"a count of {values} is none")
    if not (isinstance(step.calls, int | float) and 0 < step.calls <= 1):
        raise ValueError(f"calls of {values} is not between 0 and 1")
    if not (isinstance(step.ms, int | float) and 0 < step.ms < math.inf):
        raise ValueError(f"ms of {values} is no time")
    return step


def _terms(step: MeasuredStep, knots: Sequence[int]) -> list[float]:
    """[knots + 5]: the weights of the base at its knots, then the linear terms."""
    weights = [0.0] * len(knots)
    weights[knots.index(step.decodes)] = 1.0
    linear = (step.context, step.prefilled, step.attended, step.calls, step.calls * step.decodes)
    return [*weights, *map(float, linear)]


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
