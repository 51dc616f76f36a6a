"""Acceptance of a drafter: the engine decodes prompts with it and counts accepted tokens.

    python -m forethought.training.acceptance --kind draft-model --problems 200 --lengths 3 5 8

The program measures a drafter of the embedded reasoner on the reasoner's test problems, which
neither was trained on. It prints a line for each temperature and draft length, and one JSON line
last. :class:`AcceptanceEvaluation` is also what a training run measures its drafter with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forethought.assets import drafter_dir, heads_dir, reasoner_dir
from forethought.config.drafter_table import recipes
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.evaluation.generated.arithmetic import fixed_test_problems
from forethought.training.chat_tokenizer import prompt_text
from forethought.training.recipes.table import recipe
from forethought.training.teacher import Teacher


class AcceptanceEvaluation:
    """Decodes some prompts, none of them trained on, with a drafter, at a temperature."""

    def __init__(
        self,
        teacher: Teacher,
        prompts: Sequence[list[int]],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> None:
        self._teacher, self._prompts = teacher, prompts
        self._params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)

    def __call__(self, drafter: DecodingBaseConfig) -> dict[str, float]:
        """Measure a drafter: ``acceptance_length``, mean tokens per step, that of the target
        included; ``accepted_k`` for k = 1, 2, ...: share of the steps that accepted k drafted
        tokens or more.

        Raises UsageError if the drafter cannot be loaded.
        """
        params = [self._params] * len(self._prompts)
        metrics = self._teacher.generate(self._prompts, params, drafter).metrics
        results = {"acceptance_length": metrics.mean_acceptance_length or 1.0}
        for position, count in enumerate(metrics.accepted_by_position, start=1):
            results[f"accepted_{position}"] = count / metrics.steps
        return results


def with_draft_len(config: DecodingBaseConfig, draft_len: int | None) -> DecodingBaseConfig:
    """The same drafter with drafts of ``draft_len`` tokens; None: as it is."""
    if draft_len is None:
        return config
    fields = config.model_dump(exclude_unset=True) | {"max_draft_len": draft_len}
    return DecodingBaseConfig.from_dict(fields)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=list(recipes()), default="draft-model")
    parser.add_argument("--drafter", type=Path, help="directory (default: the shipped one)")
    parser.add_argument("--target", type=Path, default=reasoner_dir())
    parser.add_argument("--problems", type=int, default=200, help="number of test problems")
    parser.add_argument("--max-tokens", type=int, default=600, help="of an answer")
    parser.add_argument("--lengths", type=int, nargs="+", help="draft lengths (default: its own)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    return parser.parse_args()


def main() -> None:
    """Read the command line, measure, print."""
    options = _options()
    shipped = drafter_dir() if options.kind == "draft-model" else heads_dir(options.kind)
    config = recipe(options.kind).decoding(options.drafter or shipped)
    teacher = Teacher.load(options.target)
    questions = [problem.question for problem in fixed_test_problems(options.problems)]
    prompts = [teacher.tokenizer.encode_more(prompt_text(question)) for question in questions]
    rows: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        evaluation = AcceptanceEvaluation(teacher, prompts, options.max_tokens, temperature)
        for draft_len in options.lengths or [None]:
            results = evaluation(with_draft_len(config, draft_len))
            shares = " ".join(
                f"{results[name]:.2f}" for name in results if name != "acceptance_length"
            )
            sys.stdout.write(
                f"T={temperature}  K={draft_len or config.max_draft_len}"
                f"  {results['acceptance_length']:.2f} tokens per step"
                f"  accepted by position {shares}\n"
            )
            rows.append({"temperature": temperature, "draft_len": draft_len, **results})
    sys.stdout.write(json.dumps({"rows": rows}) + "\n")


if __name__ == "__main__":
    main()
