"""Train the embedded reasoner from scratch, on problems that the project generates itself.

    python -m reasoner.train --seed 0 --out runs/reasoner

Three phases: a foundation of arithmetic (drills and first derivations), a finish that adds
re-checks, slips and elicited answers, and a polish with drills of the calculations that take
longest to learn. Interrupt it at any time; the same command resumes. It logs losses, arithmetic
skill and probe skill on problems that it does not train on, and ends with a model directory in
``OUT/model``.

    python -m reasoner.train --start DIR --steps 80 --rate 4e-4 \\
        --batch 4096 --share 0.5 --seed 1 --out OUT

tunes a trained reasoner, whose tokenizer it keeps, with whole traces above all: what follows the
derivation can so be changed in a short run.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from forethought.evaluation.generated.arithmetic import sample_problem
from forethought.training.from_scratch import (
    Curriculum,
    Example,
    MakeExample,
    Mix,
    loss_of,
    main,
    share_predicted,
)
from forethought.training.llama import Llama
from reasoner.corpus import make_example, probed, values_only
from reasoner.on_policy import KINDS, Continued
from reasoner.samples import load_samples
from reasoner.vocabulary import train_tokenizer

FOUNDATION = {"drill": 0.25, "derivation": 0.63, "probed": 0.12}
FINISH = {"drill": 0.10, "derivation": 0.15, "probed": 0.15, "full": 0.38, "probed_full": 0.22}
POLISH = {
    "drill": 0.05, "hard_drill": 0.18, "derivation": 0.17, "probed": 0.13, "full": 0.28,
    "probed_full": 0.19,
}  # fmt: skip
TUNING = {
    "drill": 0.08, "hard_drill": 0.08, "judged": 0.25, "derivation": 0.06, "probed": 0.04,
    "full": 0.30, "full_chain": 0.10, "probed_full": 0.09,
}  # fmt: skip
ON_SAMPLES = {
    "drill": 0.04, "hard_drill": 0.06, "judged": 0.10, "derivation": 0.10, "probed": 0.07,
    "full": 0.13, "full_chain": 0.10, "probed_full": 0.08, "slipped": 0.11, "astray": 0.13,
    "right": 0.08,
}  # fmt: skip
FOUNDATION_LENGTH, FINISH_LENGTH = 256, 512
FINISH_FROM, POLISH_FROM = 0.43, 0.85


def mix_at(progress: float) -> tuple[Mix, int]:
    """Shares of the kinds of example, and tokens of a row, at a point 0..1 of the run."""
    if progress < FINISH_FROM:
        return FOUNDATION, FOUNDATION_LENGTH
    return FINISH if progress < POLISH_FROM else POLISH, FINISH_LENGTH


def skill(network: Llama, tokenizer: Tokenizer, kind: str, count: int = 200) -> float:
    """Share of held-out problems on which every marked token is the network's first choice.

    ``kind`` is ``values`` (results of a first derivation) or ``probe`` (the elicited answer).
    """
    rng = random.Random(7)
    examples: list[Example] = []
    for _ in range(count):
        problem = sample_problem(rng, held_out=True)
        if kind == "values":
            examples.append(values_only(tokenizer, rng, problem))
        else:
            example = probed(tokenizer, rng, problem, whole=True)
            last_gap = len(example.ids) - 1 - example.trained[::-1].index(False)
            marks = [i > last_gap for i in range(len(example.ids))]
            examples.append(Example(example.ids, marks))
    return share_predicted(network, examples)


def check(network: Llama, tokenizer: Tokenizer) -> dict[str, float]:
    """Losses of each kind of the finish, arithmetic skill and probe skill."""
    losses = {kind: loss_of(network, tokenizer, make_example, kind) for kind in FINISH}
    skills = {kind: skill(network, tokenizer, kind) for kind in ("values", "probe")}
    return skills | losses


def on_samples(files: Sequence[Path]) -> tuple[MakeExample, Mix]:
    """Examples and mix of a tuning that begins many examples with samples of the reasoner."""
    samples = [sample for file in files for sample in load_samples(file)]
    continued = Continued(samples, random.Random(0))

    def example(tokenizer: Tokenizer, rng: random.Random, kind: str) -> Example:
        make = continued.example if kind in KINDS else make_example
        return make(tokenizer, rng, kind)

    missing = {kind for kind, pairs in continued.pairs.items() if not pairs}
    return example, {kind: share for kind, share in ON_SAMPLES.items() if kind not in missing}


CURRICULUM = Curriculum(
    train_tokenizer, mix_at, make_example, (TUNING, FINISH_LENGTH), check, on_samples
)

if __name__ == "__main__":
    main(CURRICULUM, __doc__.splitlines()[0], steps=2700)
