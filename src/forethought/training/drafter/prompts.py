"""What the embedded reasoner is asked while its draft model learns: problems, and probes of them.

The problems come from the training side of the reasoner's own wall
(:func:`~forethought.training.reasoner.problems.is_held_out`), so the draft model, too, has never
seen a chain of calculations of the shipped test problems. Knows nothing about models.
"""

import random

from forethought.training.reasoner.problems import sample_problem
from forethought.training.reasoner.traces import ANSWER_SUFFIX, CLOSING_SUFFIX, PROBE_SUFFIX
from forethought.training.reasoner.vocabulary import THINK_END, prompt_text


def problem_prompts(rng: random.Random, count: int, *, held_out: bool = False) -> list[str]:
    """``count`` fresh problems from the wanted side of the wall, in the chat template."""
    return [prompt_text(sample_problem(rng, held_out=held_out).question) for _ in range(count)]


def probe_suffix(text: str, rng: random.Random) -> str:
    """What is put behind an interrupted trace to elicit an answer, as often as methods do it."""
    if THINK_END in text:
        return ANSWER_SUFFIX
    return PROBE_SUFFIX if rng.random() < 0.85 else CLOSING_SUFFIX
