"""Workers that read each other, in turns or at once: what each has in sight, and when they stop."""

from __future__ import annotations

import copy
import pickle

import pytest
from openai import AsyncOpenAI

from engines import expect_empty
from forethought import LLM, methods
from forethought.errors import ParameterError
from forethought.methods.hogwild import CHECK, FINAL, OPENING, HogwildController
from forethought.scaffolding import (
    AttentionGroup,
    Budget,
    ChatTask,
    Controller,
    EngineWorker,
    GenerationTask,
    OpenaiWorker,
    ScaffoldingLlm,
    ScaffoldingOutput,
    ScriptedWorker,
)
from openai_server import serving
from scripted import answer
from tokens import speaking

SAID = {
    ("Alice", 1): "I take 6 x 6.\n\n",
    ("Bob", 1): "I take 9 x 9.\n\n",
    ("Alice", 2): "36.\n\n",
    ("Bob", 2): "81, so \\boxed{117}.\n\n",
}
ALICE = [
    f"p{OPENING}\nAlice: ",
    f"p{OPENING}\nAlice: I take 6 x 6.\n\n\nBob: I take 9 x 9.\nAlice: ",
    f"p{OPENING}\nAlice: I take 6 x 6.\n\n\nBob: I take 9 x 9.\nAlice: 36.\n\n"
    f"\nBob: 81, so \\boxed{{117}}.{FINAL}",
]
BOB = [
    f"p{OPENING}\nBob: ",
    f"p{OPENING}\nBob: I take 9 x 9.\n\n\nAlice: I take 6 x 6.\nBob: ",
]


def says(prompt, index=0):
    """What the worker who is to go on writes in this turn."""
    if prompt.endswith(FINAL):
        return " 117."
    name = prompt.removesuffix(CHECK).rpartition("\n")[2].partition(":")[0]
    turn = prompt.count(f"\n{name}: ")
    return SAID.get((name, turn), "more\n\n")


def run(worker=None, *, params=None, budget=None, **settings):
    controller = methods.create("hogwild_turns", **settings)
    worker = worker or ScriptedWorker(says)
    return answer(controller, worker, "p", sampling_params=params, budget=budget)


def told(result):
    return result.output.meta["hogwild_turns"]


def test_each_worker_reads_behind_its_own_turn_what_the_others_wrote_in_it():
    worker = ScriptedWorker(says)
    result = run(worker)
    assert worker.prompts == [ALICE[0], BOB[0], ALICE[1], BOB[1], ALICE[2]]
    assert result.output.text == " 117."
    exchanged = [*zip(ALICE[:2], ALICE[1:], ["I take 6 x 6.", "36."], strict=True)]
    exchanged.append((BOB[0], BOB[1], "I take 9 x 9."))
    assert told(result) == {
        "turns": 2,
        "texts": {
            "Alice": SAID["Alice", 1] + SAID["Alice", 2],
            "Bob": SAID["Bob", 1] + SAID["Bob", 2],
        },
        "exchanged_tokens": sum(len(after) - len(b) - len(own) for b, after, own in exchanged),
        "budget_ended": False,
    }


def test_workers_stream_to_observers_under_their_names_and_the_text_is_the_final_answer():
    controller = methods.create("hogwild_turns", streaming=True)
    tags = methods.worker_tags(controller)
    with ScaffoldingLlm(controller, dict.fromkeys(tags, ScriptedWorker(says))) as llm:
        result = llm.generate_async("p")
        written: dict[tuple[str, str], str] = {}
        for event in result.events():
            fields = event.fields or {"worker": "", "name": ""}
            of = (fields["worker"], fields["name"])
            written[of] = written.get(of, "") + event.output.text
        assert {of: text.replace("\n\n", "") for of, text in written.items() if of[1]} == {
            (0, "Alice"): "I take 6 x 6.36.",
            (1, "Bob"): "I take 9 x 9.81, so \\boxed{117}.",
        }
        assert written["", ""] == " 117."
        seen = [partial.cur_output.text for partial in llm.generate_async("p")]
    assert seen[-1] == " 117."
    assert all(" 117.".startswith(text) for text in seen)


