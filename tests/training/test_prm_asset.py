"""The process reward model as shipped: what it is, and that it serves best of N."""

import json

import pytest
from transformers import AutoConfig

from forethought.assets import embedded_dir, reasoner_dir
from forethought.methods import BestOfNController
from forethought.scaffolding import (
    EngineWorker,
    NativeGenerationController,
    NativeRewardController,
    PRMController,
    RewardWorker,
    ScaffoldingLlm,
)


@pytest.fixture(scope="module")
def directory():
    return embedded_dir("forethought/prm")


def test_it_is_a_small_token_classifier_that_reads_the_reasoners_prompts(directory):
    config = AutoConfig.from_pretrained(directory)
    assert config.architectures == ["LlamaForTokenClassification"]
    assert config.id2label == {0: "bad", 1: "good"}
    assert json.loads((directory / "config.json").read_text())["step_format"] == "continuation"
    assert sum(file.stat().st_size for file in directory.iterdir()) < 8 * 10**6
    template = "chat_template.jinja"
    assert (directory / template).read_text() == (reasoner_dir() / template).read_text()


def test_it_chooses_among_samples_of_the_reasoner():
    question = "Tom has 10 nuts. He buys 5 more. How many nuts does Tom have now?"
    with (
        RewardWorker("forethought/prm") as judge,
        EngineWorker.init_with_new_llm(dtype="float32") as generator,
    ):
        controller = BestOfNController(
            NativeGenerationController({"temperature": 0.8, "max_tokens": 60, "seed": 1}),
            PRMController.of(judge, aggregation="last"),
            default_sample_num=3,
        )
        workers = {
            NativeGenerationController.WorkerTag.GENERATION: generator,
            NativeRewardController.WorkerTag.REWARD: judge,
        }
        with ScaffoldingLlm(controller, workers) as llm:
            prompt = f"<|user|>{question}<|assistant|><think>\n"
            result = llm.generate(prompt)
    scores = result.output.meta["best_of_n"]["scores"]
    assert len(scores) == 3
    assert all(0.0 < score < 1.0 for score in scores)
