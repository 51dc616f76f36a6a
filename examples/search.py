"""Search over the steps of an answer: each beam, particle or node is a line of the model's thought.

The embedded countdown model generates, and its own confidence scores the beams. With a process
reward model give ``reward_controller=PRMController.of(reward_worker)`` and the worker's tag.
"""

from forethought import assets, methods
from forethought.rewards.verifier import verifier
from forethought.scaffolding import EngineWorker, ScaffoldingLlm

question = assets.problems("countdown")[0]["question"]
accepts = verifier("countdown")
params = {"temperature": 0.8, "seed": 1, "max_tokens": 200}

with EngineWorker.init_with_new_llm("forethought/countdown") as worker:
    prompt = worker.llm.chat_prompt([{"role": "user", "content": question}])
    for name in ("beam_search", "dvts", "particle_filtering", "particle_gibbs", "mcts"):
        method = methods.create(name, default_sample_num=4, step_token="\n")
        with ScaffoldingLlm(method, {"generation": worker}) as llm:
            result = llm.generate(prompt, question=question, sampling_params=params)
        told = result.output.meta[name]
        print(
            f"{name:20} accepted: {accepts(question, result.output.text or '')!s:5} "
            f"steps: {len(told['step_scores'])}, answers: {len(told['scores'])}, "
            f"tokens: {result.usage.completion_tokens}"
        )
