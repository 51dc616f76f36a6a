"""Training examples of the instruct model: its kinds, their weights, and its tokenizer.

Every turn of a dialogue is tokenised alone, as the texts that methods append to a sequence
are. ``drill`` is bare calculation, as of the countdown model.
"""

import random
from collections.abc import Callable, Mapping

from tokenizers import Tokenizer

from countdown.corpus import drill
from forethought.training.chat_tokenizer import END, THINK, THINK_END, train_bpe
from forethought.training.from_scratch import Example, Mix, Span, encode
from instruct import facts, judging, teams
from instruct.judging import Dialogue

VOCABULARY_SIZE = 768
WORDS = r"\d|[()]|,? ?[A-Za-z']+(?: (?=\d)|\n)?| ?[^\sA-Za-z\d'()]+(?: (?=\d)|\n)?|\s"
DRILL = "drill"

KINDS: Mapping[str, Callable[[random.Random], Dialogue]] = {
    **judging.KINDS,
    "turns": teams.turns,
    "threads": teams.threads,
    "documented": facts.documented,
    "followed": facts.followed,
    "slept": facts.slept,
}
"""Kind -> a new dialogue of it."""
SHARES: Mix = {
    "plain": 0.27,
    "revised": 0.09,
    "refined": 0.09,
    "verified": 0.05,
    "restarted": 0.04,
    "valued": 0.07,
    "scored": 0.03,
    "compared": 0.03,
    "criticised": 0.04,
    "ranked": 0.03,
    "fused": 0.04,
    "commented": 0.03,
    "approved": 0.03,
    "turns": 0.06,
    "threads": 0.07,
    "documented": 0.04,
    "followed": 0.05,
    "slept": 0.05,
    DRILL: 0.04,
}


def train_tokenizer(seed: int = 0, samples: int = 150) -> Tokenizer:
    """Learn the merges from fresh dialogues, the same number of each kind."""
    rng = random.Random(seed)
    texts = []
    for kind in sorted(KINDS):
        for _ in range(samples):
            texts += [turn.text for turn in KINDS[kind](rng)]
    markers = (END, THINK, THINK_END, "<|user|>", "<|assistant|>")
    for marker in markers:
        texts = [text.replace(marker, "") for text in texts]
    return train_bpe(texts, VOCABULARY_SIZE, WORDS)


def encoded(tokenizer: Tokenizer, dialogue: Dialogue) -> Example:
    """The tokens of a dialogue, each turn tokenised alone."""
    ids: list[int] = []
    trained: list[bool] = []
    for turn in dialogue:
        part = encode(tokenizer, [Span(turn.text, turn.trained)])
        ids += part.ids
        trained += part.trained
    return Example(ids, trained)


def make_example(tokenizer: Tokenizer, rng: random.Random, kind: str) -> Example:
    """A new example of the given kind."""
    if kind == DRILL:
        return drill(tokenizer, rng)
    return encoded(tokenizer, KINDS[kind](rng))
