"""Requests: how they are asked, how they end, on which loop, and that they leave nothing behind."""

import asyncio
import itertools
import threading

import pytest

from forethought import SamplingParams
from forethought.errors import (
    EngineStopped,
    ParameterError,
    RequestCancelled,
    RequestTimeout,
    TaskError,
    UsageError,
)
from forethought.scaffolding import (
    AsCompleted,
    Controller,
    Delta,
    GenerationTask,
    NativeGenerationController,
    ParallelProcess,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
    StreamGenerationTask,
    Worker,
)
from scripted import Together, has_begun

TAG = NativeGenerationController.WorkerTag.GENERATION
SLOW = Reply("x", delay=60)


def echo(prompt, index):
    return prompt


def native(script=echo, **options):
    return ScaffoldingLlm(NativeGenerationController(), {TAG: ScriptedWorker(script)}, **options)


def test_one_prompt_gives_one_result_and_a_list_gives_a_list():
    with native() as llm:
        assert llm.generate("a").outputs[0].text == "a"
        assert [r.outputs[0].text for r in llm.generate(["a", "b", "c"])] == ["a", "b", "c"]
        assert llm.generate([]) == []


def test_token_ids_are_a_prompt_too():
    with native() as llm:
        assert llm.generate([104, 105]).output.text == "hi"
        assert [r.output.text for r in llm.generate([[104], [105]])] == ["h", "i"]


def test_the_output_has_text_tokens_finish_reason_and_usage():
    with native() as llm:
        output = llm.generate("ab", sampling_params={"max_tokens": 1}).output
    assert (output.text, output.output_str) == ("a", "a")
    assert output.token_ids == output.tokens == output.output_tokens == [97]
    assert (output.finish_reason, output.usage.completion_tokens) == ("length", 1)


def test_all_samples_of_a_task_are_outputs():
    with native(lambda prompt, index: f"{index}") as llm:
        result = llm.generate("p", sampling_params={"n": 3})
    assert [output.text for output in result.outputs] == ["0", "1", "2"]


def test_requests_run_at_the_same_time():
    prompts = [str(i) for i in range(20)]
    with ScaffoldingLlm(NativeGenerationController(), {TAG: Together(20)}) as llm:
        assert [result.output.text for result in llm.generate(prompts)] == prompts


def test_no_more_requests_than_allowed_run_at_once_and_the_others_come_in_order():
    running, most, order, in_pairs = 0, 0, [], asyncio.Barrier(2)

    class Watcher(Worker):
        async def handle(self, task):
            nonlocal running, most
            running += 1
            most = max(most, running)
            order.append(task.input_str)
            await in_pairs.wait()
            await asyncio.sleep(0.005)
            running -= 1
            task.output_str = ""

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    prompts = [str(i) for i in range(10)]
    with ScaffoldingLlm(NativeGenerationController(), {TAG: Watcher()}, 2) as llm:
        llm.generate(prompts)
    assert (most, order) == (2, prompts)


def test_urgent_requests_overtake_those_that_wait():
    all_wait, order = threading.Event(), []

    class Patient(Worker):
        async def handle(self, task):
            order.append(task.input_str)
            assert await asyncio.to_thread(all_wait.wait, 60)
            task.output_str = ""

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    with ScaffoldingLlm(NativeGenerationController(), {TAG: Patient()}, 1) as llm:
        asked = [("first", 0), ("late", 5), ("soon", -1), ("later", 5)]
        results = [llm.generate_async(p, priority=n) for p, n in asked]
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), llm.loop).result(60)  # all are queued
        all_wait.set()
        for result in results:
            result.result()
    assert order == ["first", "soon", "late", "later"]


def test_workers_are_found_by_enum_member_or_by_plain_string():
    for tag in (TAG, "generation"):
        with ScaffoldingLlm(NativeGenerationController(), {tag: ScriptedWorker(echo)}) as llm:
            assert llm.generate("a").output.text == "a"


