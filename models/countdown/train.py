"""Train the embedded countdown model from scratch, on problems that the project generates itself.

    python -m countdown.train --seed 0 --out runs/countdown

Two phases: a foundation of drills and three numbers, then a finish with four numbers and elicited
answers. Interrupt it at any time; the same command resumes. It ends with a model directory in
``OUT/model``.
"""

import random
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from countdown.corpus import make_example, train_tokenizer
from forethought.config.sampling import SamplingParams
from forethought.evaluation.generated.countdown import SIZES, sample_problem
from forethought.llm.llm import LLM
from forethought.rewards.verifier import verifier
from forethought.training.chat_tokenizer import prompt_text
from forethought.training.from_scratch import Curriculum, Mix, export_model, loss_of, main
from forethought.training.llama import Llama

FOUNDATION = {"drill": 0.20, "three": 0.60, "four": 0.20}
FINISH = {"drill": 0.04, "three": 0.42, "four": 0.46, "probed": 0.08}
FOUNDATION_LENGTH, FINISH_LENGTH = 256, 512
FINISH_FROM = 0.4


def mix_at(progress: float) -> tuple[Mix, int]:
    """Shares of the kinds of example, and tokens of a row, at a point 0..1 of the run."""
    if progress < FINISH_FROM:
        return FOUNDATION, FOUNDATION_LENGTH
    return FINISH, FINISH_LENGTH


def check(network: Llama, tokenizer: Tokenizer, count: int = 60) -> dict[str, float]:
    """Losses of each kind, and shares of held-out problems solved, greedily and by a sample."""
    values = {kind: loss_of(network, tokenizer, make_example, kind) for kind in FINISH}
    rng, accepts = random.Random(7), verifier("countdown")
    with tempfile.TemporaryDirectory() as directory:
        export_model(network, tokenizer, Path(directory))
        with LLM(directory, dtype="float32") as llm:
            for size in SIZES:
                problems = [sample_problem(rng, size, held_out=True) for _ in range(count)]
                prompts = [prompt_text(problem.question) for problem in problems]
                for name, heat in (("greedy", 0.0), ("sample", 1.0)):
                    params = SamplingParams(max_tokens=400, temperature=heat, seed=1)
                    outputs = llm.generate(prompts, params)
                    solved = [
                        accepts(problem.question, output.outputs[0].text)
                        for problem, output in zip(problems, outputs, strict=True)
                    ]
                    values[f"{name}_{size}"] = sum(solved) / count
    return values


CURRICULUM = Curriculum(train_tokenizer, mix_at, make_example, (FINISH, FINISH_LENGTH), check)

if __name__ == "__main__":
    main(CURRICULUM, __doc__.splitlines()[0], steps=2000, batch=8192)