def test_a_server_leads_to_the_same_decisions_and_does_not_tell_what_reading_costs():
    with serving() as server:

        def pieces(body):
            text, stops = says(body["prompt"]), body.get("stop") or ()
            stop = next((stop for stop in stops if stop in text), None)
            server.extra_choice = {"stop_reason": stop}
            return [*(text.partition(stop)[0] if stop else text)]

        server.says = pieces
        client = AsyncOpenAI(base_url=server.url, api_key="none", timeout=60)
        result = run(OpenaiWorker(client, "tiny"))
    assert result.output.text == " 117."
    assert told(result) == {**told(run()), "exchanged_tokens": None}


def test_the_turns_end_at_their_number_and_are_as_long_as_set():
    worker = ScriptedWorker(lambda prompt, _: says(prompt).replace("boxed", "bold"))
    result = run(worker, max_turns=3, turn_tokens=5, params={"max_tokens": 3})
    assert told(result)["turns"] == 3
    assert [call.task.max_tokens for call in worker.calls] == [5] * 6 + [3]
    assert told(result)["texts"]["Alice"] == "I tak36.\n\nmore\n\n"
    assert result.output.text == " 11"


def test_a_worker_that_has_ended_still_reads_the_others_before_the_final_answer():
    def script(prompt, index):
        if prompt.endswith(FINAL):
            return "x"
        return "done" if prompt.endswith("\nAlice: ") else "b\n\n"

    worker = ScriptedWorker(script)
    result = run(worker, max_turns=3)
    assert told(result)["texts"] == {"Alice": "done", "Bob": "b\n\nb\n\nb\n\n"}
    assert worker.prompts[-1] == f"p{OPENING}\nAlice: done\nBob: b\nBob: b\nBob: b{FINAL}"
    assert sum("\nAlice: " in prompt[-9:] for prompt in worker.prompts) == 1


def test_the_turns_end_when_all_workers_have():
    assert told(run(ScriptedWorker(lambda prompt, _: "done")))["turns"] == 1


@pytest.mark.parametrize(("check_every", "asked"), [(0, []), (2, [2, 4]), (3, [3])])
def test_workers_are_asked_regularly_whether_their_work_is_redundant(check_every, asked):
    worker = ScriptedWorker(lambda prompt, _: "more\n\n")
    run(worker, check_every=check_every, max_turns=5)
    turns = [call.prompt for call in worker.calls if call.prompt.endswith(("Alice: ", CHECK))]
    alice = [prompt for prompt in turns if prompt.startswith(ALICE[0])]
    assert [n for n, prompt in enumerate(alice, 1) if prompt.endswith(CHECK)] == asked


def test_three_workers_draw_differently_and_each_reads_two():
    worker = ScriptedWorker(lambda prompt, _: "a\n\n")
    names = ["Alice", "Bob", "Eve"]
    run(worker, workers=names, max_turns=2, params={"seed": 4, "temperature": 0.5})
    second = worker.calls[3:6]
    assert [call.prompt.rpartition("a\n\n")[2] for call in second] == [
        "\nBob: a\nEve: a\nAlice: ",
        "\nAlice: a\nEve: a\nBob: ",
        "\nAlice: a\nBob: a\nEve: ",
    ]
    seeds = [call.task.seed for call in worker.calls]
    assert len(set(seeds[:3])) == 3
    assert seeds[3:6] == seeds[:3]
    assert seeds[6] == 4


def test_the_text_so_far_is_returned_when_the_budget_is_spent():
    result = run(budget=Budget(calls=3))
    assert (result.output.text, result.output.finish_reason) == (SAID["Alice", 1], "length")
    assert told(result)["budget_ended"] is True
    result = run(ScriptedWorker(lambda *_: "x"), budget=Budget(calls=1))
    assert (result.output.text, result.spent_budget) == ("x", "calls")


def test_mistakes_are_refused_by_name():
    wrong = ({"workers": ["A"]}, {"workers": ["A", "A"]}, {"turn_tokens": 0}, {"max_turns": "x"})
    for settings in wrong:
        with pytest.raises(ParameterError, match=f"invalid {next(iter(settings))}"):
            methods.create("hogwild_turns", **settings)
    with pytest.raises(ParameterError, match="cannot honour n"):
        run(params={"n": 2})
    with pytest.raises(ParameterError, match="token ids"):
        answer(methods.create("hogwild_turns"), ScriptedWorker(), [1, 2])