def test_sampling_of_the_caller_wins_over_that_of_the_controller():
    worker = ScriptedWorker(echo)
    controller = NativeGenerationController(sampling_params={"temperature": 0.9, "top_k": 5})
    with ScaffoldingLlm(controller, {TAG: worker}) as llm:
        llm.generate("p", sampling_params={"temperature": 0.1})
        llm.generate("p", sampling_params=SamplingParams(temperature=0.2))
        llm.generate("p")
    seen = [(call.task.temperature, call.task.top_k) for call in worker.calls]
    assert seen == [(0.1, 5), (0.2, 5), (0.9, 5)]


def test_what_the_caller_sets_to_a_default_wins_too():
    worker = ScriptedWorker(echo)
    controller = NativeGenerationController({"stop": ["p"], "ignore_eos": True, "top_p": 0.5})
    with ScaffoldingLlm(controller, {TAG: worker}) as llm:
        plain = llm.generate("p", sampling_params={"stop": [], "ignore_eos": False, "top_p": None})
    task = worker.calls[0].task
    assert (task.stop, task.ignore_eos, task.top_p) == ([], False, 0.5)
    assert plain.output.text == "p"


@pytest.mark.parametrize("prompt", [None, 5, 2.5, {"a": 1}, b"ab", [1, "a"], [None], [[1, None]]])
def test_what_is_no_prompt_is_refused(prompt):
    with native() as llm, pytest.raises(ParameterError, match="invalid prompt"):
        llm.generate(prompt)


@pytest.mark.parametrize(
    "options",
    [{"timeout": "5"}, {"timeout": True}, {"priority": "high"}, {"priority": None}],
)
def test_options_of_the_wrong_kind_are_refused_by_name(options):
    with native() as llm, pytest.raises(ParameterError, match=f"invalid {next(iter(options))}"):
        llm.generate_async("p", **options)


@pytest.mark.parametrize("workers", [{"x": None}, {TAG: ScriptedWorker}, [ScriptedWorker()], None])
def test_what_cannot_work_is_refused_as_a_worker(workers):
    with pytest.raises(ParameterError, match="worker"):
        ScaffoldingLlm(NativeGenerationController(), workers)


def test_params_that_are_given_their_defaults_win_too():
    worker = ScriptedWorker(echo)
    settings = {"temperature": 0.6, "stop": ["p"], "stop_token_ids": [3], "top_p": 0.5}
    params = SamplingParams(temperature=1.0, stop=(), stop_token_ids=(), priority=0)
    with ScaffoldingLlm(NativeGenerationController(settings), {TAG: worker}) as llm:
        llm.generate("p", sampling_params=params)
    task = worker.calls[0].task
    assert (task.temperature, task.stop, task.stop_token_ids) == (1.0, [], [])
    assert task.top_p == 0.5
    with native() as llm, pytest.raises(ParameterError, match="cache_salt"):
        llm.generate("p", sampling_params=SamplingParams(cache_salt="red"))


def test_arguments_that_would_change_nothing_are_refused():
    with native() as llm:
        with pytest.raises(ParameterError, match=r"sampling_params=.*temperature"):
            llm.generate("p", temperature=0.5)
        with pytest.raises(ParameterError, match="'sample_num'"):
            llm.generate("p", sample_num=3)
        with pytest.raises(ParameterError, match="budget"):
            llm.generate("p", budget=100)
        with pytest.raises(ParameterError, match="by name"):
            llm.generate("p", sampling_params=0.5)


def test_an_unknown_sampling_parameter_is_refused_before_anything_runs():
    with native() as llm, pytest.raises(ParameterError, match=r"'temprature'.*temperature"):
        llm.generate_async("p", sampling_params={"temprature": 1})


def test_further_arguments_go_to_process():
    class Repeater(NativeGenerationController):
        def process(self, tasks, times=1, **kwargs):
            tasks[0].input_str *= times
            yield from super().process(tasks, **kwargs)

    with ScaffoldingLlm(Repeater(), {"generation": ScriptedWorker(echo)}) as llm:
        assert llm.generate("ab", times=3).output.text == "ababab"


