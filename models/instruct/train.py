"""Train the embedded instruct model from scratch, on dialogues that the project generates itself.

    python -m instruct.train --seed 0 --out runs/instruct --workers 2

Three phases: a foundation of calculations and short dialogues, all kinds, and again all kinds with
more questions about facts. Interrupt it at any
time; the same command resumes. It ends with a model directory in ``OUT/model``.
"""

import random
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from forethought.config.sampling import SamplingParams
from forethought.evaluation.generated.countdown import SIZES, sample_problem
from forethought.llm.llm import LLM
from forethought.rewards.verifier import verifier
from forethought.training.chat_tokenizer import prompt_text
from forethought.training.from_scratch import Curriculum, Mix, export_model, loss_of, main
from forethought.training.llama import Llama, LlamaShape
from instruct.corpus import SHARES, make_example, train_tokenizer

FOUNDATION: Mix = {
    "plain": 0.55,
    "drill": 0.20,
    "verified": 0.05,
    "valued": 0.05,
    "scored": 0.05,
    "documented": 0.05,
    "slept": 0.05,
}
LAST: Mix = {**SHARES, "documented": 0.12, "followed": 0.12, "slept": 0.2}
"""Facts are learned late: to look them up takes longer than to calculate."""
FOUNDATION_LENGTH, FINISH_LENGTH = 512, 1024
FINISH_FROM, LAST_FROM = 0.3, 0.6
SHAPE = LlamaShape(max_positions=2048)


def mix_at(progress: float) -> tuple[Mix, int]:
    """Shares of the kinds of example, and tokens of a row, at a point 0..1 of the run."""
    if progress < FINISH_FROM:
        return FOUNDATION, FOUNDATION_LENGTH
    return (SHARES if progress < LAST_FROM else LAST), FINISH_LENGTH


def check(network: Llama, tokenizer: Tokenizer, count: int = 100) -> dict[str, float]:
    """Losses of each kind, and shares of held-out problems that an attempt solves."""
    values = {kind: loss_of(network, tokenizer, make_example, kind) for kind in SHARES}
    rng, accepts = random.Random(7), verifier("countdown")
    with tempfile.TemporaryDirectory() as directory:
        export_model(network, tokenizer, Path(directory))
        with LLM(directory, dtype="float32") as llm:
            for size in SIZES:
                problems = [sample_problem(rng, size, held_out=True) for _ in range(count)]
                prompts = [prompt_text(problem.question) for problem in problems]
                outputs = llm.generate(prompts, SamplingParams(max_tokens=400, temperature=0.0))
                solved = [
                    accepts(problem.question, output.outputs[0].text)
                    for problem, output in zip(problems, outputs, strict=True)
                ]
                values[f"greedy_{size}"] = sum(solved) / count
    return values


CURRICULUM = Curriculum(
    train_tokenizer, mix_at, make_example, (LAST, FINISH_LENGTH), check, shape=SHAPE
)

if __name__ == "__main__":
    main(CURRICULUM, __doc__.splitlines()[0], steps=2800, batch=12_288)
