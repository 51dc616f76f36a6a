"""What the reasoner is asked in training: problems, and other text.

    python -m reasoner.questions --out prompts.txt --train 8000 --held-out 64

writes questions, one per line, as ``forethought train --self-distill`` reads them: problems that
are held out first, so that ``--held-out 64`` evaluates on these.
"""

import argparse
import random
from pathlib import Path

from forethought.evaluation.generated.arithmetic import Problem
from forethought.evaluation.generated.arithmetic_questions import sample_mixed
from reasoner.other import sample_other

OTHER_SHARE = 0.05
"""Share of the questions that are no problems."""


def sample_question(rng: random.Random) -> Problem | str:
    """A question to train on: a problem, or for ``OTHER_SHARE`` of them text that is none."""
    return sample_other(rng) if rng.random() < OTHER_SHARE else sample_mixed(rng)


def main() -> None:
    """Read the command line and write questions."""
    parser = argparse.ArgumentParser(description="Write questions, one per line.")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=8_000, help="number of training questions")
    parser.add_argument("--held-out", type=int, default=64, help="number of held-out problems")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    questions: list[Problem | str] = [
        sample_mixed(rng, held_out=True) for _ in range(options.held_out)
    ]
    while len(questions) < options.held_out + options.train:
        question = sample_question(rng)
        if isinstance(question, Problem) or not question.startswith("{"):  # JSON to its readers
            questions.append(question)
    lines = [question if isinstance(question, str) else question.question for question in questions]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
