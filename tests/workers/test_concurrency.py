"""How many requests a server gets at once."""

import asyncio
import itertools
import time
from types import SimpleNamespace

import pytest
from openai import AsyncOpenAI

from forethought.errors import ParameterError, TaskError
from forethought.scaffolding import (
    Budget,
    Controller,
    GenerationTask,
    NativeGenerationController,
    ScaffoldingLlm,
    StreamGenerationTask,
)
from forethought.workers.concurrency import (
    NUM_TRIES,
    WINDOW,
    AdaptiveConcurrency,
    is_overload,
)
from forethought.workers.openai import OpenaiWorker
from openai_server import serving


class Refused(Exception):
    status_code = 429


class Runs(Controller):
    """Runs one task to its end."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def process(self, tasks, **kwargs):
        while not getattr(self.task, "end_flag", False):
            yield [self.task]


def ask(server, concurrency, count, at_once=64):
    """The texts of ``asked``."""
    return [result.output.text for result in asked(server, concurrency, count, at_once)]


def asked(server, concurrency, count, at_once=64, **options):
    """Ask as many questions, ``at_once`` at most."""
    client = AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0, timeout=60)
    worker = OpenaiWorker(client, "m", concurrency=concurrency)
    controller = NativeGenerationController({"max_tokens": 4})
    with ScaffoldingLlm(controller, {"generation": worker}, at_once) as llm:
        return llm.generate([f"q{i}" for i in range(count)], **options)


def holding_after(count, server, until):
    """Pieces of an answer; but for the first ``count`` requests, they wait until it is so."""
    numbers = itertools.count()

    def says(body):
        if next(numbers) >= count:
            while not until():
                time.sleep(0.001)
        return ["Hello", " world"]

    server.says = says


def test_a_server_that_rejects_above_a_concurrency_answers_all_requests_near_it():
    with serving() as server:
        server.most_at_once = 6
        # Four answers take the limit from 4 to 8, and no other is over before one is refused.
        holding_after(4, server, until=lambda: server.num_refused)
        limit = AdaptiveConcurrency(64, pause=0.01)
        assert ask(server, limit, 200) == ["Hello world"] * 200
        assert server.num_refused == limit.num_refused > 0
        assert server.most_seen == 6
        assert 1 <= limit.limit < 32  # halved at least once, and no burst later took it back up
        assert limit.num_in_flight == 0


def test_without_a_limit_the_same_server_fails_the_requests():
    with serving() as server:
        server.most_at_once = 6
        holding_after(0, server, until=lambda: server.num_refused)
        with pytest.raises(TaskError):
            ask(server, None, 200)


def test_a_server_with_capacity_gets_all_that_is_allowed_and_no_more():
    with serving() as server:
        holding_after(4, server, until=lambda: server.most_seen >= 8)
        limit = AdaptiveConcurrency(8)
        ask(server, limit, 100)
        assert server.most_seen == 8
        assert limit.limit <= 8
        assert not limit.num_refused


def test_errors_that_are_no_overload_are_raised_at_once():
    with serving() as server:
        server.fail_with = [400]
        with pytest.raises(TaskError):
            ask(server, AdaptiveConcurrency(8), 1)
        assert len(server.requests) == 1


def test_a_server_error_is_asked_again():
    with serving() as server:
        server.fail_with = [503, 500]
        assert ask(server, AdaptiveConcurrency(8, pause=0.001), 1) == ["Hello world"]
        assert len(server.requests) == 3


async def refusing(limit, tries):
    async def create():
        tries.append(limit.num_in_flight)
        raise Refused

    async with limit.request() as request:
        await request.send(create)


def test_a_request_that_is_always_refused_is_given_up_and_its_capacity_given_back():
    limit, tries = AdaptiveConcurrency(4, pause=1e-4), []
    with pytest.raises(Refused):
        asyncio.run(refusing(limit, tries))
    assert len(tries) == NUM_TRIES
    assert (limit.num_in_flight, limit.limit) == (0, 1.0)


def test_the_concurrency_limit_grows_slower_after_an_overload():
    limit = AdaptiveConcurrency(100, first=2)
    limit.num_in_flight = 100
    for expected in (3, 4, 5):
        limit.on_answer(limit.era)
        assert limit.limit == expected
    limit.on_refused(limit.era)
    assert limit.limit == 2.5
    limit.on_answer(limit.era)
    assert limit.limit == pytest.approx(2.9)


def test_an_answer_with_capacity_to_spare_is_no_reason_for_more():
    limit = AdaptiveConcurrency(100, first=2)
    limit.num_in_flight = 1
    limit.on_answer(limit.era)
    assert limit.limit == 2


def test_requests_refused_together_lower_the_limit_once():
    limit = AdaptiveConcurrency(100, first=64)
    era = limit.era
    for _ in range(20):
        limit.on_refused(era)
    assert limit.limit == 32
    for _ in range(10):
        limit.on_refused(limit.era)
    assert limit.limit == 1


def test_first_tokens_that_come_much_later_lower_the_limit_a_little():
    limit = AdaptiveConcurrency(100, first=50)
    for _ in range(WINDOW):
        limit.on_first_token(0.2, limit.era)
    for _ in range(WINDOW):
        limit.on_first_token(0.5, limit.era)
    assert limit.limit == 50
    for _ in range(WINDOW):
        limit.on_first_token(0.7, limit.era)
    assert limit.limit == 45
    for _ in range(2 * WINDOW):
        limit.on_first_token(0.2, limit.era)
    assert limit.limit == 45


def test_times_too_short_to_measure_are_no_overload():
    limit = AdaptiveConcurrency(100, first=50)
    for seconds in (0.0001, 0.04):
        for _ in range(WINDOW):
            limit.on_first_token(seconds, limit.era)
    assert limit.limit == 50


def test_capacity_is_given_in_order_and_a_waiter_that_is_cancelled_takes_none():
    async def main():
        limit, entered = AdaptiveConcurrency(1, first=1), []

        async def use(name, gate):
            async with limit.request():
                entered.append(name)
                await gate.wait()

        gate = asyncio.Event()
        tasks = [asyncio.create_task(use(name, gate)) for name in "abcd"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait(tasks)
        assert entered == ["a", "c", "d"]
        assert limit.num_in_flight == 0

    asyncio.run(main())


def test_the_server_says_how_long_to_wait():
    limit, error = AdaptiveConcurrency(4), Refused()
    error.response = SimpleNamespace(headers={"retry-after": "7"})
    assert limit.pause_before(1, error) == 7.0
    error.response.headers["retry-after"] = "Wed, 21 Oct 2015 07:28:00 GMT"
    assert 0.25 <= limit.pause_before(1, error) <= 0.5
    assert limit.pause_before(20, error) <= 30.0


def test_what_is_an_overload():
    class APITimeoutError(Exception):
        pass

    class APIConnectionError(Exception):
        pass

    assert is_overload(APITimeoutError())
    assert is_overload(TimeoutError())
    assert not is_overload(APIConnectionError())
    statuses = [200, 400, 401, 404, 408, 422, 429, 500, 503, 529]
    errors = [Refused() for _ in statuses]
    for error, status in zip(errors, statuses, strict=True):
        error.status_code = status
    found = [error.status_code for error in errors if is_overload(error)]
    assert found == [408, 429, 500, 503, 529]


@pytest.mark.parametrize("bad", [{"most": 0}, {"most": 4, "first": 0}, {"most": 1.5}])
def test_a_limit_below_one_is_refused(bad):
    with pytest.raises(ParameterError):
        AdaptiveConcurrency(**bad)


def test_an_answer_that_breaks_off_is_asked_for_again_from_its_beginning():
    with serving() as server:
        numbers = itertools.count()

        def says(body):
            server.breaks_off = next(numbers) % 3 < 2
            return ["Hello", " world"]

        server.says = says
        concurrency = AdaptiveConcurrency(4, pause=0.001)
        results = asked(server, concurrency, 3, at_once=1)
        assert [result.output.text for result in results] == ["Hello world"] * 3
        usages = [result.output.usage for result in results]
        assert [(usage.completion_tokens, usage.discarded) for usage in usages] == [(2, 4)] * 3
        assert len(server.requests) == 9
        budget = Budget(tokens=20)
        with pytest.raises(TaskError, match="broke off"):
            asked(server, concurrency, 1, budget=budget)
        with pytest.raises(TaskError, match="broke off"):
            ask(server, None, 1)


@pytest.mark.parametrize(
    "task",
    [
        GenerationTask(streaming_output_flag=True),
        StreamGenerationTask(streaming_step=1),
        GenerationTask(thinking_budget=3),
    ],
)
def test_what_has_been_seen_of_an_answer_is_not_taken_back(task):
    with serving() as server:
        server.breaks_off = True
        client = AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0, timeout=60)
        limit = AdaptiveConcurrency(4, pause=0.001)
        worker = OpenaiWorker(client, "m", concurrency=limit)
        task.input_str, task.worker_tag = "p<think>", "generation"
        llm = ScaffoldingLlm(Runs(task), {"generation": worker})
        with llm, pytest.raises(TaskError, match="broke off"):
            llm.generate("p")
        assert len(server.requests) == 1


def test_an_answer_that_always_breaks_off_fails_in_the_end():
    with serving() as server:
        server.breaks_off = True
        with pytest.raises(TaskError, match="broke off"):
            ask(server, AdaptiveConcurrency(4, pause=0.0001), 1)
        assert len(server.requests) == NUM_TRIES
