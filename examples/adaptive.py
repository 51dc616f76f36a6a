"""Adaptive compute: Dynasor-CoT asks forks of the thought for the answer, until they agree."""

from forethought import assets, methods
from forethought.scaffolding import EngineWorker, ScaffoldingLlm, Stage

question = {"role": "user", "content": assets.problems()[0]["question"]}
params = {"temperature": 0.0, "max_tokens": 300}

with EngineWorker.init_with_new_llm() as worker:
    prompt = worker.llm.chat_prompt([question])
    for name, settings in {"plain": {}, "dynasor": {"chunk_size": 16}}.items():
        method = methods.create(name, **settings)
        workers = worker
        with ScaffoldingLlm(method, workers, trace=True) as llm:
            result = llm.generate(prompt, sampling_params=params)
        stages = [e.output.name for e in result.events(stages=True) if isinstance(e.output, Stage)]
        print(f"{name}: {result.usage.completion_tokens} tokens, stages: {stages}")
        print((result.output.text or "")[-60:])