def test_a_method_that_returns_nothing_succeeds_with_no_outputs():
    class Silent(Controller):
        def process(self, tasks, **kwargs):
            yield []

    with ScaffoldingLlm(Silent(), {}) as llm:
        result = llm.generate("p")
    assert result.finished
    assert (result.outputs, result.output, result.error) == ([], None, None)


# ---- how a result is waited for ----------------------------------------------------------------


def test_a_result_can_be_awaited_in_a_running_loop():
    async def main():
        llm = native()
        try:
            assert llm.loop is asyncio.get_running_loop()
            first = await llm.generate_async("a")
            second = llm.generate_async("b")
            assert (await second.aresult()) is second
            return first.output.text + second.output.text + second.result().output.text
        finally:
            await llm.ashutdown()

    assert asyncio.run(main()) == "abb"


def test_a_result_of_a_loop_of_its_own_can_be_awaited_from_another_one():
    with native() as llm:

        async def main():
            assert llm.loop is not asyncio.get_running_loop()
            results = await asyncio.gather(*[llm.generate_async(p).aresult() for p in "abc"])
            return "".join(result.output.text for result in results)

        assert asyncio.run(main()) == "abc"


def test_coroutines_can_be_sent_to_the_loop():
    with native() as llm:

        async def ask():
            return (await llm.generate_async("a")).output.text

        assert asyncio.run_coroutine_threadsafe(ask(), llm.loop).result(60) == "a"


def test_waiting_on_the_loop_itself_is_refused_instead_of_hanging():
    async def main():
        async with native(lambda p, i: Reply(p, delay=0.05)) as llm:
            with pytest.raises(UsageError, match="wait for ever"):
                llm.generate("p")
            result = llm.generate_async("p")
            with pytest.raises(UsageError, match="wait for ever"):
                result.result()
            return (await result).output.text

    assert asyncio.run(main()) == "p"


def test_two_of_them_in_one_thread_do_not_disturb_each_other():
    with native(lambda p, i: "one") as one, native(lambda p, i: "two") as two:
        first, second = one.generate_async("p"), two.generate_async("p")
        assert second.result().output.text + first.result().output.text == "twoone"


def test_many_threads_may_ask_at_once():
    found = []
    with native(lambda p, i: Reply(p, delay=0.01)) as llm:

        def ask(number):
            found.append([r.output.text for r in llm.generate([f"{number}.{i}" for i in range(5)])])

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(found) == [[f"{n}.{i}" for i in range(5)] for n in range(8)]


def test_it_does_not_touch_the_event_loop_of_the_thread_that_creates_it():
    policy = asyncio.get_event_loop_policy()
    with native() as llm:
        llm.generate("p")
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        assert policy._local._loop is not llm.loop


# ---- how a request is ended --------------------------------------------------------------------


def test_result_with_a_timeout_times_out_and_aborts():
    worker = ScriptedWorker([SLOW])
    with ScaffoldingLlm(NativeGenerationController(), {TAG: worker}) as llm:
        result = llm.generate_async("p")
        assert has_begun(worker)
        with pytest.raises(RequestTimeout, match=r"0\.1 s have passed"):
            result.result(timeout=0.1)
        with pytest.raises(TimeoutError):
            result.result(timeout=60)
    assert worker.calls[0].ended == "cancelled"


def test_aresult_with_a_timeout_times_out_and_aborts():
    worker = ScriptedWorker([SLOW])

    async def main():
        async with ScaffoldingLlm(NativeGenerationController(), {TAG: worker}) as llm:
            result = llm.generate_async("p")
            while not worker.calls:
                await asyncio.sleep(0.005)
            with pytest.raises(RequestTimeout):
                await result.aresult(timeout=0.1)

    asyncio.run(main())
    assert worker.calls[0].ended == "cancelled"


