"""Chooses how to run a model by measurement on the user's prompts, and writes the configuration.

Two stages, each by the speed of greedy decoding. First, without drafts: the form of the weights and
the number of threads. Then, in the form that won: drafters and draft lengths
(``bench.speculation``). Quantised forms change the model, so they are tried only if they are
allowed, and what they change is reported: the share of answers that stay the same token for token.
The batch size is the one, of those measured, at which the chosen drafter generates the most tokens
per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from forethought.bench.report import BenchRow, Recommendation, recommend
from forethought.bench.speculation import MIN_PROMPTS, Prompt, SpeculationBench, run_once
from forethought.bench.variant import PLAIN, variants_of, written
from forethought.config.speculation import DecodingBaseConfig
from forethought.evaluation.report import aligned, new_figure
from forethought.llm.llm import LLM
from forethought.model.device import usable_processors
from forethought.saved_file import saving

AS_STORED = "as stored"
"""The form of the weights that the checkpoint has, or that the given fields ask for."""


@dataclass(frozen=True, slots=True)
class FormRow:
    """Plain decoding with one form of the weights and one number of threads."""

    quantization: str | None
    """None: as stored."""
    num_threads: int
    tokens_per_second: tuple[float, ...]
    """Medians over the rounds, one per batch size."""
    identical_share: float
    """Of the answers: those with the tokens of the first form."""

    @property
    def score(self) -> float:
        """Geometric mean over the batch sizes."""
        return math.exp(sum(map(math.log, self.tokens_per_second)) / len(self.tokens_per_second))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "quantization": self.quantization,
            "num_threads": self.num_threads,
            "tokens_per_second": [round(speed, 1) for speed in self.tokens_per_second],
            "identical_share": round(self.identical_share, 4),
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """What was measured, and what came out."""

    forms: tuple[FormRow, ...]
    best: FormRow
    rows: tuple[BenchRow, ...]
    """Of the second stage."""
    advice: Recommendation
    config: dict[str, Any]
    """Fields of ``LlmArgs``, as YAML and JSON have them."""


class AutoBench:
    """Runs both stages.

    Args:
        fields: of ``LlmArgs``, without ``speculative_config``.
        configs: the drafters to try, with every length settled.
        quantizations: forms beside the stored one: of ``QUANTIZATIONS``.
        threads: numbers of threads to try.
        batches: numbers of concurrent prompts.
        max_tokens: of an answer.
        rounds: runs of everything.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        configs: Sequence[DecodingBaseConfig],
        *,
        quantizations: Sequence[str] = (),
        threads: Sequence[int] | None = None,
        batches: Sequence[int] = (1, 4),
        max_tokens: int = 128,
        rounds: int = 3,
    ) -> None:
        self.fields, self.configs = dict(fields), list(configs)
        self.forms = [None, *quantizations]
        self.threads = list(threads or thread_counts())
        self.batches, self.max_tokens, self.rounds = list(batches), max_tokens, rounds

    @property
    def num_runs(self) -> int:
        """How many runs are timed in both stages."""
        variants = 1 + len(variants_of(self.configs))
        num_runs_each = len(self.batches) * self.rounds
        return num_runs_each * (len(self.forms) * len(self.threads) + variants)

    def run(
        self,
        read_prompts: Callable[[LLM], Sequence[Prompt]],
        on_run: Callable[[str], None] = lambda doing: None,
    ) -> Choice:
        """Measure, and choose. The number of torch's threads is that of the best form afterwards.

        Args:
            read_prompts: the prompts as the model takes them; as many as the largest batch.
            on_run: called after each run with what was measured.
        """
        forms: list[FormRow] = []
        reference: list[list[list[int]]] = []
        for form in self.forms:
            with self._llm(form) as llm:
                forms += self._form_rows(llm, form, read_prompts(llm), reference, on_run)
        best = max(forms, key=lambda row: row.score)
        torch.set_num_threads(best.num_threads)
        with self._llm(best.quantization, speculative_config=self.configs) as llm:
            bench = SpeculationBench(
                llm, read_prompts(llm), max_tokens=self.max_tokens, rounds=self.rounds
            )
            rows = bench.run(
                variants_of(self.configs), self.batches, lambda variant, _: on_run(variant.label)
            )
        advice = recommend(rows)
        config = self._config(best, advice, fastest_batch(rows, advice))
        return Choice(tuple(forms), best, tuple(rows), advice, config)

    def _llm(self, form: str | None, **more: Any) -> LLM:
        quantization = {} if form is None else {"quantization": form}
        # The threads are those of torch, which are set between runs.
        fixed = {"max_batch_size": max(self.batches), "num_threads": "torch"}
        return LLM(**self.fields | fixed | quantization | more)

    def _form_rows(
        self,
        llm: LLM,
        form: str | None,
        prompts: Sequence[Prompt],
        reference: list[list[list[int]]],
        on_run: Callable[[str], None],
    ) -> list[FormRow]:
        """The rows of one form; fills ``reference`` with the answers of the first."""
        speeds: dict[tuple[int, int], list[float]] = {}
        equal: list[bool] = []
        for number in range(-1, self.rounds):  # the first round warms up
            for threads in self.threads:
                torch.set_num_threads(threads)
                for batch in self.batches:
                    run = run_once(
                        llm,
                        PLAIN,
                        prompts[: max(batch, MIN_PROMPTS)],
                        batch=batch,
                        max_tokens=self.max_tokens,
                        salt=f"auto {number} {threads} {batch}",
                    )
                    if not reference:
                        reference.append(run.outputs)
                    equal += [
                        mine == other
                        for mine, other in zip(run.outputs, reference[0], strict=False)
                    ]
                    if number >= 0:
                        speeds.setdefault((threads, batch), []).append(run.speed)
                        on_run(f"{form or AS_STORED}, {threads} threads")
        share = sum(equal) / len(equal)
        return [
            FormRow(
                form,
                threads,
                tuple(median(speeds[threads, batch]) for batch in self.batches),
                share,
            )
            for threads in self.threads
        ]

    def _config(self, best: FormRow, advice: Recommendation, batch: int) -> dict[str, Any]:
        config = {name: _plain(value) for name, value in self.fields.items()}
        config |= {"max_batch_size": batch, "num_threads": best.num_threads}
        if best.quantization is not None:
            config["quantization"] = best.quantization
        block = written(advice.variant, self.configs, advice.max_concurrency)
        return config if block is None else config | {"speculative_config": block}


