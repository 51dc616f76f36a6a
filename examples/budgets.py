"""Limits: a thinking budget of the model, and a budget of everything that a method does."""

from forethought import LLM, SamplingParams, assets, methods
from forethought.errors import BudgetExceeded
from forethought.scaffolding import Budget, EngineWorker, ScaffoldingLlm

question = {"role": "user", "content": assets.problems()[0]["question"]}

llm = LLM()
prompt = llm.chat_prompt([question])
for budget in (0, 20, None):
    params = SamplingParams(temperature=0.0, max_tokens=120, thinking_budget=budget)
    output = llm.generate(prompt, params).outputs[0]
    answer = (output.text or "").rpartition("</think>")[2].strip()
    print(f"thinking_budget={budget!s:5} tokens: {len(output.token_ids):3} answer: {answer!r}")

vote = methods.create("majority_vote", default_sample_num=4)
with EngineWorker(llm) as worker, ScaffoldingLlm(vote, {"generation": worker}) as scaffolding:
    result = scaffolding.generate_async(
        prompt, sampling_params={"temperature": 0.8, "seed": 1}, budget=Budget(tokens=60)
    )
    try:
        print("within 60 tokens:", result.result().output.text)
    except BudgetExceeded as error:
        print("stopped:", error.what)