def test_a_deadline_covers_the_time_in_the_queue():
    worker = ScriptedWorker(lambda p, i: SLOW)
    with ScaffoldingLlm(NativeGenerationController(), {TAG: worker}, 1) as llm:
        first = llm.generate_async("a")
        assert has_begun(worker)
        queued = llm.generate_async("b", timeout=0.1)
        with pytest.raises(RequestTimeout, match="since it was submitted"):
            queued.result(60)
        assert not first.finished
    assert worker.prompts == ["a"]


def test_cancelling_the_task_that_awaits_aborts_the_request():
    worker = ScriptedWorker([SLOW])

    async def main():
        async with ScaffoldingLlm(NativeGenerationController(), {TAG: worker}) as llm:
            result = llm.generate_async("p")
            while not worker.calls:
                await asyncio.sleep(0.005)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(result.aresult(), 0.1)
            with pytest.raises(RequestCancelled):
                await result

    asyncio.run(main())
    assert worker.calls[0].ended == "cancelled"


def test_an_aborted_request_fails_and_the_others_go_on():
    with native({"slow": SLOW, "fast": Reply("done", delay=0.1)}) as llm:
        slow, fast = llm.generate_async("slow"), llm.generate_async("fast")
        slow.abort()
        with pytest.raises(RequestCancelled):
            slow.result(60)
        assert fast.result(60).output.text == "done"
        assert isinstance(slow.error, RequestCancelled)
        assert slow.outputs == []


def test_a_failing_request_does_not_take_the_others_down():
    with native({"bad": Reply("", error=OSError("gone")), "good": Reply("fine", delay=0.1)}) as llm:
        bad, good = llm.generate_async("bad"), llm.generate_async("good")
        with pytest.raises(TaskError, match="gone"):
            bad.result(60)
        assert good.result(60).output.text == "fine"


def test_the_first_failure_of_a_batch_is_raised_and_the_rest_is_aborted():
    worker = ScriptedWorker({"slow": SLOW, "bad": Reply("", error=OSError("gone"))})
    with ScaffoldingLlm(NativeGenerationController(), {TAG: worker}) as llm:
        with pytest.raises(TaskError, match="gone"):
            llm.generate(["bad", "slow"])
        llm.generate_async("bad")
    assert worker.calls[1].ended == "cancelled"


def test_code_that_exits_fails_its_request_instead_of_hanging_all_of_them():
    class Exits(Controller):
        def process(self, tasks, **kwargs):
            raise SystemExit(3)
            yield

    with ScaffoldingLlm(Exits(), {}) as llm, pytest.raises(UsageError, match="code 3"):
        llm.generate("p")
    worker = ScriptedWorker([Reply("", error=SystemExit(4)), "fine"])
    with ScaffoldingLlm(NativeGenerationController(), {TAG: worker}) as llm:
        with pytest.raises(TaskError, match="SystemExit: 4"):
            llm.generate("p")
        assert llm.generate("p").output.text == "fine"


ENDS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]


class Quits(NativeGenerationController):
    """Ends at a place of its ``generate`` with something that is no ``Exception``."""

    def __init__(self, kind, place):
        super().__init__()
        self.kind, self.place = kind, place

    def clone(self):
        if self.place == "clone":
            raise self.kind
        return super().clone()

    def generate(self, prompt, **kwargs):
        if prompt == "good":
            return super().generate(prompt, **kwargs)
        if self.place == "call":
            raise self.kind
        return self.quit(prompt, **kwargs)

    def quit(self, prompt, **kwargs):
        try:
            with AsCompleted([GenerationTask(TAG, input_str="slow")]) as running:
                if self.place == "begin":
                    raise self.kind
                running.add(GenerationTask(TAG, input_str="fast"))
                yield running
                if self.place == "resume":
                    raise self.kind
                return (yield from super().generate(prompt, **kwargs))
        finally:
            if self.place == "close":
                raise self.kind


