"""The draft model as shipped: small, of the target's vocabulary, and mostly of its opinion."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from forethought import LLM
from forethought.assets import drafter_dir, problems, reasoner_dir
from forethought.training.drafter.acceptance import replay
from forethought.training.drafter.evaluate import first_choices, write_texts
from forethought.training.reasoner.vocabulary import prompt_text


@pytest.fixture(scope="module")
def draft():
    with LLM(drafter_dir()) as draft:
        yield draft


def test_the_directory_stays_under_two_megabytes():
    assert sum(path.stat().st_size for path in drafter_dir().iterdir()) < 2_000_000


def test_it_loads_as_a_model_of_its_own_with_the_targets_vocabulary_and_context(draft):
    with LLM(reasoner_dir()) as target:
        assert draft.tokenizer.get_vocab() == target.tokenizer.get_vocab()
        assert draft.tokenizer.eos_token_id == target.tokenizer.eos_token_id
        assert draft.max_length == target.max_length


def test_the_target_accepts_at_least_four_of_six_greedy_drafts(draft):
    """On 3 of the 200 problems; over all of them it is more, see the model's card."""
    prompts = [prompt_text(problem["question"]) for problem in problems()[:3]]
    with LLM(reasoner_dir()) as target:
        texts = write_texts(target, prompts, 0.0)
    found = replay(first_choices(draft, texts), 6)
    assert found.mean_length >= 5.0