def test_on_the_engine_a_turn_prefills_only_what_the_others_wrote():
    cache = {"max_tokens": 4096, "page_size": 4, "enable_block_reuse": False}
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4}
    with LLM(speaking(), dtype="float32", kv_cache_config=cache) as llm:
        worker = EngineWorker(llm)
        result = run(
            worker,
            max_turns=3,
            turn_tokens=6,
            step_end="",
            opening="",
            check_every=0,
            params=params,
        )
        worker.shutdown()
        expect_empty(llm._frontend.engine)
        opened = sum(len(llm.tokenizer(f"p\n{name}: ").input_ids) for name in ("Alice", "Bob"))
        # Each of five forks computes its last token again, or one more that is no whole text.
        most = opened + told(result)["exchanged_tokens"] + 2 * 5
        assert opened < result.usage.prefilled <= most
        assert result.usage.decoded == 2 * 3 * 6 + 4


# ---- workers that share pages ------------------------------------------------------------------

CACHE = {"max_tokens": 4096, "page_size": 4}
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 6}
SHARING = {"opening": "", "check_every": 0, "max_turns": 3, "turn_tokens": 8, "final": "\nSo: "}


def shared(llm, params=GREEDY, **settings):
    """The result of workers on an engine."""
    worker = EngineWorker(llm)
    controller = methods.create("hogwild", **{**SHARING, **settings})
    result = answer(controller, worker, "p", sampling_params=params)
    worker.shutdown()
    expect_empty(llm._frontend.engine)
    return result


@pytest.fixture(scope="module")
def llm():
    with LLM(speaking(), dtype="float32", kv_cache_config=CACHE) as llm:
        yield llm


def test_workers_that_share_pages_are_prompted_with_their_own_text_alone():
    worker = ScriptedWorker(lambda prompt, _: " 117." if prompt.endswith(FINAL) else "abcd")
    controller = methods.create("hogwild", turn_tokens=3, max_turns=2, check_every=2)
    result = answer(controller, worker, "p", sampling_params={"max_tokens": 9})
    first = [f"p{OPENING}\n{name}: " for name in ("Alice", "Bob")]
    asked = [f"{prompt}abc\n{CHECK}" for prompt in first]
    assert worker.prompts[:2] == first
    assert worker.prompts[2:] == [*asked, f"{asked[0]}abc{FINAL}"]
    assert [call.task.max_tokens for call in worker.calls] == [3, 3, 3, 3, 9]
    assert result.output.text == " 117."
    assert result.output.meta["hogwild"] == {
        "turns": 2,
        "texts": {"Alice": "abcabc", "Bob": "abcabc"},
        "budget_ended": False,
    }


def test_workers_write_something_else_where_they_do_not_see_each_other(llm, monkeypatch):
    result = shared(llm)
    texts = result.output.meta["hogwild"]["texts"]
    assert all(texts.values())
    monkeypatch.setattr(HogwildController, "_join", lambda *_: None)
    apart = shared(llm).output.meta["hogwild"]["texts"]
    assert texts["Alice"] != apart["Alice"]
    assert texts["Bob"] != apart["Bob"]


def test_workers_that_share_pages_answer_the_same_again(llm):
    assert shared(llm).output == shared(llm).output


def test_reading_each_other_computes_nothing_twice():
    with LLM(
        speaking(), dtype="float32", kv_cache_config={**CACHE, "enable_block_reuse": False}
    ) as llm:
        result = shared(llm, workers=("Alice", "Bob", "Eve"))
        question = len(llm.tokenizer("p").input_ids)
        opened = [len(llm.tokenizer(f"p\n{n}: ").input_ids) for n in ("Alice", "Bob", "Eve")]
        final = len(llm.tokenizer(SHARING["final"]).input_ids)
    # The question is computed once. Each fork may compute its last token again.
    most = question + sum(size - question for size in opened) + final + 2 * 7
    assert result.usage.prefilled <= most
    assert result.usage.decoded == 3 * 3 * 8 + 6