class Watched(ScriptedWorker):
    """Keeps which scopes have ended."""

    def __init__(self):
        delays = {"slow": 60, "good": 0.05}
        super().__init__(lambda prompt, _: Reply(prompt, delay=delays.get(prompt, 0)))
        self.ended_scopes = []

    async def on_scope_end(self, scope_id):
        self.ended_scopes.append(scope_id)


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("place", ["clone", "call", "begin", "resume", "close"])
def test_a_controller_that_quits_fails_its_request_and_leaves_nothing_behind(place, kind):
    worker = Watched()
    with ScaffoldingLlm(Quits(kind, place), {TAG: worker}) as llm:
        result = llm.generate_async("bad")
        with pytest.raises(UsageError, match=rf"a controller .*(exit|{kind.__name__})"):
            result.result(60)
        assert worker.ended_scopes == [result.id] * (place not in ("clone", "call"))
    assert not llm._running
    assert [call.ended for call in worker.calls if call.prompt == "slow"] in ([], ["cancelled"])


@pytest.mark.parametrize("kind", ENDS)
def test_a_controller_that_quits_on_a_loop_of_others_leaves_the_other_requests_alone(kind):
    async def main():
        async with ScaffoldingLlm(Quits(kind, "resume"), {TAG: Watched()}) as llm:
            good, bad = llm.generate_async("good"), llm.generate_async("bad")
            with pytest.raises(UsageError, match="a controller"):
                await bad
            assert (await good).output.text == "good"

    asyncio.run(main())


def test_code_that_interrupts_the_event_loop_itself_does_not_end_it():
    """A worker's background task: nobody awaits it, and what it raises comes out of the loop."""

    class Background(Worker):
        async def handle(self, task):
            async def interrupt():
                raise KeyboardInterrupt

            self.job = asyncio.create_task(interrupt())
            await asyncio.wait([self.job])
            self.job.exception()
            task.output_str = "on"

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    with ScaffoldingLlm(NativeGenerationController(), {TAG: Background()}) as llm:
        assert llm.generate("p", timeout=60).output.text == "on"
        assert llm.generate("p", timeout=60).output.text == "on"


def test_a_controller_that_fails_while_it_is_ended_does_not_hide_why_it_was():
    class Clumsy(NativeGenerationController):
        def process(self, tasks, **kwargs):
            try:
                yield from super().process(tasks)
            finally:
                raise ValueError("dropped something")

    with (
        ScaffoldingLlm(Clumsy(), {TAG: ScriptedWorker([SLOW])}) as llm,
        pytest.raises(RequestTimeout),
    ):
        llm.generate("p", timeout=0.05)


def test_the_failure_of_a_batch_does_not_wait_for_those_before_it():
    worker = ScriptedWorker({"slow": SLOW, "bad": Reply("", error=OSError("gone"))})
    with (
        ScaffoldingLlm(NativeGenerationController(), {TAG: worker}) as llm,
        pytest.raises(TaskError, match="gone"),
    ):
        llm.generate(["slow", "bad"])
    assert worker.calls[0].ended == "cancelled"


def test_a_prototype_that_cannot_be_cloned_fails_the_request_instead_of_hanging():
    class Broken(NativeGenerationController):
        def clone(self):
            raise RuntimeError("no copies")

    with ScaffoldingLlm(Broken(), {}) as llm, pytest.raises(RuntimeError, match="no copies"):
        llm.generate_async("p").result(60)


def test_shutdown_ends_what_runs_and_what_waits():
    worker = ScriptedWorker(lambda p, i: SLOW)
    llm = ScaffoldingLlm(NativeGenerationController(), {TAG: worker}, 1)
    results = [llm.generate_async("a"), llm.generate_async("b")]
    assert has_begun(worker)
    llm.shutdown()
    for result in results:
        with pytest.raises(EngineStopped):
            result.result(60)
    assert [call.ended for call in worker.calls] == ["cancelled"]
    with pytest.raises(EngineStopped):
        llm.generate("c")
    llm.shutdown()


def test_shutdown_shuts_the_workers_down_only_if_asked_to():
    class Counted(ScriptedWorker):
        ended = 0

        async def async_shutdown(self):
            self.ended += 1

        def shutdown(self):
            self.ended += 10

    for options, expected in (
        ({}, 0),
        ({"shutdown_workers": True}, 11),
        ({"shutdown_wokers": True}, 11),
    ):
        worker = Counted(echo)
        llm = ScaffoldingLlm(NativeGenerationController(), {TAG: worker, "other": worker})
        llm.generate("p")
        llm.shutdown(**options)
        assert worker.ended == expected


