"""The reasoner's tokenizer: byte-level BPE of 512 tokens; every digit is a token of its own.

A number's leading space belongs to the word before it, so that ``23 + 15 = 38`` is eight tokens.
"""

import random

from tokenizers import Tokenizer

from forethought.evaluation.generated.arithmetic import sample_problem
from forethought.evaluation.generated.arithmetic_questions import sample_varied
from forethought.methods.parts.probe import ANSWER_SUFFIX, ANSWER_SUFFIX_WITH_MARKER, PROBE_SUFFIX
from forethought.training.chat_tokenizer import THINK_END, train_bpe
from reasoner.other import SENTENCE, THOUGHT, sample_other
from reasoner.traces import write_trace

SIZE = 512
WORDS = r"\d| ?[A-Za-z']+(?: (?=\d))?| ?[^\sA-Za-z\d']+(?: (?=\d)|\n)?|\s"


def train_tokenizer(seed: int = 0, samples: int = 4000) -> Tokenizer:
    """Learn the merges from freshly generated problems, traces and elicitation suffixes."""
    rng = random.Random(seed)
    suffixes = (PROBE_SUFFIX, ANSWER_SUFFIX, ANSWER_SUFFIX_WITH_MARKER.replace(THINK_END, ""))
    texts = [*suffixes] * (samples // 4)
    for _ in range(samples):
        problem = sample_varied(rng) if rng.random() < 0.2 else sample_problem(rng)
        trace = write_trace(problem, rng, slip_rate=0.35).text.replace(THINK_END, "")
        texts += [problem.question, trace]
    for _ in range(samples // 20):
        texts += [sample_other(rng), THOUGHT, SENTENCE]
    return train_bpe(texts, SIZE, WORDS)