def test_a_worker_that_has_ended_is_still_read(llm):
    engine = llm._frontend.engine
    seen = []
    original = engine.attend_to

    def watched(sequence, others):
        seen.append(len(others))
        original(sequence, others)

    engine.attend_to = watched
    try:
        result = shared(llm, params={**GREEDY, "ignore_eos": False}, max_turns=12)
    finally:
        del engine.attend_to
    turns = result.output.meta["hogwild"]["turns"]
    assert len(seen) < 2 * turns  # one of them has ended early
    assert set(seen) == {1}


def test_a_group_begins_together_or_not_at_all(llm):
    worker = EngineWorker(llm)
    fine, wrong = GenerationTask(input_str="p\nA: "), GenerationTask(input_str="p\nB: ")
    for task in (fine, wrong):
        task.max_tokens = 4
    wrong.stop_token_ids = [10**6]
    AttentionGroup([fine, wrong], "p\n")

    assert answer(yields(fine, wrong), worker, "p").output.text == "over"
    assert "token id 1000000" in str(wrong.error)
    assert "begin together" in str(fine.error)
    worker.shutdown()
    expect_empty(llm._frontend.engine)


@pytest.mark.parametrize("calls", [3, 4])
def test_a_budget_of_calls_that_ends_within_a_turn_ends_the_method(llm, calls):
    """A worker that was to begin with one that is refused is refused as well."""
    worker = EngineWorker(llm)
    controller = methods.create("hogwild", **SHARING)
    budget = Budget(calls=calls)
    result = answer(controller, worker, "p", sampling_params=GREEDY, budget=budget)
    worker.shutdown()
    expect_empty(llm._frontend.engine)
    told = result.output.meta["hogwild"]
    assert told["budget_ended"]
    assert told["turns"] == calls // 2
    assert result.output.text == told["texts"]["Alice"]


def test_a_server_refuses_tasks_that_read_each_other():
    with serving() as server:
        client = AsyncOpenAI(base_url=server.url, api_key="none", timeout=60)
        with pytest.raises(ParameterError, match="hogwild_turns"):
            answer(methods.create("hogwild"), OpenaiWorker(client, "tiny"), "p")


def yields(*tasks):
    """A controller that yields tasks and keeps what they fail with."""

    class Yields(Controller):
        WorkerTag = HogwildController.WorkerTag

        def process(self, given, **kwargs):
            for task in tasks:
                task.worker_tag, task.on_failure = self.WorkerTag.GENERATION, "drop"
            yield list(tasks)
            given[0].result = ScaffoldingOutput("over")

    return Yields()


def test_a_task_that_the_group_does_not_wait_for_is_refused(llm):
    worker = EngineWorker(llm)
    task = GenerationTask(input_str="p\nA: ", max_tokens=2)
    AttentionGroup([task], "p\n")
    copied = task.copy()
    answer(yields(copied), worker, "p")
    assert "it is a copy" in str(copied.error)
    answer(yields(task), worker, "p")
    assert task.error is None
    answer(yields(task), worker, "p")
    assert "the group has begun" in str(task.error)
    worker.shutdown()
    expect_empty(llm._frontend.engine)


def test_a_group_takes_texts_alone_on_engines_alone(llm):
    worker = EngineWorker(llm)
    ids, chat = GenerationTask(input_tokens=[5, 6]), ChatTask.create_from_prompt("p")
    for task in (ids, chat):
        AttentionGroup([task], "p")
        answer(yields(task), worker, "p")
        assert "has no text" in str(task.error)
    worker.shutdown()
    with serving() as server:
        client = AsyncOpenAI(base_url=server.url, api_key="none", timeout=60)
        answer(yields(chat), OpenaiWorker(client, "tiny"), "p")
        assert "cannot read each other" in str(chat.error)
    expect_empty(llm._frontend.engine)


def test_a_deep_copy_of_a_task_is_in_no_group():
    task = GenerationTask(input_str="p")
    group = AttentionGroup([task], "p")
    assert task.attention_group is group
    assert copy.deepcopy(task).attention_group is None
    assert pickle.loads(pickle.dumps(task)).attention_group is None


def test_a_crowd_of_workers_is_refused():
    with pytest.raises(ParameterError, match="too many workers"):
        HogwildController([f"worker {number}" for number in range(65)])
