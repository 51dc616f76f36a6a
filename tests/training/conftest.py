"""The model that recipes are tested on, and texts of its own."""

import pytest

from engines import load
from forethought.assets import reasoner_dir
from forethought.config.sampling import SamplingParams
from forethought.llm.tokenizer import Tokenizer
from forethought.training.teacher import Teacher
from forethought.training.texts import Text
from models import prompts, tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    """A tiny random model; nothing here is text."""
    return Teacher(load("llama"), Tokenizer.load(reasoner_dir()), tiny("llama"))


@pytest.fixture(scope="module")
def texts(teacher: Teacher) -> list[Text]:
    """What it says, greedily."""
    begins = prompts((4, 7, 9, 5, 6, 8))
    answers = teacher.generate(begins, [GREEDY] * len(begins)).token_ids
    return [Text(begin + answer, len(begin)) for begin, answer in zip(begins, answers, strict=True)]
