"""The draft vocabulary: which tokens are in it, and that drafters trained with it are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.training import draft_vocabulary
from forethought.training.draft_vocabulary import (
    DraftVocabulary,
    DraftVocabularySettings,
    frequent_tokens,
)
from forethought.training.recipes.table import recipe
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from forethought.training.trainer import DRAFTER, Trainer, seeded
from models import VOCAB, prompts

PROMPTS = prompts((4, 7, 9, 5, 6, 8))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "redrafter": {"blocks": 1, "draft_len": 3, "share": 1.0},
    "mtp": {"depths": 2},
    "eagle3": {"ttt_length": 3},
}


def test_the_most_frequent_tokens_of_answers_are_taken() -> None:
    texts = [Text([9, 9, 9, 4, 5, 5, 3], 3), Text([8, 4, 7, 5], 1)]
    for size, ids in ((100, [3, 4, 5, 7]), (3, [3, 4, 5]), (1, [5])):
        assert frequent_tokens(texts, size).tolist() == ids


def test_a_small_vocabulary_is_drafted_from_whole_and_a_large_one_is_not(
    teacher: Teacher, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = DraftVocabulary.of(DraftVocabularySettings(), texts, teacher)
    assert whole.ids is None
    assert len(whole) == VOCAB
    monkeypatch.setattr(draft_vocabulary, "MAX_TOKENS", 20)
    frequent = DraftVocabulary.of(DraftVocabularySettings(), texts, teacher)
    assert frequent.ids is not None
    assert frequent.ids.tolist() == frequent_tokens(texts, 20).tolist()


def test_tokens_outside_of_it_have_no_probability() -> None:
    vocabulary = DraftVocabulary(10, torch.tensor([2, 5, 7]))
    rows, probs = vocabulary.restrict(
        torch.tensor([[5, 3, 2], [9, 8, 7]]), torch.tensor([[0.5, 0.3, 0.1], [0.6, 0.3, 0.1]])
    )
    assert rows[0, [0, 2]].tolist() == [1, 0]
    assert rows[1, 2] == 2
    torch.testing.assert_close(probs, torch.tensor([[0.5, 0.0, 0.1], [0.0, 0.0, 0.1]]))


def test_a_drafter_to_begin_with_has_its_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="leave the size out"):
        DraftVocabularySettings(start=tmp_path, draft_vocab_size=10)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_a_part_of_the_vocabulary_are_accepted_and_change_no_token(
    kind: str, teacher: Teacher, texts: list[Text], tmp_path: Path
) -> None:
    """Overfitted answers; the wrong ids would hardly ever be accepted."""
    chosen = recipe(kind)
    fields = {"steps": 60, "rate": 0.01, "batch_tokens": 256, "check_every": 1000, **KINDS[kind]}
    settings = chosen.Settings(**fields, draft_vocab_size=60)
    with seeded(0):
        built = chosen.build(settings, texts, teacher)
    Trainer(built, settings, tmp_path).run()
    answers = teacher.generate(
        PROMPTS, [GREEDY] * len(PROMPTS), chosen.decoding(tmp_path / DRAFTER)
    )
    assert answers.token_ids == [text.token_ids[text.prompt_length :] for text in texts]
    assert answers.metrics.accepted / answers.metrics.steps > 0.5
    again = chosen.Settings(**fields, start=tmp_path / DRAFTER)
    begun = chosen.build(again, texts, teacher).module.state_dict()
    for name, weight in built.module.state_dict().items():
        assert weight.shape == begun[name].shape
