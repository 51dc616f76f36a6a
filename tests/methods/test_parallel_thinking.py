"""Parallel reasoning: threads that the model spawns run side by side, and are joined in order."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import MappingProxyType

import pytest
from openai import AsyncOpenAI

from engines import expect_empty
from forethought import LLM, SamplingParams, methods
from forethought.errors import BudgetExceeded, ParameterError, UnknownNameError
from forethought.methods.parts.threads import FORMATS, ThreadFormat
from forethought.scaffolding import (
    Budget,
    EngineWorker,
    GenerationTask,
    OpenaiWorker,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
)
from openai_server import serving
from scripted import answer
from tokens import speaking

PLAN = (
    "Two parts.<Parallel><Outlines>\n<Outline>1: 6 x 6</Outline>\n<Outline> 2 : 9 x 9</Outline>"
    "</Outlines>"
)
THREADS = {"1": " 36.", "2": " It is 81."}
JOINED = f"{PLAN}\n<Thread>1: 36.</Thread>\n<Thread>2: It is 81.</Thread>\n</Parallel>"
END = " The sum is 117."
STATS = {
    "spawns": [2],
    "thread_tokens": 4 + 10,
    "longest_path": len(PLAN) - len("</Outlines>") + 10 + len(END),
    "join_tokens": len(JOINED) - len(PLAN) - len("\n<Thread>1: 36."),
    "budget_ended": False,
}


def says(prompt, index=0):
    """A model that has been trained to spawn: what follows a prompt."""
    behind = prompt.rpartition("<Thread>")[2]
    if prompt.endswith("</Parallel>"):
        return END
    if "<Thread>" in prompt:
        return THREADS[behind[0]] + "</Thread>"
    return PLAN if prompt == "p" else "on my own."


def run(worker=None, *, params=None, budget=None, **settings):
    controller = methods.create("parallel_thinking", **settings)
    return answer(
        controller, worker or ScriptedWorker(says), "p", sampling_params=params, budget=budget
    )


def told(result):
    return result.output.meta["parallel_thinking"]


# ---- ThreadWeaver --------------------------------------------------------------------------------


def test_threads_see_the_plan_but_not_each_other_and_the_main_thread_sees_all():
    worker = ScriptedWorker(says)
    result = run(worker)
    assert worker.prompts == [
        "p",
        f"p{PLAN}\n<Thread>1:",
        f"p{PLAN}\n<Thread>2:",
        f"p{JOINED}",
    ]
    assert result.output.text == JOINED + END
    assert result.output.finish_reason == "stop"
    assert told(result) == STATS


def test_the_threads_of_a_spawn_run_at_the_same_time():
    slow = {"1": Reply(" 36.</Thread>", delay=0.0), "2": Reply(" It is 81.</Thread>")}
    running = []

    def script(prompt, index):
        if "<Thread>" in prompt and not prompt.endswith("</Parallel>"):
            running.append([call.ended for call in worker.calls if "<Thread>" in call.prompt])
            return slow[prompt[-2]]
        return says(prompt)

    worker = ScriptedWorker(script)
    run(worker)
    assert running == [[None], [None, None]]  # the first has not ended when the second begins


def on_server(tells_stop_reason=True):
    """The result over HTTP: a piece per character, up to the first stop string."""
    with serving() as server:

        def pieces(body):
            text = says(body["prompt"])
            server.extra_choice = {"stop_reason": None} if tells_stop_reason else {}
            for stop in body.get("stop") or ():
                if stop in text:
                    server.extra_choice = {"stop_reason": stop} if tells_stop_reason else {}
                    return [*text.partition(stop)[0]]
            return [*text]

        server.says = pieces
        client = AsyncOpenAI(base_url=server.url, api_key="none", timeout=60)
        return run(OpenaiWorker(client, "tiny"))


@pytest.mark.parametrize("tells_stop_reason", [True, False])
def test_a_server_leads_to_the_same_decisions_and_does_not_tell_what_joins_cost(tells_stop_reason):
    result = on_server(tells_stop_reason)
    assert result.output.text == JOINED + END
    assert told(result) == {**STATS, "join_tokens": None}


def test_a_model_may_spawn_again_behind_a_join():
    def script(prompt, index):
        if prompt.endswith("</Parallel>") and prompt.count("</Parallel>") == 1:
            return PLAN
        return says(prompt)

    result = run(ScriptedWorker(script))
    assert told(result)["spawns"] == [2, 2]
    assert result.output.text == JOINED + JOINED + END
    result = run(ScriptedWorker(script), max_spawns=1)
    assert told(result)["spawns"] == [2]
    assert result.output.text == JOINED + PLAN


@pytest.mark.parametrize(
    ("plan", "settings"),
    [(PLAN, {"max_threads": 1}), ("<Outlines>no tasks</Outlines>", {})],
)
def test_a_spawn_that_cannot_be_run_is_left_to_the_main_thread(plan, settings):
    worker = ScriptedWorker(lambda prompt, _: plan if prompt == "p" else says(prompt))
    result = run(worker, **settings)
    assert worker.prompts == ["p", f"p{plan}"]
    assert result.output.text == f"{plan}on my own."
    assert told(result)["spawns"] == []


def test_max_tokens_bounds_what_the_main_thread_generates_itself():
    spoken = len(PLAN) - len("</Outlines>")
    result = run(params={"max_tokens": spoken + 5})
    assert result.output.text == JOINED + END[:5]
    assert result.output.finish_reason == "length"
    result = run(params={"max_tokens": 7})
    assert (result.output.text, result.output.finish_reason) == (PLAN[:7], "length")


def test_a_thread_that_is_cut_off_is_joined_as_far_as_it_came():
    result = run(thread_tokens=5)
    assert result.output.text == JOINED.replace(" It is 81.", " It i") + END
    assert told(result)["thread_tokens"] == 4 + 5


def test_stop_strings_of_the_request_end_the_main_thread_alone():
    stopping = lambda prompt, _: says(prompt).replace("81", "81. Now")  # noqa: E731
    result = run(ScriptedWorker(stopping), params={"stop": ["Now", "sum"]})
    assert result.output.text == JOINED.replace("81", "81. Now") + " The "
    assert result.output.stop_reason == "sum"


def test_threads_draw_differently_under_a_seed_and_the_main_thread_keeps_its_own():
    worker = ScriptedWorker(says)
    run(worker, params={"seed": 3, "temperature": 0.7})
    first, one, two, last = (call.task for call in worker.calls)
    assert first.seed == last.seed == 3
    assert len({3, one.seed, two.seed}) == 3
    assert {call.task.temperature for call in worker.calls} == {0.7}


@pytest.mark.parametrize(
    ("tokens", "text", "in_threads"),
    [
        (9, PLAN[:9], False),
        (len(PLAN) - 11 + 6, PLAN.removesuffix("</Outlines>"), True),
        (len(PLAN) - 11 + 14 + 4, JOINED + END[:4], False),
    ],
)
def test_the_text_so_far_is_returned_when_the_budget_is_spent(tokens, text, in_threads):
    result = run(budget=Budget(tokens=tokens))
    assert result.output.text == text
    assert result.output.finish_reason == "length"
    assert told(result)["budget_ended"] is in_threads


def test_without_any_text_the_budget_is_an_error():
    with pytest.raises(BudgetExceeded):
        run(ScriptedWorker(lambda prompt, _: Reply("x", delay=60)), budget=Budget(seconds=0.05))


def test_what_is_streamed_is_the_text_with_what_was_joined():
    controller = methods.create("parallel_thinking")
    workers = dict.fromkeys(methods.worker_tags(controller), ScriptedWorker(says))
    with ScaffoldingLlm(controller, workers) as llm:
        result = llm.generate_async("p")
        stages = [
            event.output.name
            for event in result.events(stages=True)
            if hasattr(event.output, "why")
        ]
    assert [name for name in stages if name in ("spawned", "joined")] == ["spawned", "joined"]

    def streamed(task):
        task.streaming_output_flag = True
        yield from controller.process([task])

    class Streaming(type(controller)):
        def process(self, tasks, **kwargs):
            tasks[0].streaming_output_flag = True
            yield from super().process(tasks, **kwargs)

    with ScaffoldingLlm(Streaming(), workers) as llm:
        seen = [partial.cur_output.text for partial in llm.generate_async("p")]
    assert seen[-1] == JOINED + END
    assert all(seen[-1].startswith(text) for text in seen)


def test_threads_stream_to_observers_and_the_text_is_the_main_thread_with_what_it_joins():
    controller = methods.create("parallel_thinking", streaming=True)
    tags = methods.worker_tags(controller)
    with ScaffoldingLlm(controller, dict.fromkeys(tags, ScriptedWorker(says))) as llm:
        result = llm.generate_async("p")
        written: dict[int | None, str] = {}
        for event in result.events():
            number = (event.fields or {}).get("thread")
            written[number] = written.get(number, "") + event.output.text
        seen = [partial.cur_output.text for partial in llm.generate_async("p")]
    assert written[None] == JOINED + END
    assert [written.get(number) for number in range(3)] == [*THREADS.values(), None]
    assert seen[-1] == JOINED + END
    assert all(seen[-1].startswith(text) for text in seen)


# ---- APR and other formats -----------------------------------------------------------------------


def apr(prompt, index=0):
    """Spawns two threads, of which one returns nothing."""
    if prompt == "p":
        return "I ask.<spawn><msg>What is 6 x 6?</msg><msg>Why?</msg></spawn>"
    if prompt == "What is 6 x 6?\n":
        return "6 x 6 = 30 + 6<join>36</join> and more"
    return "I do not know." if prompt == "Why?\n" else "It is 36."


def test_a_thread_of_apr_sees_its_message_and_returns_only_what_it_joins():
    worker = ScriptedWorker(apr)
    result = run(worker, thread_format="apr")
    spawn = apr("p")
    joined = f"{spawn}\n<join>36</join>\n<join></join>\n"
    assert worker.prompts == ["p", "What is 6 x 6?\n", "Why?\n", f"p{joined}"]
    assert result.output.text == joined + "It is 36."
    assert told(result)["thread_tokens"] == len("6 x 6 = 30 + 6<join>36") + len("I do not know.")


def nested(prompt, index=0):
    """A thread that spawns in turn."""
    if prompt == "p":
        return "<spawn><msg>Sum?</msg><msg>Why?</msg></spawn>"
    if prompt == "Sum?\n":
        return "First.<spawn><msg>What is 6 x 6?</msg></spawn>"
    if prompt.startswith("Sum?"):
        return "So.<join>37</join>"
    return apr(prompt) if prompt in ("What is 6 x 6?\n", "Why?\n") else "Done."


def test_threads_spawn_in_turn_down_to_the_allowed_depth():
    worker = ScriptedWorker(nested)
    result = run(worker, thread_format="apr", max_depth=2)
    inner = "Sum?\nFirst.<spawn><msg>What is 6 x 6?</msg></spawn>\n<join>36</join>\n"
    assert set(worker.prompts) >= {"p", "Sum?\n", "Why?\n", "What is 6 x 6?\n", inner}
    assert result.output.text == f"{nested('p')}\n<join>37</join>\n<join></join>\nDone."
    stats = told(result)
    first, so, leaf = len("First.<spawn><msg>What is 6 x 6?</msg>"), len("So.<join>37"), 22
    assert leaf == len("6 x 6 = 30 + 6<join>36")
    assert stats["spawns"] == [2, 1]
    assert stats["thread_tokens"] == first + so + leaf + len("I do not know.")
    own = len(nested("p")) - len("</spawn>") + len("Done.")
    assert stats["longest_path"] == own + first + leaf + so


def test_a_nested_thread_is_continued_behind_what_its_own_threads_return():
    plan = "<Outlines><Outline>1: a</Outline></Outlines>"
    inner = f"{plan}\n<Thread>1:deep.</Thread>\n</Parallel>"

    def script(prompt, index):
        if prompt in ("p", f"p{plan}\n<Thread>1:"):
            return plan
        if prompt.endswith("</Parallel>"):
            return "up.</Thread>" if prompt.count("</Parallel>") == 1 else "end"
        return "deep.</Thread>"

    worker = ScriptedWorker(script)
    result = run(worker, max_depth=2)
    joined = f"{plan}\n<Thread>1:{inner}up.</Thread>\n</Parallel>"
    assert result.output.text == f"{joined}end"
    assert worker.prompts[-1] == f"p{joined}"
    assert told(result)["spawns"] == [1, 1]


def test_a_format_can_be_ones_own():
    own = ThreadFormat(
        spawn_begin="[",
        spawn_end="]",
        task=r"(?P<text>\w+);",
        inherits=True,
        thread_begin="{text}{number}=",
        thread_end=".",
        returned="",
        joined="({text})",
        join_end="!",
    )
    script = {"p": "[a;b;]", "p[a;b;]a1=": "x.", "p[a;b;]b2=": "y.", "p[a;b;](x)(y)!": "ok"}
    result = run(ScriptedWorker(script), thread_format=own)
    assert result.output.text == "[a;b;](x)(y)!ok"


def test_mistakes_are_refused_by_name():
    with pytest.raises(UnknownNameError, match="threadweaver"):
        methods.create("parallel_thinking", thread_format="threads")
    for settings in (
        {"max_threads": 0},
        {"thread_tokens": "x"},
        {"max_spawns": -1},
        {"max_depth": 0},
    ):
        with pytest.raises(ParameterError, match="invalid"):
            methods.create("parallel_thinking", **settings)
    with pytest.raises(ParameterError, match="cannot honour n"):
        run(params={"n": 2})
    assert set(FORMATS) == {"threadweaver", "apr"}


# ---- on the engine -------------------------------------------------------------------------------


CACHE = {"max_tokens": 2048, "page_size": 4, "enable_block_reuse": False}  # counts are then exact
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}


def test_on_the_engine_the_first_thread_is_not_prefilled_again_at_a_join():
    with LLM(speaking(), dtype="float32", kv_cache_config=CACHE) as llm:
        prompt = "Hello world, how are you?"
        said = llm.generate(prompt, SamplingParams(**GREEDY)).outputs[0].text
        spawn_end = said[4:6]
        own = ThreadFormat(
            spawn_begin=said[0],
            spawn_end=spawn_end,
            task=r"(?P<text>.)",
            inherits=True,
            thread_begin=" thread:",
            thread_end="\0",
            returned="",
            joined=" thread:{text}\0",
            join_end=" so",
        )
        assert 0 < len(own.tasks(said[: said.index(spawn_end)])) <= 8
        controller = methods.create("parallel_thinking", thread_format=own, thread_tokens=6)
        worker = EngineWorker(llm, max_parked=32)
        result = answer(controller, worker, prompt, sampling_params=GREEDY)
        output, stats = result.output, told(result)
        (num_threads,) = stats["spawns"][:1]
        worker.shutdown()
        length = len(llm.tokenizer(prompt).input_ids)
        opening = len(llm.tokenizer(spawn_end + " thread:").input_ids)
        joins, num_parts = stats["join_tokens"], len(stats["spawns"])
        # Behind each fork the last token is computed again; a stop string may lie within a token.
        most = length + num_parts * num_threads * (opening + 3) + joins + 3 * num_parts
        assert 0 < result.usage.prefilled <= most
        assert stats["thread_tokens"] == 6 * sum(stats["spawns"])
        # The last part goes on exactly as from the ids of the whole in a new sequence.
        tail = output.token_ids[-3:]
        ids = [*llm.tokenizer(prompt).input_ids, *output.token_ids[:-3]]
        params = SamplingParams(**{**GREEDY, "max_tokens": 3})
        assert llm.generate(ids, params).outputs[0].token_ids == tail
        expect_empty(llm._frontend.engine)


# ---- threads that are read in their pages --------------------------------------------------------

SAID = ("Hello world, how are you?", SamplingParams(**GREEDY))


def own_format(said):
    """A format whose spawns a random model writes."""
    return ThreadFormat(
        spawn_begin=said[0],
        spawn_end=said[4:6],
        task=r"(?P<text>.)",
        inherits=True,
        thread_begin=" thread:",
        thread_end=" over",
        returned="",
        joined=" thread:{text} over",
        join_end=" so",
    )


def joined(llm, worker_class=EngineWorker, max_parked=8, **settings):
    """The result of threads that a random model spawns."""
    form = own_format(llm.generate(*SAID).outputs[0].text)
    settings = {"thread_format": form, "thread_tokens": 6, "max_spawns": 1, **settings}
    controller = methods.create("parallel_thinking", **settings)
    worker = worker_class(llm, max_parked=max_parked)
    result = answer(controller, worker, SAID[0], sampling_params=GREEDY)
    worker.shutdown()
    expect_empty(llm._frontend.engine)
    return result


def test_a_join_in_pages_prefills_closing_tags_alone():
    found = {}
    for join in ("text", "pages"):
        with LLM(speaking(), dtype="float32", kv_cache_config=CACHE) as llm:
            found[join] = joined(llm, join=join)
            tag, end = (len(llm.tokenizer(text).input_ids) for text in (" over", " so"))
    by_text, in_pages = (found[join].output for join in ("text", "pages"))
    (num_threads,) = told(found["pages"])["spawns"]
    assert told(found["text"])["spawns"] == [num_threads]
    assert num_threads > 1
    most = num_threads * (tag + 1) + end + 3  # a fork may put the end of a text in again
    assert told(found["pages"])["join_tokens"] <= most
    assert told(found["text"])["join_tokens"] > (num_threads - 1) * 6
    # The same threads stand in the text; how it goes on may differ, as each was computed alone.
    end = by_text.text.index(" so")
    assert in_pages.text[:end] == by_text.text[:end]
    assert len(in_pages.text) > end + 3


def test_threads_are_read_until_the_end_however_few_sequences_are_kept():
    with LLM(speaking(), dtype="float32", kv_cache_config=CACHE) as llm:
        few = joined(llm, max_parked=1, join="pages", max_spawns=3)
    with LLM(speaking(), dtype="float32", kv_cache_config=CACHE) as llm:
        many = joined(llm, max_parked=64, join="pages", max_spawns=3)
    assert few.output.text == many.output.text
    assert told(few) == told(many)


class OneByOne(EngineWorker):
    """Generates for one task after the other, as a busy machine may."""

    def __init__(self, llm, **settings):
        super().__init__(llm, **settings)
        self.turn = asyncio.Lock()

    async def generation_handler(self, task):
        async with self.turn:
            return await super().generation_handler(task)

    task_handlers = MappingProxyType(
        {**EngineWorker.task_handlers, GenerationTask: generation_handler}
    )


def test_threads_that_end_before_others_begin_are_kept_until_they_are_read():
    with LLM(speaking(), dtype="float32", kv_cache_config=CACHE) as llm:
        together = joined(llm, max_parked=1, join="pages", max_spawns=3)
    with LLM(speaking(), dtype="float32", kv_cache_config=CACHE) as llm:
        in_turn = joined(llm, OneByOne, max_parked=1, join="pages", max_spawns=3)
    assert in_turn.output.text == together.output.text


def test_one_thread_that_is_read_is_as_good_as_its_text():
    """There is none before it that it was computed without."""
    texts = []
    for join in ("text", "pages"):
        with LLM(speaking(), dtype="float32", kv_cache_config=CACHE) as llm:
            form = replace(own_format(llm.generate(*SAID).outputs[0].text), task=r"^(?P<text>.)")
            result = joined(llm, join=join, thread_format=form)
            assert told(result)["spawns"] == [1]
            texts.append(result.output.text)
    assert texts[0] == texts[1]


def test_what_cannot_be_read_in_pages_is_refused_by_name():
    for settings in ({"join": "both"}, {"join": "pages", "thread_format": "apr"}):
        with pytest.raises(ParameterError, match="invalid join"):
            methods.create("parallel_thinking", **settings)
    with pytest.raises(ParameterError, match="invalid join"):
        methods.create("parallel_thinking", join="pages", max_depth=2)