def fastest_batch(rows: Sequence[BenchRow], advice: Recommendation) -> int:
    """The batch size at which what is recommended generates the most tokens per second.

    ``rows`` are of the second stage; above ``max_concurrency`` plain decoding is recommended.
    """
    most = math.inf if advice.max_concurrency is None else advice.max_concurrency
    eligible = [
        row for row in rows if row.variant == (advice.variant if row.batch <= most else PLAIN)
    ]
    return max(eligible, key=lambda row: row.tokens_per_second).batch


def thread_counts() -> list[int]:
    """The powers of two below the processors that this process may use, and these."""
    most = max(1, math.floor(usable_processors()))
    return sorted({most, *(2**power for power in range(8) if 2**power <= most)})


def form_table(rows: Sequence[FormRow], batches: Sequence[int]) -> str:
    """Tokens per second of each form."""
    head = ("weights", "threads", *(f"batch {batch}" for batch in batches), "identical")
    cells: list[tuple[str, ...]] = [head]
    for row in rows:
        speeds = (f"{speed:.0f}" for speed in row.tokens_per_second)
        share = f"{row.identical_share:.0%}"
        cells.append((row.quantization or AS_STORED, str(row.num_threads), *speeds, share))
    return aligned(cells)


def save_auto_plot(choice: Choice, batches: Sequence[int], path: Path, title: str) -> Path:
    """Plot both stages over the batch size as a PNG: forms of the weights, then drafters.

    Raises DependencyError if matplotlib is not installed.
    """
    figure = new_figure(10.0, 4.5)
    forms, drafters = figure.subplots(1, 2)
    for form in choice.forms:
        style = "o-" if form == choice.best else "o--"
        label = f"{form.quantization or AS_STORED}, {form.num_threads} threads"
        speeds = sorted(zip(batches, form.tokens_per_second, strict=True))
        forms.plot(*zip(*speeds, strict=True), style, label=label)
    forms.set_title("plain decoding (solid: chosen)", fontsize="medium")
    for variant in dict.fromkeys(row.variant for row in choice.rows):
        style = "o-" if variant == choice.advice.variant else "o--"
        rows = [row for row in choice.rows if row.variant == variant]
        speeds = sorted((row.batch, row.tokens_per_second) for row in rows)
        drafters.plot(*zip(*speeds, strict=True), style, label=variant.label)
    drafters.set_title("drafters (solid: chosen)", fontsize="medium")
    for axes in (forms, drafters):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("batch size")
        axes.set_ylabel("tokens/s")
        axes.set_ylim(bottom=0)
        axes.grid(True, alpha=0.25)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    with saving(path, "plot") as file:
        figure.savefig(file, dpi=150)
    return path


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | dict | list | None) else str(value)
