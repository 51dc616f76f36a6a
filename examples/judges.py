"""Judges: a model scores or compares the answers of another, and Archon puts such steps in layers.

A scripted model stands in for one that follows instructions, so that the program runs offline.
"""

from forethought import methods
from forethought.scaffolding import ScaffoldingLlm, ScriptedWorker

ANSWERS = ["It is \\boxed{54}.", "It is \\boxed{56}.", "It is \\boxed{65}."]


def model(prompt: str, index: int) -> str:
    """Draws answers, and knows a right one when it grades, compares or ranks them."""
    numbered = [part for part in prompt.split("\n\n") if "boxed" in part]
    right = next((n for n, part in enumerate(numbered, start=1) if "56" in part), 0)
    if "Score: N" in prompt:
        return f"Score: {9 if right else 2}"
    if "Best: N" in prompt:
        return f"Best: {right}"
    if "Ranking" in prompt:
        return "Ranking: [2] > [1] > [3]"
    return ANSWERS[index % len(ANSWERS)]


PIPELINE = {"layers": [[{"type": "generator", "samples": 3}], [{"type": "ranker"}]]}
judged = [
    methods.create("best_of_n", reward_controller=judge, default_sample_num=3)
    for judge in ("judge", "compare")
]
for method in [*judged, methods.create("archon", pipeline=PIPELINE)]:
    worker = ScriptedWorker(model)
    workers = worker
    with ScaffoldingLlm(method, workers, trace=True) as llm:
        result = llm.generate("7 * 8?")
    print(f"{type(method).__name__}: {result.output.text} after {len(worker.calls)} calls")
    assert result.output.text == ANSWERS[1]