def test_a_loop_that_was_not_its_own_goes_on_after_shutdown():
    async def main():
        llm = native([SLOW])
        result = llm.generate_async("p")
        await asyncio.sleep(0.05)
        llm.shutdown()
        with pytest.raises(EngineStopped):
            await result
        await asyncio.sleep(0)
        return "alive"

    assert asyncio.run(main()) == "alive"


def test_a_request_whose_event_loop_ends_says_so():
    async def main():
        result = native([SLOW]).generate_async("p")
        await asyncio.sleep(0)
        return result

    with pytest.raises(EngineStopped, match="the event loop was shut down"):
        asyncio.run(main()).result(60)


def test_no_thread_stays_behind():
    before = {*threading.enumerate()}
    with native() as llm:
        llm.generate("p")
    assert {*threading.enumerate()} <= before  # some of those of before may end meanwhile


# ---- streaming ---------------------------------------------------------------------------------


def streaming(script):
    controller = NativeGenerationController(streaming=True)
    return ScaffoldingLlm(controller, {TAG: ScriptedWorker(script)})


def test_tokens_are_streamed_as_they_come():
    read = threading.Semaphore(1)

    class Shy(Worker):
        """Says the next character only when the one before has been read."""

        async def handle(self, task):
            for character in "abcd":
                assert await asyncio.to_thread(read.acquire, timeout=60)
                task.emit(character, [ord(character)])
            task.output_str = "abcd"

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    seen = []
    with ScaffoldingLlm(NativeGenerationController(streaming=True), {TAG: Shy()}) as llm:
        for partial in llm.generate_async("p"):
            seen.append(partial.cur_output.text)
            read.release()
    assert seen == ["a", "ab", "abc", "abcd", "abcd"]


def test_a_stream_can_be_iterated_asynchronously_from_any_loop():
    with streaming(lambda p, i: "abc") as llm:

        async def main():
            texts = [r.cur_output.text async for r in llm.generate_async("p")]
            events = [e.output.text async for e in llm.generate_async("p").aevents()]
            return texts, events

        assert asyncio.run(main()) == (["a", "ab", "abc", "abc"], ["a", "b", "c"])


def test_a_method_that_does_not_stream_gives_its_output_once():
    with native() as llm:
        assert [partial.cur_output.text for partial in llm.generate_async("p")] == ["p"]


def test_a_slow_reader_delays_no_one_and_misses_no_event():
    with streaming(lambda p, i: "abcdef") as llm:
        result = llm.generate_async("p")
        result.result()
        assert "".join(event.output.text for event in result.events()) == "abcdef"
        assert next(result.events()).output.token_ids == (97,)


def test_a_failure_ends_the_stream():
    with streaming([Reply("abc", error=OSError("gone"))]) as llm:
        result = llm.generate_async("p")
        with pytest.raises(TaskError, match="gone"):
            list(result)
        with pytest.raises(TaskError, match="gone"):
            list(result.events())


def test_events_say_which_branch_they_come_from():
    class Three(Controller):
        def process(self, tasks, **kwargs):
            native = NativeGenerationController(streaming=True)
            copies = [[tasks[0].copy()] for _ in range(3)]
            yield ParallelProcess([native] * 3, copies, [{}] * 3)

    worker = ScriptedWorker(lambda p, i: Reply(str(i) * 3, seconds_per_token=0.01))
    with ScaffoldingLlm(Three(), {TAG: worker}) as llm:
        texts = {"0": "", "1": "", "2": ""}
        for event in llm.generate_async("p").events():
            texts[event.branch] += event.output.text
    assert texts == {"0": "000", "1": "111", "2": "222"}


