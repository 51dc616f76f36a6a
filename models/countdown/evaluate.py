"""Measure a countdown model on its held-out problems: greedy, votes, pass@k, sampling until right.

    python -m countdown.evaluate --model forethought/countdown

Draws ``--samples`` samples per problem once and computes every row from them: a vote counts answers
by their value (an answer that is no expression does not vote), and sampling until the checker
accepts takes the samples in order, all of them where none is right. Ends with one JSON line.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

from forethought.answers.answer_extraction import extract_answer_from_boxed
from forethought.assets import PREFIX, problems
from forethought.config.sampling import SamplingParams
from forethought.evaluation.generated.countdown import SIZES
from forethought.evaluation.statistics import Proportion, compare_pairs, mean_pass_at_k
from forethought.llm.llm import LLM
from forethought.rewards.verifier import read_expression, verifier
from forethought.training.chat_tokenizer import prompt_text


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to one problem."""

    accepted: bool
    value: Fraction | None
    """Value of the expression in its box; None where there is none."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws answers of a model."""

    llm: LLM
    temperature: float
    max_tokens: int

    def draw(self, questions: Sequence[str], num_samples: int) -> list[list[Sample]]:
        """So many answers to each question; number i of all questions has the seed i."""
        drawn = [list[Sample]() for _ in questions]
        prompts = [prompt_text(question) for question in questions]
        for seed in range(num_samples):
            params = SamplingParams(
                max_tokens=self.max_tokens, temperature=self.temperature, seed=seed
            )
            outputs = self.llm.generate(prompts, params)
            for question, output, samples in zip(questions, outputs, drawn, strict=True):
                answer = output.outputs[0]
                samples.append(read_sample(question, answer.text, len(answer.token_ids)))
        return drawn


def read_sample(question: str, text: str, num_tokens: int) -> Sample:
    """What an answer is worth."""
    expression = read_expression(extract_answer_from_boxed(text) or "")
    value = None if expression is None else expression.value
    return Sample(verifier("countdown")(question, text), value, num_tokens)


def vote(samples: Sequence[Sample]) -> Sample | None:
    """The first sample with the most frequent value; of equals, the value seen first."""
    counts = Counter(sample.value for sample in samples if sample.value is not None)
    winner = max(counts, key=lambda value: counts[value], default=None)
    return next((s for s in samples if winner is not None and s.value == winner), None)


def until_accepted(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples drawn up to and including the first that the checker accepts."""
    first = next((i for i, sample in enumerate(samples) if sample.accepted), len(samples))
    return samples[: first + 1]


@dataclass(frozen=True, slots=True)
class Row:
    """One method on all problems of a size."""

    method: str
    accuracy: float
    tokens: float
    """Generated a problem, on average."""
    accuracy_ci: tuple[float, float] | None = None
    """Wilson's interval at 95 %; None for an estimate from all samples."""
    paired_p: float | None = None
    """Against greedy decoding, by the exact test of McNemar."""

    def __str__(self) -> str:
        low, high = self.accuracy_ci or (math.nan, math.nan)
        interval = f"[{low:.1%}, {high:.1%}]" if self.accuracy_ci else ""
        p = "" if self.paired_p is None else f"p = {self.paired_p:.2g}"
        shown = f"{self.method:30}{self.accuracy:7.1%}  {interval:17}{self.tokens:8.1f} tokens  {p}"
        return shown.rstrip()


def rows(greedy: Sequence[Sample], drawn: Sequence[Sequence[Sample]]) -> list[Row]:
    """Greedy decoding, votes, sampling until accepted, and pass@k with k samples' tokens."""
    largest = len(drawn[0])
    table_rows = [_row("greedy", greedy, greedy, [sample.num_tokens for sample in greedy])]
    for size in (2, 4, 8, 16, 32):
        if size <= largest:
            parts = [samples[:size] for samples in drawn]
            table_rows.append(
                _row(f"vote of {size}", map(vote, parts), greedy, map(_tokens, parts))
            )
    sought = [until_accepted(samples) for samples in drawn]
    last = [samples[-1] for samples in sought]
    table_rows.append(
        _row(f"until accepted, at most {largest}", last, greedy, map(_tokens, sought))
    )
    mean_tokens = sum(map(_tokens, drawn)) / len(drawn) / largest
    coverage = mean_pass_at_k([[sample.accepted for sample in samples] for samples in drawn])
    return table_rows + [Row(f"pass@{k}", share, k * mean_tokens) for k, share in coverage.items()]


def _row(
    method: str, chosen: Iterable[Sample | None], greedy: Sequence[Sample], tokens: Iterable[int]
) -> Row:
    right = [sample is not None and sample.accepted for sample in chosen]
    correct = Proportion(sum(right), len(right))
    paired = compare_pairs("greedy", [[s.accepted] for s in greedy], [[r] for r in right])
    p = None if method == "greedy" else paired.p
    return Row(method, correct.value, sum(tokens) / len(right), correct.interval(), p)


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.num_tokens for sample in samples)


def main() -> None:
    """Read the command line, evaluate, print a table for each size and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=PREFIX + "countdown")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--problems", type=int, default=150, help="of each size")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-tokens", type=int, default=450)
    options = parser.parse_args()
    shipped, results = problems("countdown"), dict[str, list[Row]]()
    with LLM(options.model, dtype=options.dtype) as llm:
        for size in SIZES:
            questions = [p["question"] for p in shipped if len(p["numbers"]) == size]
            questions = questions[: options.problems]
            greedy = Sampler(llm, 0.0, options.max_tokens).draw(questions, 1)
            sampler = Sampler(llm, options.temperature, options.max_tokens)
            table_rows = rows([s[0] for s in greedy], sampler.draw(questions, options.samples))
            results[f"{size} numbers"] = table_rows
            sys.stdout.write(f"{size} numbers, {len(questions)} problems\n")
            sys.stdout.writelines(f"  {row}\n" for row in table_rows)
    shown = {name: [asdict(row) for row in table_rows] for name, table_rows in results.items()}
    sys.stdout.write(json.dumps(shown) + "\n")


if __name__ == "__main__":
    main()
