"""Sleep-time compute: thoughts are drawn once, and every question continues them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engines import expect_empty
from forethought import LLM, methods
from forethought.errors import BudgetExceeded, ParameterError, TaskError
from forethought.methods.sleep_time import SLEEP_PROMPT, SleepMemory
from forethought.scaffolding import (
    Budget,
    EngineWorker,
    RestoreSessionTask,
    SaveSessionTask,
    ScaffoldingLlm,
    ScriptedWorker,
    Trace,
    Worker,
    replay,
)
from tokens import speaking

CONTEXT = "Ann has 3 bags of 4 nuts."
THOUGHT = "She has 12 nuts."
ASLEEP = CONTEXT + SLEEP_PROMPT + THOUGHT
QUESTIONS = ["How many nuts?", "How many bags?"]
ANSWERS = {"How many nuts?": "12", "How many bags?": "3"}


def says(prompt, index):
    """The thought, or the answer to the question behind it."""
    asked = [question for question in QUESTIONS if question in prompt]
    return ANSWERS[asked[-1]] if asked else THOUGHT


def build(**settings):
    return methods.create("sleep_time", context=CONTEXT, **settings)


def ask(controller, worker, *questions, **options):
    """The results of questions asked one after the other."""
    workers = dict.fromkeys(methods.worker_tags(controller), worker)
    with ScaffoldingLlm(controller, workers, trace=True) as llm:
        return [llm.generate(question, timeout=60, **options) for question in questions]


@pytest.mark.parametrize("snapshot", [None, "nuts"])
def test_an_answer_that_the_budget_cuts_is_returned_without_thoughts_and_question(snapshot):
    controller, budget = build(snapshot=snapshot), Budget(tokens=len(THOUGHT) + 1)
    (result,) = ask(controller, ScriptedWorker(says), QUESTIONS[0], budget=budget)
    assert (result.output.text, result.output.finish_reason) == ("1", "length")
    fresh, few = build(snapshot=snapshot), Budget(tokens=3)
    with pytest.raises(BudgetExceeded):
        ask(fresh, ScriptedWorker(says), QUESTIONS[0], budget=few)


def told(result):
    return result.output.meta["sleep_time"]


def test_the_model_thinks_once_and_all_questions_continue_the_thought():
    worker, controller = ScriptedWorker(says), build()
    first, second = ask(controller, worker, *QUESTIONS)
    assert worker.prompts == [
        CONTEXT + SLEEP_PROMPT,
        f"{ASLEEP}\n\nQuestion: How many nuts?\n\nAnswer: ",
        f"{ASLEEP}\n\nQuestion: How many bags?\n\nAnswer: ",
    ]
    assert [first.output.text, second.output.text] == ["12", "3"]
    assert told(first) == {"origin": "new", "sleep_tokens": len(THOUGHT)}
    assert told(second) == {"origin": "memory", "sleep_tokens": 0}
    assert first.usage.completion_tokens == len(THOUGHT) + len("12")
    assert second.usage.completion_tokens == len("3")


def test_the_thoughts_are_paid_for_by_all_questions_together():
    controller = build()
    ask(controller, ScriptedWorker(says), *QUESTIONS)
    memory = controller.memory
    assert (memory.sleep_tokens, memory.num_questions, memory.test_tokens) == (16, 2, 3)
    assert memory.cost_per_question() == (16 + 10 * 3) / 2
    assert memory.cost_per_question(test_time_price=1) == (16 + 3) / 2


def test_it_can_think_before_there_is_a_question():
    worker, controller = ScriptedWorker(says), build()
    (asleep,) = ask(controller, worker, "", sleep_only=True)
    assert asleep.output.text == ASLEEP
    assert controller.memory.num_questions == 0
    (answered,) = ask(controller, worker, "How many bags?")
    assert told(answered) == {"origin": "memory", "sleep_tokens": 0}
    assert len(worker.calls) == 2


def test_several_thoughts_are_drawn_side_by_side_and_put_one_behind_the_other():
    thoughts = ["One.", "Two.", "Three."]
    worker = ScriptedWorker(lambda prompt, index: thoughts[index] if index < 3 else "x")
    controller = build(num_thoughts=3, anticipated=["Why?"], sleep_tokens=4)
    ask(controller, worker, "q", sampling_params={"seed": 5, "temperature": 0.5, "max_tokens": 9})
    asked = f"{CONTEXT}\n\nQuestions to expect:\n- Why?{SLEEP_PROMPT}"
    assert worker.prompts[:3] == [asked] * 3
    assert worker.prompts[3].startswith(f"{asked}One.\n\nTwo.\n\nThre\n\nQuestion: q")
    assert len({call.task.seed for call in worker.calls[:3]}) == 3
    assert [call.task.max_tokens for call in worker.calls] == [4, 4, 4, 9]
    assert [call.task.temperature for call in worker.calls] == [0.5] * 4


class Gate(ScriptedWorker):
    """Thinks only once both requests wait: one for its thought, one for the other request."""

    def __init__(self):
        super().__init__(says)
        self.is_open = threading.Event()

    async def run_task(self, task):
        await asyncio.to_thread(self.is_open.wait, 60)
        return await super().run_task(task)


def test_a_question_that_comes_meanwhile_waits_for_the_thought():
    worker, controller = Gate(), build()
    workers = dict.fromkeys(methods.worker_tags(controller), worker)
    with ScaffoldingLlm(controller, workers) as llm:
        results = [llm.generate_async(question) for question in QUESTIONS]
        worker.is_open.set()
        texts = [result.result(60).output.text for result in results]
    assert texts == ["12", "3"]
    assert worker.prompts.count(CONTEXT + SLEEP_PROMPT) == 1


def test_questions_of_one_call_share_the_thought():
    worker, controller = ScriptedWorker(says), build()
    workers = dict.fromkeys(methods.worker_tags(controller), worker)
    with ScaffoldingLlm(controller, workers) as llm:
        results = llm.generate(QUESTIONS)
    assert [result.output.text for result in results] == ["12", "3"]
    assert worker.prompts.count(CONTEXT + SLEEP_PROMPT) == 1


def test_the_next_request_thinks_where_one_has_failed():
    controller = build()
    failing = ScriptedWorker(lambda prompt, index: [][0])
    with pytest.raises(TaskError):
        ask(controller, failing, QUESTIONS[0])
    assert controller.memory.text is None
    (answered,) = ask(controller, ScriptedWorker(says), QUESTIONS[0])
    assert told(answered)["origin"] == "new"


def test_a_memory_can_be_given_to_another_controller():
    first = build()
    ask(first, ScriptedWorker(says), QUESTIONS[0])
    voting = build(
        memory=first.memory,
        generation_controller={"method": "majority_vote", "default_sample_num": 3},
    )
    worker = ScriptedWorker(lambda prompt, _: r"\boxed{3}")
    (answered,) = ask(voting, worker, QUESTIONS[1])
    assert told(answered)["origin"] == "memory"
    assert answered.output.meta["majority_vote"]
    assert all(prompt.startswith(ASLEEP) for prompt in worker.prompts)
    assert first.memory.num_questions == 2


def test_a_snapshot_is_restored_instead_of_thinking_again():
    worker = ScriptedWorker(says)
    (first,) = ask(build(snapshot="nuts"), worker, QUESTIONS[0])
    (name,) = worker.snapshots
    assert name.startswith("nuts-")
    assert worker.snapshots[name] == ASLEEP
    (second,) = ask(build(snapshot="nuts"), worker, QUESTIONS[1])  # another process, say
    assert (told(first)["origin"], told(second)["origin"]) == ("new", "snapshot")
    assert second.output.text == "3"
    assert worker.prompts.count(CONTEXT + SLEEP_PROMPT) == 1


@pytest.mark.parametrize(
    "changed", [{"sleep_prompt": "!"}, {"num_thoughts": 2}, {"anticipated": ["Why?"]}]
)
def test_a_snapshot_of_other_thoughts_is_not_mistaken_for_these(changed):
    worker = ScriptedWorker(says)
    ask(build(snapshot="nuts"), worker, QUESTIONS[0])
    (answered,) = ask(build(snapshot="nuts", **changed), worker, QUESTIONS[0])
    assert told(answered)["origin"] == "new"
    assert len(worker.snapshots) == 2


class TextOnly(Worker):
    """A worker without snapshots, as those of servers are."""


def test_a_worker_without_snapshots_is_refused_where_one_is_asked_for():
    with pytest.raises(TaskError, match="RestoreSessionTask"):
        ask(build(snapshot="nuts"), TextOnly(), QUESTIONS[0])


def test_a_trace_of_thinking_and_answering_is_replayed_without_a_model(tmp_path):
    worker = ScriptedWorker(says)
    for controller in (build(snapshot="nuts"), build(snapshot="nuts")):  # thinks; restores
        (result,) = ask(controller, worker, QUESTIONS[0])
        result.trace.save(tmp_path / "trace.json")
        trace = Trace.load(tmp_path / "trace.json")
        again = replay(trace, build(snapshot="nuts"))
        assert again.output.text == result.output.text
        assert again.output.meta == result.output.meta


def test_mistakes_are_refused_by_name():
    for settings in ({"num_thoughts": 0}, {"sleep_tokens": "x"}, {"snapshot": 7}, {"memory": {}}):
        with pytest.raises(ParameterError, match="invalid"):
            build(**settings)
    with pytest.raises(ParameterError, match="needs 'context'"):
        methods.create("sleep_time")
    with pytest.raises(ParameterError, match="token ids"):
        ask(build(), ScriptedWorker(says), [1, 2])
    with pytest.raises(ParameterError, match="no argument 'sleep'"):
        ask(build(), ScriptedWorker(says), "q", sleep=True)


def test_a_memory_is_claimed_by_one_at_a_time():
    memory = SleepMemory()
    assert memory.claim() is None
    busy = memory.claim()
    assert not busy.done()
    memory.release()
    assert busy.done()
    assert memory.claim() is None


# ---- on the engine -------------------------------------------------------------------------------


GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
CACHE = {"max_tokens": 2048, "page_size": 4, "enable_block_reuse": False}  # counts are then exact


def on_engine(directory, *questions):
    """Results over an engine of its own, and what it has prefilled and decoded per question."""
    controller = build(snapshot="nuts", sleep_tokens=10)
    fields = {"dtype": "float32", "kv_cache_config": CACHE, "snapshot_dir": directory}
    results = []
    with LLM(speaking(), **fields) as llm, EngineWorker(llm) as worker:
        for question in questions:
            before = worker.llm.stats
            results += ask(controller, worker, question, sampling_params=GREEDY)
            now = worker.llm.stats
            work = now.prefilled - before.prefilled, now.decoded - before.decoded
            results[-1].work = work
        worker.shutdown()
        expect_empty(llm._frontend.engine)
    return results


def test_the_context_is_computed_once_and_a_question_costs_only_itself(tmp_path):
    first, second = on_engine(tmp_path, *QUESTIONS)
    (again,) = on_engine(tmp_path, QUESTIONS[1])  # another process, say
    assert [told(r)["origin"] for r in (first, second, again)] == ["new", "memory", "snapshot"]
    with LLM(speaking(), dtype="float32", kv_cache_config=CACHE) as llm:
        size = {
            question: len(llm.tokenizer(f"\n\nQuestion: {question}\n\nAnswer: ").input_ids)
            for question in QUESTIONS
        }
        context = len(llm.tokenizer(CONTEXT + SLEEP_PROMPT).input_ids)
    assert second.work == again.work == (size[QUESTIONS[1]] + 1, 8)
    assert first.work == (context + size[QUESTIONS[0]] + 1, 10 + 8)
    assert again.output.token_ids == second.output.token_ids


def test_what_is_no_finished_generation_cannot_be_saved(tmp_path):
    fields = {"dtype": "float32", "kv_cache_config": CACHE, "snapshot_dir": tmp_path}
    with LLM(speaking(), **fields) as llm, EngineWorker(llm) as worker:
        with pytest.raises(ParameterError, match="there is no sequence to save"):
            asyncio.run(worker.run_task(SaveSessionTask(name="x")))
        task = RestoreSessionTask(name="x")
        asyncio.run(worker.run_task(task))
        assert not task.found
        worker.shutdown()
