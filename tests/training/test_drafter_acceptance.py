"""Replayed acceptance: hand-made texts, and the slow twin that really drafts."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forethought.training.drafter.acceptance import replay  # noqa: E402


def speculate(choose, text, draft_len):
    """Drafts token by token and compares: (steps, accepted)."""
    steps = accepted = 0
    known = list(text[:1])
    while len(known) < len(text):
        draft: list[int] = []
        while len(draft) < draft_len:
            draft.append(choose(tuple(known + draft)))
        kept = 0
        while kept < draft_len and len(known) < len(text) and draft[kept] == text[len(known)]:
            known.append(draft[kept])
            kept += 1
        known += text[len(known) : len(known) + 1]
        steps, accepted = steps + 1, accepted + kept
    return steps, accepted


@pytest.mark.parametrize("draft_len", [1, 3, 5, 8])
def test_the_replay_of_one_pass_accepts_what_drafting_accepts(draft_len):
    rng = random.Random(draft_len)
    guesses = {}

    def choose(known):
        return guesses.setdefault(known, rng.choice("aab"))

    texts = ["".join(rng.choices("aab", k=60)) for _ in range(20)]
    agreements = [[choose(tuple(t[:i])) == t[i] for i in range(len(t))] for t in texts]
    drafted = [speculate(choose, list(text), draft_len) for text in texts]
    found = replay(agreements, draft_len)
    assert found.steps == sum(steps for steps, _ in drafted)
    assert found.accepted == sum(accepted for _, accepted in drafted)


def test_full_agreement_needs_one_step_for_each_draft_and_its_bonus_token():
    """50 tokens: one from the prefill, 49 in ceil(49 / 5) = 10 steps of 4 drafts and a bonus."""
    found = replay([[True] * 50], 4)
    assert found.steps == 10
    assert found.by_position[0] == 1.0


def test_no_agreement_needs_a_step_for_each_token():
    found = replay([[False] * 50], 4)
    assert (found.steps, found.accepted, found.mean_length) == (49, 0, 1.0)
    assert found.by_position == (0.0, 0.0, 0.0, 0.0)
