"""The four recipes that the package shows itself with, tuned to the embedded reasoner.

Greedy decoding, Dynasor-CoT on the same chains, a vote of eight samples, and both together. The
reasoner's chains are some hundreds of tokens long, so it is probed more often than a large model.
"""

from __future__ import annotations

from functools import partial

from forethought.decoding import NGramDecodingConfig
from forethought.evaluation.recipe import Recipe, recipe

DRAFTS = NGramDecodingConfig(max_draft_len=8, max_matching_ngram_size=3, is_use_oldest=False)
"""The reasoner checks its own steps, and so repeats itself: n-grams guess it well."""
PROBING = {"chunk_size": 16, "certainty_threshold": 2}
SAMPLES = 8
TEMPERATURE = 0.8


def recipes() -> list[Recipe]:
    """Plain, Dynasor-CoT, majority vote, and Dynasor-CoT under majority vote."""
    sampled = partial(recipe, samples=SAMPLES, temperature=TEMPERATURE)
    return [
        recipe("plain"),
        recipe("dynasor", settings=PROBING),
        sampled("majority_vote"),
        sampled("dynasor+majority_vote", settings=PROBING),
    ]
