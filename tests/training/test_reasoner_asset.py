"""The embedded reasoner as shipped: it fits, loads, and thinks as its model card says."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from forethought.assets import problems, reasoner_dir  # noqa: E402
from forethought.methods.parts.probe import PROBE_SUFFIX  # noqa: E402
from forethought.training.chat_tokenizer import prompt_text  # noqa: E402
from reasoner.evaluate import Solver, boxed_answer  # noqa: E402


@pytest.fixture(scope="module")
def solver():
    return Solver(reasoner_dir())


def test_the_directory_stays_under_twelve_megabytes():
    assert sum(path.stat().st_size for path in reasoner_dir().iterdir()) < 12_000_000


def test_the_chat_template_opens_the_think_block(solver):
    messages = [{"role": "user", "content": "How many?"}]
    text = solver.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == prompt_text("How many?")


def test_the_model_has_two_to_five_million_parameters(solver):
    assert 2e6 < solver.model.num_parameters() < 5e6


def test_it_thinks_rechecks_and_boxes_right_answers(solver):
    """16 greedy solutions; at the card's accuracy fewer than 8 right has a chance below 1e-3."""
    sample = problems()[:16]
    prompts = [solver.encode(prompt_text(problem["question"])) for problem in sample]
    texts = [solver.tokenizer.decode(ids) for ids in solver.complete(prompts, limit=600)]
    right = [boxed_answer(t) == p["answer"] for t, p in zip(texts, sample, strict=True)]
    assert sum(right) >= 8
    assert all(text.count("</think>") == 1 for text in texts)


def test_it_doubts_before_the_first_step_and_answers_after_the_last(solver):
    question = "Tom has 12 apples. He buys 5 more. He loses 3. How many apples does Tom have now?"
    thought = (
        "He buys 5 more: 12 + 5 = 17.\nHe loses 3: 17 - 3 = 14.\nSo the answer is 14.\n"
        "Wait, let me check that again.\n"
    )
    start = prompt_text(question)
    cuts = [solver.encode(text + PROBE_SUFFIX) for text in (start, start + thought)]
    early, late = (solver.tokenizer.decode(ids) for ids in solver.complete(cuts, limit=12))
    assert early.split("}")[0] == "hmm"
    assert late.split("}")[0] == "14"