def test_whatever_a_users_worker_streams_is_handed_on_at_once():
    class Chatty(Worker):
        async def handle(self, task):
            for i in range(3):
                task.streaming_output_list.append(f"part {i}")
                await asyncio.sleep(0)
            task.output_str = "whole"

        task_handlers = {GenerationTask: handle}  # noqa: RUF012

    with ScaffoldingLlm(NativeGenerationController(streaming=True), {TAG: Chatty()}) as llm:
        result = llm.generate_async("p")
        seen = [partial.cur_output for partial in result]
    assert seen[:3] == ["part 0", "part 1", "part 2"]
    assert seen[3].text == "whole"


class Parts(Controller):
    """Plays a generator function and answers with what it returns, or what it has streamed."""

    def __init__(self, play):
        super().__init__()
        self.play = play

    def process(self, tasks, **kwargs):
        tasks[0].output_str = yield from self.play()


def spoken(prompt, **fields):
    return GenerationTask(TAG, True, input_str=prompt, **fields)


def shown(play, script=lambda prompt, _: prompt):
    """The text at each iteration; each begins with the one before."""
    with ScaffoldingLlm(Parts(play), {TAG: ScriptedWorker(script)}) as llm:
        texts = [partial.cur_output.text for partial in llm.generate_async("p")]
        result = llm.generate_async("p").result()
        assert [partial.cur_output.text for partial in result] == texts  # also when read later
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before)
    return texts


def test_the_current_output_of_several_parts_only_grows():
    def play():
        yield [spoken("abc")]
        yield Delta(" so ")
        yield [spoken("de")]
        return "abc so de"

    texts = ["a", "ab", "abc", "abc so ", "abc so d", "abc so de", "abc so de"]
    assert shown(play) == texts


def test_parts_side_by_side_are_put_in_the_order_in_which_they_were_started():
    def play():
        yield [spoken("slow"), spoken("fast")]
        yield [spoken("!")]
        return "slowfast!"

    def script(prompt, _):
        return Reply(prompt, seconds_per_token=0.02 if prompt == "slow" else 0.0)

    texts = shown(play, script)
    assert texts[-3:] == ["slowfast", "slowfast!", "slowfast!"]
    assert all("slowfast!".startswith(text) for text in texts)


def test_an_abandoned_stream_ends_while_others_go_on():
    def play():
        one, two = (StreamGenerationTask(TAG, True, input_str=p) for p in ("abc", "xyz"))
        yield [one, two]
        yield [one, two]
        yield [spoken("?")]  # neither is waited for any more
        yield [one]
        return "abxy?c"

    texts = shown(play)
    assert texts[:2] == ["a", "a"]
    assert texts[-3:] == ["abxy?", "abxy?c", "abxy?c"]


def test_branches_and_further_samples_are_not_in_the_current_output():
    class Says(Controller):
        def process(self, tasks, **kwargs):
            yield Delta("z")

    def play():
        native = NativeGenerationController(streaming=True)
        yield [spoken("ab", n=3)]
        yield ParallelProcess([native, native, Says()], [[spoken("x")], [spoken("y")], []])
        yield [spoken("c")]
        return "abc"

    texts = shown(play)
    assert set(texts) == {"a", "ab", "abc"}
    assert len(texts) == 6 + 3 + 1 + 1


def test_a_part_that_fails_does_not_hold_back_those_after_it():
    def play():
        yield [spoken("bad", on_failure="drop")]
        yield [spoken("good")]
        return "good"

    assert shown(play, {"bad": Reply("", error=OSError()), "good": "good"})[-2:] == ["good", "good"]


def test_a_worker_that_fails_at_the_end_of_the_loop_holds_up_no_other():
    ended = []

    class Ends(ScriptedWorker):
        async def on_loop_end(self):
            ended.append(self)
            raise OSError("the connection is gone")

    first, second = Ends(), Ends()
    llm = ScaffoldingLlm(NativeGenerationController(), {TAG: first, "other": second})
    with pytest.raises(OSError, match="gone"):
        llm.shutdown()
    assert ended == [first, second]
    assert llm.loop.is_closed()
    assert not llm._thread.is_alive()
