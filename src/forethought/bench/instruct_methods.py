"""The tables of the methods that instruct a model: on problems, on documents, on contexts.

They are measured on ``forethought/instruct``, which was trained on what these methods ask of a
model. Documents are the facts of one world, and a context is asked ten questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from forethought.bench.method_tasks import CONTEXT_END, measured_examples, measured_world
from forethought.bench.methods import PLAIN, MethodBench
from forethought.evaluation.generated.facts import FactQuestion
from forethought.evaluation.recipe import Recipe
from forethought.methods.sleep_time import SleepTimeController
from forethought.methods.spct import SPCTRewardController
from forethought.rewards.checker_controller import CheckerController
from forethought.rewards.genrm_controller import YES_NO_PROMPT, GenRMController
from forethought.rewards.judge import CompareRewardController, JudgeRewardController
from forethought.rewards.verifier import verifier
from forethought.scaffolding.controller import Controller, NativeGenerationController
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.task import GenerationTask
from forethought.training.chat_tokenizer import prompt_text

QUESTION = "{question}"
CHAT_FORMAT = prompt_text(QUESTION)
"""The model's own format, for methods that put texts together."""
THREADS_FORMAT = f"{CHAT_FORMAT}<Parallel>\n"
"""Opens the first block of threads: without it the model may also search alone."""
_REPLY: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 450}


class InstructBench(MethodBench):
    """The rows of the methods that ask the model about answers, and of those that divide a search.

    ``best_of_n`` by the exact checker is what a perfect reward would make of the same samples.
    """

    left_out: ClassVar[Mapping[str, str]] = {}

    def recipes(self) -> list[Recipe]:
        """One for each row; plain decoding first, then the vote."""
        n = self.num_samples
        return [
            self.recipe_of(PLAIN),
            self.recipe_of(f"majority_vote@{n}"),
            *(self._chosen_by(n, name, one) for name, one in self._rewards().items()),
            self.recipe_of(
                f"tree_of_thoughts@{n // 2}",
                num_thoughts=3,
                step_token="\n",
                max_steps=16,
                num_evaluations=1,
            ),
            self.recipe_of("self_refine"),
            self.recipe_of("sequential_revision"),
            self.recipe_of(
                "sequential_revision, genrm",
                selection="reward",
                reward_controller=_verifying(1),
            ),
            self.recipe_of(f"adaptive_compute@{2 * n}"),
            self.recipe_of("archon", pipeline=_pipeline(n, {"type": "ranker", "top_k": 2})),
            self.recipe_of("archon, verifier", pipeline=_pipeline(n, {"type": "verifier"})),
            replace(
                self.recipe_of("hogwild_turns", turn_tokens=160, max_turns=4),
                prompt_format=CHAT_FORMAT,
            ),
            replace(
                self.recipe_of("hogwild", turn_tokens=64, max_turns=10, check_every=0),
                prompt_format=CHAT_FORMAT,
            ),
            replace(
                self.recipe_of("parallel_thinking", thread_tokens=160, max_spawns=2),
                prompt_format=THREADS_FORMAT,
            ),
            replace(
                self.recipe_of("parallel_thinking", thread_tokens=160, max_spawns=2, join="pages"),
                name="parallel_thinking, pages",
                prompt_format=THREADS_FORMAT,
            ),
        ]

    def _rewards(self) -> dict[str, Controller]:
        return {
            "checker": CheckerController(verifier("countdown")),
            "genrm": _verifying(2),
            "genrm, direct": _verifying(0),
            "judge": JudgeRewardController(sampling_params=_REPLY),
            "compare": CompareRewardController(sampling_params=_REPLY),
            "spct": SPCTRewardController(4, sampling_params={**_REPLY, "temperature": 0.8}),
        }

    def _chosen_by(self, n: int, name: str, reward: Controller) -> Recipe:
        return self.recipe_of(f"best_of_n@{n}, {name}", reward_controller=reward)


def _verifying(num_verifications: int) -> GenRMController:
    """Generative verification. The blank in front of "Yes" is a token of its own for this model."""
    return GenRMController(
        num_verifications, yes_no_prompt=f"{YES_NO_PROMPT} ", verification_tokens=128
    )


def _pipeline(num_samples: int, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Samples, critiques for a ranker, the choice, and a fusion of the chosen ones."""
    drawn = {"type": "generator", "samples": num_samples, "temperature": 0.8}
    critics = [[{"type": "critic"}]] if chosen["type"] == "ranker" else []
    return {"layers": [[drawn], *critics, [chosen], [{"type": "fuser", "temperature": 0.0}]]}


class FactsBench(MethodBench):
    """The rows of the methods that answer from documents, and of an answer without any."""

    left_out: ClassVar[Mapping[str, str]] = {}

    def recipes(self) -> list[Recipe]:
        """One for each row; no documents first, then one of them for each question."""
        alone = replace(self.recipe_of(PLAIN), prompt_format=f"Question: {QUESTION}\nAnswer:")
        return [
            alone,
            *(self._retrieving("drag", count) for count in (1, 2, 4, 8)),
            *(self._retrieving("iterdrag", count) for count in (1, 2, 4)),
        ]

    def _retrieving(self, method: str, count: int) -> Recipe:
        is_iterated = method == "iterdrag"
        settings: dict[str, Any] = {"max_iterations": 3, "line_tokens": 32} if is_iterated else {}
        base = self.recipe_of(
            f"{method}, k = {count}",
            documents=measured_world().documents,
            num_documents=count,
            examples=[_example(example, is_iterated) for example in measured_examples()],
            **settings,
        )
        shown = {"num_documents": count, "num_examples": len(measured_examples())}
        return replace(base, prompt_format=QUESTION, settings=shown)


def _example(question: FactQuestion, is_iterated: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"question": question.text, "answer": question.working}
    return {**fields, "steps": question.steps} if is_iterated else fields


class ContextBench(MethodBench):
    """The rows of questions about contexts, asked at once or after thoughts about them."""

    left_out: ClassVar[Mapping[str, str]] = {}

    def recipes(self) -> list[Recipe]:
        """Two: the context is a part of the prompt, or was thought about before."""
        prompt_format = f"{QUESTION}\n\nAnswer: "
        slept = replace(self.recipe_of(PLAIN), name="sleep_time", controller=SleepTimeByContext())
        return [
            replace(self.recipe_of(PLAIN), prompt_format=prompt_format),
            replace(slept, prompt_format=QUESTION),
        ]


class SleepTimeByContext(Controller):
    """Sleep-time compute for questions after one of several contexts. Thoughts about a context are
    shared by all of its questions, of clones too.
    """

    clone_shares = ("controllers",)

    def __init__(self) -> None:
        super().__init__()
        self.generation_controller = NativeGenerationController()
        self.controllers: dict[str, SleepTimeController] = {}

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Answer one question."""
        [task] = tasks
        context, _, question = (task.input_str or "").partition(CONTEXT_END)
        if context not in self.controllers:
            controller = SleepTimeController(self.generation_controller, context, sleep_tokens=256)
            self.controllers[context] = controller
        task.input_str = question
        yield from self.controllers[context].clone().process([task], **kwargs)


BENCHES: Mapping[str, type[MethodBench]] = {
    "instruct": InstructBench,
    "facts": FactsBench,
    "context": ContextBench,
}
"""Tasks with rows of their own -> what makes them."""


def bench_of(task: str) -> type[MethodBench]:
    """What makes the rows of a task."""
    return BENCHES.get(task, MethodBench)
