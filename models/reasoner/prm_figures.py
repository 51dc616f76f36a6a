"""Figures of a process reward model: per step, and as the judge that picks one of 8 samples.

    python -m reasoner.prm_figures --model runs/prm/model --problems 300

Held-out problems, 8 samples each at temperature 0.8. Beside the reward model: a random sample, the
vote, rewards made of the token confidences of the decode step, and an oracle, which recomputes
every line exactly (``labels.py``) and so shows what a perfect judge of steps would reach.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from forethought.assets import reasoner_dir
from forethought.config.sampling import SamplingParams
from forethought.evaluation.generated.arithmetic import Problem, fixed_test_problems
from forethought.llm.llm import LLM
from forethought.outputs import TokenConfidence
from forethought.rewards.confidence import bottom_groups, lowest_group, mean, tail_mean
from forethought.rewards.prm_controller import AGGREGATIONS
from forethought.training.chat_tokenizer import prompt_text
from reasoner.evaluate import boxed_answer, wilson
from reasoner.labels import label_lines
from reasoner.prm import auc, load_classifier, make_example, step_probabilities
from reasoner.samples import MAX_TOKENS, SAMPLES, Sample

WINDOW = 16
"""Tokens of a group: some two lines; samples have a few hundred tokens."""
NUM_BINS = 10


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the samples of a problem, with what judges it."""

    sample: Sample
    confidences: list[TokenConfidence]
    labels: list[bool]
    """Exact, one per line."""
    steps: list[float]
    """The reward model's probability that each line is good."""

    @property
    def answer(self) -> str:
        """What is in the box."""
        return boxed_answer(self.sample.text)


Group = Sequence[Candidate]
"""The samples of one problem."""
Reward = Callable[[Candidate], float]


def draw(llm: LLM, problems: Sequence[Problem], seed: int) -> list[list[Candidate]]:
    """Samples with their confidences, not judged yet."""
    params = [
        SamplingParams(
            temperature=0.8, n=SAMPLES, max_tokens=MAX_TOKENS, seed=seed + number, confidence=20
        )
        for number in range(len(problems))
    ]
    outputs = llm.generate([prompt_text(problem.question) for problem in problems], params)
    groups = []
    for problem, output in zip(problems, outputs, strict=True):
        samples = [(Sample(problem, completion.text), completion) for completion in output.outputs]
        groups.append(
            [
                Candidate(sample, list(completion.confidences or ()), _labels(sample), [])
                for sample, completion in samples
            ]
        )
    return groups


