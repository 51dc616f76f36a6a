"""Sampling several answers and choosing one: by vote, by a reward, by a verifier.

The embedded countdown model generates; its own confidence is the reward, and the verifier computes.
"""

from forethought import assets, methods
from forethought.answers.answer_spaces import TextAnswers
from forethought.rewards.verifier import verifier
from forethought.scaffolding import (
    ConfidenceRewardController,
    EngineWorker,
    ScaffoldingLlm,
    extract_answer_from_boxed,
)

question = assets.problems("countdown")[0]["question"]
accepts = verifier("countdown")
params = {"temperature": 0.8, "seed": 1, "max_tokens": 120}
choices = {
    "majority_vote": {
        "default_sample_num": 4,
        "answer_space": TextAnswers(extract_answer_from_boxed),
    },
    "best_of_n": {"default_sample_num": 4, "reward_controller": ConfidenceRewardController()},
    "repeated_sampling": {"default_sample_num": 4, "verifier": "countdown"},
}

with EngineWorker.init_with_new_llm("forethought/countdown") as worker:
    prompt = worker.llm.chat_prompt([{"role": "user", "content": question}])
    for name, settings in choices.items():
        method = methods.create(name, **settings)
        with ScaffoldingLlm(method, {"generation": worker}) as llm:
            result = llm.generate(prompt, question=question, sampling_params=params)
        print(
            f"{name:18} accepted: {accepts(question, result.output.text or '')!s:5} "
            f"tokens: {result.usage.completion_tokens}"
        )
