"""Dynasor tells of the moment at which it ends a chain."""

from forethought.methods import DynasorGenerationController
from forethought.methods.parts.probe import PROBE_SUFFIX
from forethought.scaffolding import ScaffoldingLlm, ScriptedWorker
from forethought.scaffolding.result import Stage

CHAIN = "so it is 6, and 6 again, and still 6 after all of that"


def exits(threshold: int, answers: list[str]) -> list[Stage]:
    """The stages that tell of an early end, where probes answer so."""

    def script(prompt: str, index: int) -> str:
        if not prompt.endswith(PROBE_SUFFIX):
            return CHAIN
        return answers[min(len(prompt) // 10, len(answers)) - 1] + "} and so on"

    controller = DynasorGenerationController(certainty_threshold=threshold, chunk_size=10)
    worker = ScriptedWorker(script)
    with ScaffoldingLlm(controller, {controller.WorkerTag.GENERATION: worker}) as llm:
        result = llm.generate_async("q")
        stages = [e.output for e in result.events(stages=True) if isinstance(e.output, Stage)]
        result.result(timeout=120)
    return [stage for stage in stages if stage.name == "early_exit"]


def test_the_early_end_is_told_with_its_answer_and_the_tokens_kept():
    (stage,) = exits(2, ["6"] * 20)
    assert stage.why == "2 probes in a row agree"
    assert stage.fields == {"answer": "6", "at": 20}


def test_a_chain_that_ends_by_itself_tells_of_none():
    assert exits(9, ["6"] * 20) == []