def judge(groups: Sequence[Group], directory: Path) -> list[list[Candidate]]:
    """The same with the reward model's probabilities."""
    module = load_classifier(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    candidates = [candidate for group in groups for candidate in group]
    examples = [make_example(tokenizer, candidate.sample) for candidate in candidates]
    probabilities = iter(step_probabilities(module, examples))
    return [
        [Candidate(c.sample, c.confidences, c.labels, next(probabilities)) for c in group]
        for group in groups
    ]


def _labels(sample: Sample) -> list[bool]:
    return label_lines(sample.problem, sample.text) or [False]


def step_figures(groups: Sequence[Group]) -> dict[str, float]:
    """How well the probabilities separate good steps from bad ones, and whether they are true."""
    pairs = [
        (score, int(label))
        for group in groups
        for candidate in group
        for score, label in zip(candidate.steps, candidate.labels, strict=True)
    ]
    scores, labels = [score for score, _ in pairs], [label for _, label in pairs]
    right = sum((score > 0.5) == label for score, label in pairs)
    return {
        "steps": len(pairs),
        "good": sum(labels) / len(labels),
        "auc": auc(scores, labels),
        "accuracy": right / len(pairs),
        "brier": sum((score - label) ** 2 for score, label in pairs) / len(pairs),
        "calibration_error": calibration_error(scores, labels),
    }


def calibration_error(scores: Sequence[float], labels: Sequence[int]) -> float:
    """Mean gap between the probability and the share of good ones, over ``NUM_BINS`` equal bins."""
    gaps = [0.0] * NUM_BINS
    for score, label in zip(scores, labels, strict=True):
        gaps[min(NUM_BINS - 1, int(score * NUM_BINS))] += score - label
    return math.fsum(map(abs, gaps)) / len(scores)


def rewards() -> dict[str, Reward]:
    """By name: what a sample is chosen by."""

    def confidence(combine: Callable[[Sequence[float]], float]) -> Reward:
        return lambda c: combine([token.value for token in c.confidences]) if c.confidences else 0.0

    def of_steps(combine: Callable[[Sequence[float]], float]) -> Reward:
        return lambda c: combine(c.steps)

    return {
        **{
            f"reward model, {name}": of_steps(aggregate) for name, aggregate in AGGREGATIONS.items()
        },
        "confidence, mean": confidence(mean),
        "confidence, tail": confidence(lambda values: tail_mean(values, 2 * WINDOW)),
        "confidence, lowest group": confidence(lambda values: lowest_group(values, WINDOW)),
        "confidence, bottom tenth": confidence(lambda values: bottom_groups(values, WINDOW)),
        "log-probability, mean": lambda c: mean([t.logprob for t in c.confidences] or [0.0]),
        "log-probability, lowest group": lambda c: lowest_group(
            [t.logprob for t in c.confidences] or [0.0], WINDOW
        ),
        "oracle (exact recomputation)": lambda c: (
            mean([float(label) for label in c.labels]) + float(all(c.labels))
        ),
    }


def best(group: Group, reward: Reward) -> Candidate:
    """The first of those with the highest reward."""
    return max(group, key=reward)


def vote(group: Group, reward: Reward = lambda candidate: 1.0) -> str:
    """The answer with the largest sum of rewards; of equals, the first seen."""
    sums = Counter[str]()
    for candidate in group:
        if candidate.answer:
            sums[candidate.answer] += reward(candidate)  # type: ignore[assignment]  # a float
    return max(sums, key=sums.__getitem__, default="")


def selection_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Accuracy by each way to get one answer of the samples of a problem."""
    judged, count = rewards(), len(groups)
    num_right = {
        "random sample": sum(mean([float(c.sample.is_right) for c in group]) for group in groups),
        "vote": float(sum(vote(group) == group[0].sample.problem.answer for group in groups)),
    }
    for name, reward in judged.items():
        num_right[name] = float(sum(best(group, reward).sample.is_right for group in groups))
    for name in ("reward model, last", "confidence, mean"):
        right = (vote(group, judged[name]) == group[0].sample.problem.answer for group in groups)
        num_right[f"vote weighted by {name}"] = float(sum(right))
    num_right["any of them"] = float(sum(any(c.sample.is_right for c in group) for group in groups))
    return {name: right / count for name, right in num_right.items()}


def sample_aucs(groups: Sequence[Group]) -> dict[str, float]:
    """AUC of each reward for telling right samples from wrong ones, over all problems."""
    candidates = [candidate for group in groups for candidate in group]
    labels = [int(candidate.sample.is_right) for candidate in candidates]
    return {
        name: auc([reward(c) for c in candidates], labels) for name, reward in rewards().items()
    }


def main() -> None:
    """Read the command line, draw samples, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the reward model")
    parser.add_argument("--target", type=Path, default=reasoner_dir(), help="what it judges")
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seed", type=int, default=7, help="of problems and samples")
    options = parser.parse_args()
    problems = fixed_test_problems(options.problems, seed=options.seed)
    with LLM(options.target, dtype="float32", max_batch_size=64) as llm:
        groups = judge(draw(llm, problems, options.seed), options.model)
    steps, selected, aucs = step_figures(groups), selection_figures(groups), sample_aucs(groups)
    sys.stdout.write("".join(f"{name:34} {value:8.3f}\n" for name, value in steps.items()))
    for name, share in selected.items():
        low, high = wilson(share * len(groups), len(groups))
        auc_text = f" AUC {aucs[name]:.3f}" if name in aucs else ""
        sys.stdout.write(f"{name:38} {share:6.1%} [{low:.1%}, {high:.1%}]{auc_text}\n")
    line = {"problems": len(groups), "steps": steps, "selection": selected, "sample_auc": aucs}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
