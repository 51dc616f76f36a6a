"""Samples of the reasoner: what it writes for problems of its training, and files of them.

    python -m reasoner.samples --out runs/samples.jsonl [--larger]

draws them; they are a function of the model and the seed. Its reward model is trained on such
samples (``prm``), and itself (``train --samples``).
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from forethought.assets import reasoner_dir
from forethought.config.sampling import SamplingParams
from forethought.evaluation.generated.arithmetic import Problem, Step
from forethought.evaluation.generated.arithmetic_questions import sample_larger, sample_mixed
from forethought.llm.llm import LLM
from forethought.training.chat_tokenizer import prompt_text
from reasoner.labels import is_right
from reasoner.traces import MOST_RECHECKED, write_trace

logger = logging.getLogger(__name__)

TEMPERATURES = (0.8, 1.0, 1.2)
"""Used in turn, problem by problem: the hotter ones have more mistakes to learn from."""
SAMPLES = 8
"""Samples of a problem."""
MAX_TOKENS = 440
"""Most tokens of a sample: the reasoner was trained on contexts of 512 tokens."""
_PART = 64
"""Problems whose samples are drawn and written together."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the reasoner wrote for a problem, after ``<think>``."""

    problem: Problem
    text: str

    @property
    def is_right(self) -> bool:
        """Whether it ends in the problem's answer."""
        return is_right(self.problem, self.text)

    def to_line(self) -> str:
        """Its line in a file of samples."""
        return json.dumps({"problem": asdict(self.problem), "text": self.text})

    @classmethod
    def from_line(cls, line: str) -> Sample:
        """The sample of a line that ``to_line`` wrote."""
        record = json.loads(line)
        fields = record["problem"]
        steps = tuple(Step(**step) for step in fields.pop("steps"))
        problem = Problem(**fields | {"steps": steps, "inputs": tuple(fields["inputs"])})
        return cls(problem, record["text"])


def draw_samples(
    llm: LLM,
    problems: Sequence[Problem],
    temperatures: Sequence[float] = TEMPERATURES,
    seed: int = 0,
) -> Iterator[list[Sample]]:
    """``SAMPLES`` of each problem, the temperatures in turn; part by part."""
    for begin in range(0, len(problems), _PART):
        part = problems[begin : begin + _PART]
        params = [
            SamplingParams(
                temperature=temperatures[number % len(temperatures)],
                n=SAMPLES,
                max_tokens=MAX_TOKENS,
                seed=(seed << 32) + number,
            )
            for number in range(begin, begin + len(part))
        ]
        outputs = llm.generate([prompt_text(problem.question) for problem in part], params)
        yield [
            Sample(problem, completion.text)
            for problem, output in zip(part, outputs, strict=True)
            for completion in output.outputs
        ]


def load_samples(path: Path) -> list[Sample]:
    """The samples of a file."""
    with path.open(encoding="utf-8") as lines:
        return [Sample.from_line(line) for line in lines]


def write_samples(count: int, seed: int) -> list[Sample]:
    """What the generator of the reasoner's training writes, with a slip, up to a random line."""
    rng, samples = random.Random(f"{seed}:written"), list[Sample]()
    for _ in range(count):
        problem = sample_mixed(rng)
        lines = write_trace(problem, rng, slip_rate=1.0).text.splitlines(keepends=True)
        samples.append(Sample(problem, "".join(lines[: rng.randint(1, len(lines))])))
    return samples


def make_samples(path: Path, llm: LLM, problems: Sequence[Problem], seed: int) -> list[Sample]:
    """The samples of the problems; those that ``path`` lacks are drawn and appended."""
    done = len(load_samples(path)) // SAMPLES if path.exists() else 0
    with path.open("a", encoding="utf-8") as file:
        for part in draw_samples(llm, problems[done:], seed=seed + done):
            file.writelines(f"{sample.to_line()}\n" for sample in part)
            file.flush()
            done += len(part) // SAMPLES
            logger.info("samples of %d of %d problems", done, len(problems))
    return load_samples(path)


def main() -> None:
    """Read the command line and draw samples."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description="Draw samples of the reasoner.")
    parser.add_argument("--out", type=Path, required=True, help="file; it is gone on with")
    parser.add_argument("--model", type=Path, default=reasoner_dir(), help="the shipped reasoner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=2500, help=f"to draw {SAMPLES} samples of")
    parser.add_argument(
        "--larger",
        action="store_true",
        help="stories with larger operands than the generator writes traces of",
    )
    options = parser.parse_args()
    rng, steps = random.Random(options.seed), range(1, MOST_RECHECKED + 1)
    problems = [
        sample_larger(rng, steps) if options.larger else sample_mixed(rng)
        for _ in range(options.problems)
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with LLM(options.model) as llm:
        make_samples(options.out, llm, problems, options.seed)


if __name__ == "__main__":
    main()
