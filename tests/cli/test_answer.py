"""Printing one answer as it comes."""

import pytest

from forethought.cli.backend import Answer, Respondent
from forethought.errors import TaskError
from forethought.outputs import SpeculationMetrics, Usage
from forethought.scaffolding import (
    Controller,
    Delta,
    NativeGenerationController,
    ParallelProcess,
    ScaffoldingOutput,
    ScriptedWorker,
)


class Says(Controller):
    """Streams some pieces and then answers something."""

    def __init__(self, pieces, answer):
        super().__init__()
        self.pieces, self.answer = pieces, answer

    def process(self, tasks, **kwargs):
        for piece in self.pieces:
            yield Delta(piece)
        tasks[0].output_str = self.answer


def respond(controller, worker=None):
    written = []
    respondent = Respondent(controller, worker or ScriptedWorker(["unused"]))
    try:
        return respondent.answer("p", {}, written.append), "".join(written)
    finally:
        respondent.close()


@pytest.mark.parametrize(
    ("pieces", "answer", "written"),
    [
        ([], "whole", "whole"),
        (["wh", "ole"], "whole", "whole"),
        (["wh"], "whole", "whole"),
        (["think"], "whole", "think\nwhole"),
    ],
)
def test_what_was_not_streamed_is_written_in_the_end(pieces, answer, written):
    found, text = respond(Says(pieces, answer))
    assert found.text == answer
    assert text == written


def test_streams_of_parallel_branches_are_not_shown():
    class Two(Controller):
        WorkerTag = NativeGenerationController.WorkerTag

        def process(self, tasks, **kwargs):
            inner = NativeGenerationController(streaming=True)
            copies = [task.copy() for task in tasks * 2]
            yield ParallelProcess([inner, inner], [[copy] for copy in copies])
            tasks[0].output_str = "both"

    assert respond(Two(), ScriptedWorker(["one", "two"]))[1] == "both"


def test_a_failure_is_raised_as_it_is():
    def fail(prompt: str, index: int) -> str:
        raise OSError("no route")

    with pytest.raises(TaskError, match="no route"):
        respond(NativeGenerationController(), ScriptedWorker(fail))


def test_an_interrupt_while_writing_ends_the_request():
    def interrupt(text):
        raise KeyboardInterrupt

    respondent = Respondent(Says(["a", "b"], "ab"), ScriptedWorker(["unused"]))
    with pytest.raises(KeyboardInterrupt):
        respondent.answer("p", {}, interrupt)
    respondent.close()


def test_one_token_is_no_plural():
    one = Answer(ScaffoldingOutput("a", [1], finish_reason="stop"), Usage(decoded=1), 0.5)
    assert one.summary().startswith("1 token in 0.50 s")
    two = Answer(ScaffoldingOutput("ab", [1, 2], finish_reason="stop"), Usage(decoded=2), 0.5)
    assert two.summary().startswith("2 tokens in 0.50 s")


def test_the_speed_stands_beside_the_tokens_that_it_counts():
    vote = Answer(ScaffoldingOutput("a", [1] * 10, finish_reason="stop"), Usage(decoded=80), 2.0)
    assert vote.summary().startswith("10 tokens of 80 generated in 2.00 s (40 tokens/s)")


@pytest.mark.parametrize("pays", [True, False])
def test_few_tokens_per_step_are_explained_where_goodput_control_chose_them(pays):
    output = ScaffoldingOutput("a", [1] * 10, finish_reason="stop")
    metrics = SpeculationMetrics(steps=10, drafted=2)
    answer = Answer(output, Usage(decoded=10), 1.0, metrics, pays)
    why = " (drafts only where they pay)" if pays else ""
    assert answer.summary().endswith(f", 1.0 tokens per step{why}, finished by stop")
