"""Two models: SpecReason has a small model write the steps, and the base model score them.

The two are the embedded reasoner and its draft model, which share nothing here but the machine. A
step is scored by the base model's own probability of it, as neither follows instructions.
"""

from forethought import assets
from forethought.methods import SpecReasonController
from forethought.scaffolding import EngineWorker, ScaffoldingLlm
from forethought.training.chat_tokenizer import prompt_text

prompt = prompt_text(assets.problems()[0]["question"])
method = SpecReasonController(scorer="likelihood", step_end="\n", step_tokens=64)
params = {"temperature": 0.0, "max_tokens": 200}

with (
    EngineWorker.init_with_new_llm() as base,
    EngineWorker.init_with_new_llm(assets.drafter_dir()) as small,
):
    workers = {method.WorkerTag.BASE: base, method.WorkerTag.SMALL: small}
    with ScaffoldingLlm(method, workers) as llm:
        result = llm.generate(prompt, sampling_params=params)
    print(result.output.text)
    print(result.output.meta["specreason"])
