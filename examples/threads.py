"""Parallel reasoning: the model spawns threads, which think side by side, and goes on after them.

A scripted model stands in for one that was trained to spawn, so that the program runs offline.
"""

from forethought import methods
from forethought.scaffolding import ScaffoldingLlm, ScriptedWorker

SPAWN = "<Parallel><Outlines><Outline>1: 6 * 6</Outline><Outline>2: 9 * 9</Outline></Outlines>"


def model(prompt: str, index: int) -> str:
    """Spawns two threads, computes in each, and adds their results."""
    if prompt.endswith("</Parallel>"):
        return " The sum is 117."
    if "<Thread>" in prompt:
        return " 36.</Thread>" if prompt.endswith("1:") else " 81.</Thread>"
    return SPAWN


method = methods.create("parallel_thinking")
with ScaffoldingLlm(method, ScriptedWorker(model), trace=True) as llm:
    result = llm.generate("What is 6 * 6 + 9 * 9?")
print(result.output.text)
print(result.trace.text())  # the threads, and where they were joined
assert result.output.text.endswith("The sum is 117.")
