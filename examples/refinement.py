"""Refinement: an answer is criticised and written again, or revised in turn and voted on.

A scripted model stands in for one that can do this, so that the program runs offline.
"""

from forethought import methods
from forethought.scaffolding import ScaffoldingLlm, ScriptedWorker


def model(prompt: str, index: int) -> str:
    """Is wrong at first, finds that out, and corrects itself."""
    if prompt.rstrip().endswith("7 * 8?"):
        return "It is \\boxed{54}."
    if "\\boxed{56}" in prompt:
        return "It is correct: \\boxed{56}."
    if prompt.count("\\boxed{54}") == 1 and "54 is wrong" not in prompt:
        return "7 * 8 is 56, so 54 is wrong."
    return "It is \\boxed{56}."


for name in ("self_refine", "sequential_revision"):
    worker = ScriptedWorker(model)
    method = methods.create(name)
    workers = worker
    with ScaffoldingLlm(method, workers) as llm:
        result = llm.generate("7 * 8?")
    print(f"{name}: {result.output.text} after {len(worker.calls)} generations")
