"""``AsyncLLM``: many clients, one engine thread, no client waits for another."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import threading
import time
from contextlib import contextmanager

import pytest

from engines import expect_empty, held_back
from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.errors import (
    EngineStopped,
    LogitsError,
    ParameterError,
    RequestError,
    UsageError,
)
from forethought.llm.async_llm import AsyncLLM
from forethought.llm.async_session import AsyncSession
from forethought.llm.llm import LLM
from forethought.llm.stop_candidates import StopCandidates
from forethought.outputs import FinishReason
from forethought.speculative.drafter import Drafter
from tokens import speaking

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=240)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, seed=7)
PROMPTS = ["Hello world", "How are you?", "你好"]
FIELDS = {"dtype": "float32", "kv_cache_config": {"max_tokens": 4096, "page_size": 4}}


@pytest.fixture(scope="module")
def direct() -> LLM:
    """Answers to compare with; its engine is lent to the AsyncLLM of each test."""
    return LLM(speaking(), **FIELDS)


@pytest.fixture(scope="module")
def expected(direct):
    return {prompt: direct.generate(prompt, GREEDY).outputs[0] for prompt in PROMPTS}


@pytest.fixture
def llm(direct, expected):
    """An AsyncLLM that must leave no sequence and no waiting client behind."""
    llm = AsyncLLM.over(direct)
    try:
        yield llm
        wait_until(lambda: is_idle(llm))
        assert not llm._thread._streams
        assert llm._limit._free == 1024
    finally:
        llm.shutdown()
    expect_empty(direct._frontend.engine)


def is_idle(llm: AsyncLLM) -> bool:
    if llm._frontend.engine.pool.in_use and not llm._frontend.engine.has_work:
        gc.collect()  # a session that only a traceback held
    return llm._thread.call(lambda: not list(llm._frontend.engine.scheduler)).result()


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


async def eventually(condition) -> None:
    await asyncio.to_thread(wait_until, condition)


@contextmanager
def held(llm: AsyncLLM, after: int = 0):
    """The engine, in single steps, stands still before its next forward, or ``after`` further ones,
    until the block is left."""
    engine = llm._frontend.engine
    runner, entered, leave = engine.runner, threading.Event(), threading.Event()
    forward, number = runner.forward, itertools.count()

    def waiting(rows):
        if next(number) >= after:
            entered.set()
            assert leave.wait(60)
        return forward(rows)

    runner.forward, num_steps, engine.num_decode_steps = waiting, engine.num_decode_steps, 1
    try:
        yield entered
    finally:
        del runner.forward
        engine.num_decode_steps = num_steps
        leave.set()


@contextmanager
def failing(llm: AsyncLLM, fails):
    """Forwards for which ``fails(rows)`` is true raise."""
    engine = llm._frontend.engine
    runner, num_steps = engine.runner, engine.num_decode_steps
    forward = runner.forward
    runner.forward = lambda rows: 1 / 0 if fails(rows) else forward(rows)
    engine.num_decode_steps = 1  # a native call of several makes its forwards itself
    try:
        yield
    finally:
        del runner.forward
        engine.num_decode_steps = num_steps


# --- requests ------------------------------------------------------------------------------------


def test_many_clients_get_what_each_would_get_alone(llm, expected):
    async def main():
        return await asyncio.gather(*[llm.generate(prompt, GREEDY) for prompt in PROMPTS * 5])

    outputs = asyncio.run(main())
    assert [output.outputs[0] for output in outputs] == [expected[p] for p in PROMPTS * 5]


def test_clients_in_several_threads_and_loops_share_one_engine(llm, expected):
    results = {}

    def client(name):
        results[name] = asyncio.run(llm.generate(PROMPTS[name % 3], GREEDY))

    threads = [threading.Thread(target=client, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in range(6):
        assert results[name].outputs[0] == expected[PROMPTS[name % 3]]


def test_a_seeded_request_gives_the_same_tokens_in_any_batch(llm):
    async def main():
        alone = await llm.generate(PROMPTS[0], SAMPLED)
        others = [llm.generate(p, SamplingParams(max_tokens=20, n=3)) for p in PROMPTS]
        batched, *_ = await asyncio.gather(llm.generate(PROMPTS[0], SAMPLED), *others)
        assert batched.outputs == alone.outputs

    asyncio.run(main())


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    output = asyncio.run(llm.chat(messages, GREEDY))
    assert output.prompt == "<|user|>Hi<|assistant|>"
    assert output.prompt_token_ids == llm.chat_prompt(messages)


def test_a_bad_prompt_is_refused_to_its_client_only(llm, expected):
    async def main():
        calls = [llm.generate(prompt, GREEDY) for prompt in ("", [300], PROMPTS[0])]
        empty, outside, good = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(empty, ParameterError)
        assert isinstance(outside, ParameterError)
        assert good.outputs[0] == expected[PROMPTS[0]]

    asyncio.run(main())


def test_cancelling_frees_the_pages_at_once(llm):
    async def main():
        decoded = llm.stats.decoded
        with held(llm, after=5) as entered:
            task = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
            assert await asyncio.to_thread(entered.wait, 60)
            assert llm._frontend.engine.pool.in_use > 0
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await eventually(lambda: is_idle(llm))
        assert llm._frontend.engine.pool.in_use == 0
        assert 0 < llm.stats.decoded - decoded < 10

    asyncio.run(main())


def test_a_request_cancelled_before_it_begins_never_runs(llm):
    async def main():
        with held(llm) as entered:
            first = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY))
            assert await asyncio.to_thread(entered.wait, 60)
            prefilled = llm.stats.prefilled
            second = asyncio.create_task(llm.generate(PROMPTS[1], GREEDY))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.sleep(0)
        output = await first
        with pytest.raises(asyncio.CancelledError):
            await second
        assert llm.stats.prefilled - prefilled <= len(output.prompt_token_ids)

    asyncio.run(main())


def test_a_time_limit_aborts_the_request(llm):
    async def main():
        with held(llm), pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await llm.generate(PROMPTS[0], GREEDY)

    asyncio.run(main())


def test_a_failing_request_does_not_take_later_ones_down(llm, expected):
    async def main():
        with failing(llm, lambda rows: True), pytest.raises(RequestError) as caught:
            await llm.generate(PROMPTS[0], GREEDY)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        good = await llm.generate(PROMPTS[0], GREEDY)
        assert good.outputs[0] == expected[PROMPTS[0]]

    asyncio.run(main())


def test_a_failed_forward_fails_the_request_that_it_fails_for_and_says_so(llm, expected):
    long = "Hello " * 30

    async def main():
        with failing(llm, lambda rows: any(len(row.tokens) > 20 for row in rows)):
            calls = [llm.generate(prompt, GREEDY) for prompt in (PROMPTS[0], long, PROMPTS[1])]
            return await asyncio.gather(*calls, return_exceptions=True)

    first, bad, second = asyncio.run(main())
    assert (first.outputs[0], second.outputs[0]) == (expected[PROMPTS[0]], expected[PROMPTS[1]])
    assert isinstance(bad, RequestError)
    assert "division by zero" in str(bad)
    assert "no other request fails with it" in str(bad)


def test_logits_that_are_not_finite_are_told_as_they_are(llm, monkeypatch):
    runner = llm._frontend.engine.runner
    forward = runner.forward

    async def main():
        monkeypatch.setattr(runner, "forward", lambda rows: forward(rows) * math.nan)
        with pytest.raises(LogitsError, match="not finite"):
            await llm.generate(PROMPTS[0], SAMPLED)

    asyncio.run(main())


@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_drafter_that_would_end_the_program_costs_its_drafts(expected, leave):
    class Leaving(Drafter):
        def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
            raise leave

    config = UserProvidedDecodingConfig(max_draft_len=2, drafter=Leaving())

    async def main():
        async with AsyncLLM(speaking(), speculative_config=config, **FIELDS) as drafting:
            calls = [drafting.generate(prompt, GREEDY) for prompt in PROMPTS]
            return [output.outputs[0].token_ids for output in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == [expected[prompt].token_ids for prompt in PROMPTS]


def test_a_tokenizer_that_fails_on_one_request_leaves_the_others_alone(llm, expected, monkeypatch):
    decode = llm._frontend.tokenizer.decode
    poison = expected[PROMPTS[1]].token_ids[3]

    def poisoned(ids, skip_special_tokens=True):
        if poison in ids:
            raise ValueError("cannot decode this")
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(llm._frontend.tokenizer, "decode", poisoned)
    watched = GREEDY.replace(stop=["never said"])

    async def main():
        calls = [llm.generate(PROMPTS[1], watched), llm.generate(PROMPTS[0], GREEDY)]
        bad, good = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(bad, RequestError)
        assert "cannot decode this" in str(bad)
        assert good.outputs[0].token_ids == expected[PROMPTS[0]].token_ids

    asyncio.run(main())


def test_a_text_that_cannot_be_decoded_while_it_streams_fails_that_request(
    llm, expected, monkeypatch
):
    decode, poison = (
        llm._frontend.tokenizer.hf.backend_tokenizer.decode,
        expected[PROMPTS[1]].token_ids,
    )

    class Poisoned:
        is_fast = True
        backend_tokenizer = property(lambda self: self)

        def __getattr__(self, name):
            return getattr(llm.tokenizer, name)

        def __call__(self, *args, **kwargs):
            return llm.tokenizer(*args, **kwargs)

        def decode(self, ids, **kwargs):
            if poison[3] in ids:
                raise RuntimeError("cannot decode this")
            return decode(ids, **kwargs)

    monkeypatch.setattr(llm._frontend.tokenizer, "hf", Poisoned())

    async def read(prompt):
        async for output in llm.stream(prompt, LONG if prompt == PROMPTS[1] else GREEDY):
            last = output
        return last

    async def main():
        bad, good = await asyncio.gather(*map(read, PROMPTS[1::-1]), return_exceptions=True)
        assert isinstance(bad, RequestError)
        assert isinstance(bad.__cause__, RuntimeError)
        assert good.outputs[0].token_ids == expected[PROMPTS[0]].token_ids
        async with llm.start(PROMPTS[1]) as session:
            with pytest.raises(RequestError, match="cannot decode this"):
                async for _ in session.stream(LONG):
                    pass

    asyncio.run(main())


def test_more_requests_than_max_pending_wait_and_all_are_served(direct, expected):
    llm = AsyncLLM.over(direct, max_pending=2)
    begin, counts, step = threading.Event(), [], llm._frontend.step

    def counting(max_steps):
        counts.append(len(llm._thread._streams))
        return step(max_steps)

    async def client(prompt):
        return await llm.generate(prompt, GREEDY)

    async def main():
        llm._thread.call(begin.wait, 60)
        tasks = [asyncio.create_task(client(prompt)) for prompt in PROMPTS * 3]
        doomed = asyncio.create_task(client(PROMPTS[0]))
        await asyncio.sleep(0)
        doomed.cancel()  # while it waits at the gate
        await eventually(lambda: llm._thread._commands.qsize() == 2)
        begin.set()
        await asyncio.wait([*tasks, doomed])
        assert doomed.cancelled()
        return [await task for task in tasks]

    llm._frontend.step = counting
    outputs = asyncio.run(main())
    del llm._frontend.step
    assert [output.outputs[0] for output in outputs] == [expected[p] for p in PROMPTS * 3]
    assert max(counts) == 2
    assert llm._limit._free == 2
    llm.shutdown()
    with pytest.raises(ParameterError, match="max_pending"):
        AsyncLLM.over(direct, max_pending=0)


def test_an_idle_engine_sleeps(llm):
    asyncio.run(llm.generate(PROMPTS[0], GREEDY))
    wait_until(lambda: is_idle(llm))
    looks, step = [], llm._frontend.step
    llm._frontend.step = lambda max_steps: looks.append(1) or step(max_steps)
    time.sleep(0.1)
    assert len(looks) <= 1
    del llm._frontend.step


# --- streams -------------------------------------------------------------------------------------


def test_a_stream_grows_to_the_whole(llm, expected):
    async def main():
        return [piece async for piece in llm.stream(PROMPTS[0], GREEDY)]

    pieces = asyncio.run(main())
    texts = [piece.outputs[0].text for piece in pieces]
    assert all(late.startswith(early) for early, late in itertools.pairwise(texts))
    assert pieces[-1].finished
    assert pieces[-1].outputs[0] == expected[PROMPTS[0]]
    assert not any(piece.finished for piece in pieces[:-1])


def test_what_comes_within_an_interval_comes_together_and_the_end_at_once(llm, expected):
    async def main():
        stream = llm.stream(PROMPTS[0], GREEDY, gather=1e6)
        return [(len(each.outputs[0].token_ids), each.finished) async for each in stream]

    sizes = asyncio.run(main())
    assert len(sizes) <= 2
    assert sizes[-1] == (GREEDY.max_tokens, True)


def test_a_slow_reader_stalls_no_other_and_gets_the_newest(llm, expected):
    async def main():
        pieces = []
        async for piece in llm.stream(PROMPTS[0], GREEDY):
            pieces.append(piece)
            if len(pieces) == 1:
                await eventually(lambda: is_idle(llm))  # the whole is there before we ask again
        assert len(pieces) <= 2  # one where the engine was done before we were first asked
        assert pieces[-1].outputs[0] == expected[PROMPTS[0]]

    asyncio.run(main())


def test_leaving_a_stream_early_aborts_it(llm):
    async def main():
        async for _ in llm.stream(PROMPTS[0], LONG):
            break
        await eventually(lambda: is_idle(llm))

    asyncio.run(main())


# --- sessions ------------------------------------------------------------------------------------


def test_commands_that_have_run_do_not_cut_the_next_steps_short(llm):
    thread, interrupt = llm._thread, llm._frontend.engine.interrupt

    def is_requested() -> bool:
        return interrupt.is_requested

    queued = thread.call(lambda: [thread.call(is_requested) for _ in range(2)]).result()
    assert [future.result() for future in queued] == [False, False]


def test_a_session_goes_on_where_it_stopped(llm, expected):
    async def main():
        async with llm.start(PROMPTS[0]) as session:
            assert session.tokens == llm.tokenizer(PROMPTS[0]).input_ids
            first = await session.generate(GREEDY.replace(max_tokens=5))
            second = await session.generate(GREEDY.replace(max_tokens=7))
            assert first.token_ids + second.token_ids == expected[PROMPTS[0]].token_ids
            await session.rewind(len(session.tokens) - 7)
            await session.extend(second.token_ids[:2])
            third = await session.generate(GREEDY.replace(max_tokens=5))
            assert third.token_ids == second.token_ids[2:]
            assert session.text == llm.tokenizer.decode(session.tokens)

    asyncio.run(main())


def test_probes_of_a_running_session_leave_it_alone_and_cost_their_own_tokens(llm):
    async def main():
        async with llm.start(PROMPTS[0]) as session:
            before, probes, start = llm.stats, [], session.prompt_length
            costs = []

            async def probe(length):
                async with await session.fork(length) as fork:
                    await fork.extend([7, 8])
                    answer = await fork.generate(GREEDY.replace(max_tokens=3))
                    probes.append((fork.tokens[:-3], answer.token_ids))
                    costs.append(fork.usage.prefilled + fork.usage.cached)

            stream = session.stream(GREEDY.replace(max_tokens=60))
            tasks, due = [], 10
            async for output in stream:
                while len(output.token_ids) >= due:
                    tasks.append(asyncio.create_task(probe(start + due)))
                    due += 10
            await asyncio.gather(*tasks)
            after = llm.stats
            # Each probe prefills its suffix; one forked after the newest token, which has no KV
            # yet, that token too.
            assert set(costs) <= {2, 3}
            paid = after.prefilled - before.prefilled + after.cached - before.cached
            assert paid == start + sum(costs)
            assert after.decoded - before.decoded == 60 + 3 * len(probes)
        assert len(probes) == 6
        unprobed = await llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=60))
        assert output.token_ids == unprobed.outputs[0].token_ids
        for prefix, answer in probes:
            alone = await llm.generate(prefix, GREEDY.replace(max_tokens=3))
            assert answer == alone.outputs[0].token_ids

    asyncio.run(main())


def test_a_branch_of_a_session_goes_on_as_its_tokens_would_alone(llm):
    async def main():
        async with llm.start(PROMPTS[0]) as session:
            await session.generate(GREEDY)
            length = len(session.tokens) - 3
            branch = await session.branch(length, [7, 8])
            assert branch.tokens == [*session.tokens[:length], 7, 8]
            before = llm.stats
            answer = await branch.generate(GREEDY)
            assert llm.stats.prefilled - before.prefilled == 2
        alone = await llm.generate(branch.tokens[: length + 2], GREEDY)
        assert answer.token_ids == alone.outputs[0].token_ids
        await branch.close()

    asyncio.run(main())


def test_a_branch_of_a_closed_session_computes_its_tokens_again(llm):
    async def main():
        session = llm.start(PROMPTS[0])
        await session.generate(GREEDY)
        tokens = session.tokens
        await session.close()
        async with await session.branch(len(tokens), [7]) as branch:
            assert branch.tokens == [*tokens, 7]
            answer = await branch.generate(GREEDY)
        alone = await llm.generate([*tokens, 7], GREEDY)
        assert answer.token_ids == alone.outputs[0].token_ids

    asyncio.run(main())


def test_a_branch_at_no_length_of_the_session_is_refused(llm):
    async def main():
        async with llm.start(PROMPTS[0]) as session:
            for length in (0, -1, len(session.tokens) + 1):
                with pytest.raises(UsageError, match=rf"has \d+ tokens, not {length}"):
                    await session.branch(length, [7])
            with pytest.raises(ParameterError, match="invalid length"):
                await session.branch(2.5)

    asyncio.run(main())


def test_an_error_of_the_engine_when_it_branches_is_raised_by_the_next_calls(llm, monkeypatch):
    def fail(*_):
        raise RuntimeError("no branch")

    async def main():
        async with llm.start(PROMPTS[0]) as session:
            await session.generate(GREEDY)
            monkeypatch.setattr(llm._thread.frontend, "fork", fail)
            branch = await session.branch(3)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="no branch"):
                    await branch.generate(GREEDY)

    asyncio.run(main())


def test_the_engine_thread_looks_for_no_tokens_that_may_end_a_stop_string(llm, monkeypatch):
    threads, find = [], StopCandidates._find

    def noted(*args):
        threads.append(threading.current_thread())
        return find(*args)

    async def main():
        await llm.generate(PROMPTS[0], GREEDY.replace(stop=["never"]))

    monkeypatch.setattr(StopCandidates, "_find", noted)
    vars(llm._frontend.tokenizer).pop("stop_candidates", None)
    asyncio.run(main())
    assert threads == [threading.current_thread()]


def test_a_session_runs_on_without_an_iterating_client_and_can_be_aborted(llm):
    async def main():
        async with llm.start(PROMPTS[0]) as session:
            stream = session.stream(LONG)
            start = session.prompt_length
            await eventually(lambda: len(session.tokens) >= start + 20)
            await session.abort()
            tokens = session.tokens
            (output,) = [output async for output in stream]
            assert output == await stream.finish()
            assert output.finish_reason is FinishReason.ABORT
            assert output.token_ids == tokens[start:]
            assert 20 <= len(output.token_ids) < 240
            await session.abort()  # nothing to abort: fine
            more = await session.generate(GREEDY.replace(max_tokens=1))
            assert session.tokens == tokens + more.token_ids

    asyncio.run(main())


def test_aborting_ends_a_waiting_generate_with_what_there_is(llm):
    async def main():
        async with llm.start(PROMPTS[0]) as session:
            task = asyncio.create_task(session.generate(LONG))
            await eventually(lambda: len(session.tokens) > session.prompt_length)
            await session.abort()
            assert (await task).finish_reason is FinishReason.ABORT

    asyncio.run(main())


def test_cancelling_a_generate_leaves_the_session_usable(llm):
    async def main():
        async with llm.start(PROMPTS[0]) as session:
            start = session.prompt_length
            task = asyncio.create_task(session.generate(LONG))
            await eventually(lambda: len(session.tokens) > start)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            said = session.tokens[start:]
            await session.generate(GREEDY.replace(max_tokens=2))
            assert session.tokens[start:][: len(said)] == said

    asyncio.run(main())


def test_cancelling_a_look_at_a_stream_leaves_the_engine_alive(llm):
    async def main():
        async with llm.start(PROMPTS[0]) as session:
            stream = session.stream(GREEDY)
            with held(llm):
                look = asyncio.create_task(stream.peek())
                await asyncio.sleep(0)  # it has asked; the engine has not answered
                look.cancel()
                await asyncio.wait([look])
            assert look.cancelled()
            assert len((await stream.finish()).token_ids) == 12

    asyncio.run(main())


def test_several_tasks_may_wait_for_one_stream(llm):
    async def main():
        async with llm.start(PROMPTS[0]) as session:
            stream = session.stream(GREEDY)
            both = asyncio.gather(stream.finish(), stream.finish())
            first, second = await asyncio.wait_for(both, 60.0)
            assert first == second

    asyncio.run(main())


def test_one_generation_at_a_time(llm):
    async def main():
        async with llm.start(PROMPTS[0]) as session:
            session.stream(LONG)
            for change in (
                session.generate(GREEDY),
                session.rewind(1),
                session.extend("x"),
            ):
                with pytest.raises(UsageError, match=r"it is (running|waiting)"):
                    await change
            with pytest.raises(UsageError, match="cannot fork"):
                await session.fork(9999)
            for change in (session.fork, session.rewind):
                with pytest.raises(ParameterError, match="invalid length"):
                    await change(2.5)
        with pytest.raises(UsageError, match="closed"):
            await session.generate(GREEDY)

    asyncio.run(main())


def test_closing_ends_the_generation_and_frees_the_pages(llm):
    async def main():
        session = llm.start(PROMPTS[0])
        stream = session.stream(LONG)
        await stream.reach(1, hold=8)  # it does not end by itself
        assert len(session.tokens) > session.prompt_length
        await session.close()
        await session.close()
        assert llm._frontend.engine.pool.in_use == 0
        assert (await stream.finish()).finish_reason is FinishReason.ABORT

    asyncio.run(main())


def test_forgotten_sessions_and_forks_give_their_pages_back(llm):
    async def main():
        session = llm.start(PROMPTS[0])
        await session.generate(GREEDY)
        fork = await session.fork(4)
        running = await session.fork()
        running.stream(LONG)
        waiting = asyncio.ensure_future(session.fork())
        await asyncio.sleep(0)
        waiting.cancel()  # no coroutine receives its fork
        del session, fork, running, waiting
        await asyncio.sleep(0)

    asyncio.run(main())
    wait_until(lambda: is_idle(llm))


def test_sessions_that_are_forgotten_before_the_engine_has_opened_them_are_closed(llm):
    async def main():
        with held(llm) as entered:
            busy = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY))
            assert await asyncio.to_thread(entered.wait, 60)
            for _ in range(300):
                llm.start("Who?")
        await busy
        await eventually(lambda: is_idle(llm))

    asyncio.run(main())
    assert not llm._frontend._live


def test_a_session_keeps_its_engine_running(direct):
    async def main():
        session = AsyncLLM.over(direct).start(PROMPTS[0])
        gc.collect()
        await session.generate(GREEDY)
        await session.close()

    asyncio.run(main())
    gc.collect()  # the engine thread may still hold the session's last command
    wait_until(lambda: direct._borrower is None)
    direct.generate(PROMPTS[0], GREEDY)  # given back with the last session


# --- the end -------------------------------------------------------------------------------------


def test_the_llm_takes_no_direct_calls_while_lent_and_all_afterwards(direct, expected):
    stream = direct.stream(PROMPTS[0], GREEDY)
    next(stream)
    with pytest.raises(UsageError, match="in progress"):
        AsyncLLM.over(direct)
    stream.close()
    session = direct.start(PROMPTS[0])
    llm = AsyncLLM.over(direct)
    for call in (
        lambda: direct.generate(PROMPTS[0]),
        lambda: direct.start(PROMPTS[0]),
        lambda: AsyncLLM.over(direct),
        session.generate,
        direct.shutdown,
    ):
        with pytest.raises(UsageError, match="run by an AsyncLLM"):
            call()
    llm.shutdown()
    assert session.generate(GREEDY) == expected[PROMPTS[0]]
    session.close()


def test_shutdown_fails_what_is_unfinished_and_everything_later(direct):
    llm = AsyncLLM.over(direct, max_pending=1)

    async def main():
        with held_back(llm, after=1):  # none is over before the shutdown
            session = llm.start(PROMPTS[0])
            stream = session.stream(LONG)
            running = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
            waiting = asyncio.create_task(llm.generate(PROMPTS[1], LONG))
            await eventually(lambda: llm._frontend.engine.pool.in_use > 0)
            llm.shutdown()
            llm.shutdown()
        for call in (
            running,
            waiting,
            stream.finish(),
            llm.generate(PROMPTS[0]),
            session.fork(),
        ):
            with pytest.raises(EngineStopped, match="shut down"):
                await call
        await session.close()
        with pytest.raises(EngineStopped, match="shut down"):
            llm.start(PROMPTS[0])

    asyncio.run(main())
    assert not llm._thread._thread.is_alive()
    expect_empty(direct._frontend.engine)


def test_when_the_engine_dies_everybody_is_told_why(caplog):
    llm = AsyncLLM(speaking(), **FIELDS)

    async def main():
        with held(llm) as entered:
            tasks = [asyncio.create_task(llm.generate(prompt, LONG)) for prompt in PROMPTS]
            assert await asyncio.to_thread(entered.wait, 60)
            llm._frontend.engine.step = lambda max_steps: 1 / 0
        for task in tasks:
            with pytest.raises(EngineStopped, match="ZeroDivisionError") as caught:
                await task
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(EngineStopped, match="ZeroDivisionError"):
            await llm.generate(PROMPTS[0])

    asyncio.run(main())
    assert "the engine died" in caplog.text
    llm.shutdown()


def test_an_async_llm_of_its_own_loads_and_ends_with_its_block(expected):
    async def main():
        async with AsyncLLM(speaking(), **FIELDS) as llm:
            thread = llm._thread._thread
            output = await llm.generate(PROMPTS[0], GREEDY)
        assert not thread.is_alive()
        return output

    assert asyncio.run(main()).outputs[0] == expected[PROMPTS[0]]


def test_a_forgotten_async_llm_ends_its_thread():
    llm = AsyncLLM(speaking(), **FIELDS)
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_sessions_of_which_one_cannot_begin_stay_as_they_were(llm):
    async def refused():
        pair = [llm.start(f"Hello world {name}: ") for name in "AB"]
        first, second = pair
        generations = [(first, GREEDY), (second, GREEDY.replace(stop_token_ids=[10**6]))]
        with pytest.raises(ParameterError, match="stop_token_ids"):
            await AsyncSession.stream_together(generations, length=1)
        with pytest.raises(UsageError, match="begins alike"):
            await AsyncSession.stream_together(
                [(first, GREEDY), (second, GREEDY)], length=len(first.tokens) - 1
            )
        assert first.reads == second.reads == frozenset()
        alone = await first.generate(GREEDY)
        for session in pair:
            await session.close()
        return alone

    assert len(asyncio.run(refused()).token_ids) == 12
