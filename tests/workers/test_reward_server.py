"""``RewardServerWorker``: scores come from a server, by the endpoints of vLLM's pooling models."""

import asyncio
import math

import pytest

from forethought.errors import ParameterError, RequestError, UsageError
from forethought.scaffolding import (
    NativeGenerationController,
    PRMController,
    RewardServerWorker,
    RewardTask,
    ScaffoldingLlm,
    ScriptedWorker,
)
from forethought.workers.concurrency import AdaptiveConcurrency
from reward_models import tokenizer
from reward_server import serving

openai = pytest.importorskip("openai")


def worker_of(server, model="rm", max_retries=0, **settings):
    client = openai.AsyncOpenAI(
        base_url=server.url, api_key="none", max_retries=max_retries, timeout=60
    )
    return RewardServerWorker(client, model, **settings)


def score(worker, task):
    async def run():
        await worker.run_task(task)
        await worker.async_shutdown()

    asyncio.run(run())
    return task.score


def task():
    return RewardTask(input_str="1+1?", output_str="2")


def test_an_answer_is_scored_by_classify_as_a_chat_and_its_tokens_are_counted():
    with serving({"/classify": {"index": 0, "probs": [-3.5], "num_classes": 1}}) as server:
        scored = task()
        assert score(worker_of(server), scored) == -3.5
    path, body = server.requests[-1]
    assert path == "/classify"
    assert body == {
        "model": "rm",
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
        ],
        "use_activation": False,
    }
    counted = scored.usage
    assert (counted.prompt_tokens, counted.prefilled, counted.cached) == (9, 5, 4)


def test_with_a_tokenizer_the_chat_is_sent_as_text():
    with serving({"/v1/classify": {"probs": [0.25, 0.75]}}) as server:
        assert score(worker_of(server, tokenizer=tokenizer()), task()) == 0.75
    (path, body) = server.requests[0]
    assert (path, body["input"]) == ("/v1/classify", "<|user|>1+1?<|assistant|>2<|end|>")
    assert body["add_special_tokens"] is False
    assert "messages" not in body


def test_two_logits_become_the_probability_of_the_second():
    for logits in ([1.0, 3.0], [-2.0, 0.0]):
        with serving({"/classify": {"probs": logits}}) as server:
            assert score(worker_of(server), task()) == pytest.approx(1 / (1 + math.exp(-2.0)))


def test_score_takes_question_and_answer_as_a_pair():
    with serving({"/v1/score": {"score": 0.5}}) as server:
        assert score(worker_of(server, endpoint="score"), task()) == 0.5
    path, body = server.requests[0]
    assert (path, body["text_1"], body["text_2"]) == ("/v1/score", "1+1?", "2")


@pytest.mark.parametrize("rows_of", ["tokens", "steps"])
def test_steps_are_read_where_they_end(rows_of):
    words = tokenizer()
    separator = words.convert_tokens_to_ids("<extra_0>")

    def pooled(body):
        ids = body["input"]
        steps = [place for place, token in enumerate(ids) if token == separator]
        chosen = range(len(ids)) if rows_of == "tokens" else steps
        good = dict(zip(steps, (0.5, 0.25), strict=True))
        return {"data": [[1 - good.get(place, 0.0), good.get(place, 0.0)] for place in chosen]}

    with serving({"/pooling": pooled}) as server:
        worker = worker_of(server, tokenizer=words, step_format="chat")
        judge = PRMController.of(worker)
        scored = RewardTask(input_str="q", output_str="one\n\ntwo")
        with ScaffoldingLlm(_Scoring(judge, scored), {"reward": worker}) as llm:
            llm.generate("q")
    assert judge.step_scores == [[0.5, 0.25]]
    assert judge.scores == [0.125]
    assert server.requests[-1][1]["task"] == "token_classify"


class _Scoring(NativeGenerationController):
    def __init__(self, judge, scored):
        super().__init__()
        self.judge, self.scored = judge, scored

    def clone(self):
        return self

    def process(self, tasks, **kwargs):
        yield from self.judge.process([self.scored])
        tasks[0].output_str = str(self.judge.scores)


def test_the_model_is_the_first_that_the_server_lists():
    with serving({"/classify": {"probs": [1.0]}}) as server:
        worker = worker_of(server, model=None)
        assert score(worker, task()) == 1.0
    assert server.requests[-1][1]["model"] == "listed"


def test_the_endpoint_is_looked_for_once():
    with serving({"/classify": {"probs": [1.0]}}) as server:
        worker = worker_of(server)
        for _ in range(2):
            score(worker, task())
    assert [path for path, _ in server.requests] == ["/v1/classify", "/classify", "/classify"]


def test_a_server_without_the_endpoint_is_named_with_what_to_do():
    with (
        serving({}) as server,
        pytest.raises(UsageError, match=r"does not score by classify.*tokenizer"),
    ):
        score(worker_of(server), task())


def test_an_answer_without_a_score_is_an_error_that_shows_it():
    for wrong in ({"probs": [0.1, 0.2, 0.7]}, {"label": "x"}, {"probs": []}):
        with (
            serving({"/classify": wrong}) as server,
            pytest.raises(RequestError, match="sent no score"),
        ):
            score(worker_of(server), task())


def test_rows_that_are_neither_of_tokens_nor_of_steps_are_refused():
    words = tokenizer()
    with serving({"/pooling": {"data": [[0.5, 0.5]] * 2}}) as server:
        worker = worker_of(server, tokenizer=words, step_format="chat")
        steps = RewardTask(input_tokens=[1, 2, 3], step_positions=[2])
        with pytest.raises(RequestError, match="sent no score"):
            score(worker, steps)


def test_a_refused_request_is_sent_again():
    with serving({"/v1/classify": {"probs": [1.0]}}) as server:
        server.fail_with = [503]
        assert score(worker_of(server, max_retries=1), task()) == 1.0
        server.fail_with = [429]
        limited = worker_of(server, concurrency=AdaptiveConcurrency(2, pause=0.001))
        assert score(limited, task()) == 1.0
    assert len(server.requests) == 4


def test_a_server_that_is_not_there_is_named():
    with serving({}) as server:
        url = server.url
    with pytest.raises(ConnectionError, match=f"no server answers at {url}"):
        score(worker_of(server), task())


def test_best_of_n_takes_the_answer_that_the_server_prefers():
    from forethought import methods
    from forethought.scaffolding import NativeRewardController

    def prefer(body):
        return {"probs": [float(body["messages"][1]["content"] == "right")]}

    with serving({"/classify": prefer}) as server:
        chosen = methods.create(
            "best_of_n", reward_controller=NativeRewardController(), default_sample_num=3
        )
        workers = {"generation": ScriptedWorker(["a", "right", "b"]), "reward": worker_of(server)}
        with ScaffoldingLlm(chosen, workers) as llm:
            result = llm.generate("q")
    assert result.output.text == "right"
    assert result.usage.prompt_tokens >= 27


def test_settings_that_cannot_be_are_refused_by_name():
    for settings, name in (
        ({"endpoint": "rerank"}, "endpoint"),
        ({"step_format": "lines", "tokenizer": 1}, "step_format"),
        ({"step_format": "chat"}, "tokenizer"),
        ({"step_format": "chat", "tokenizer": 1, "endpoint": "score"}, "endpoint"),
    ):
        with pytest.raises(ParameterError, match=name):
            RewardServerWorker(object(), "rm", **settings)


def test_tasks_of_the_other_kind_are_refused():
    whole = RewardServerWorker(object(), "rm")
    steps = RewardServerWorker(object(), "rm", tokenizer=tokenizer(), step_format="chat")
    for worker, wrong in (
        (whole, RewardTask(input_tokens=[1], step_positions=[0])),
        (steps, task()),
        (whole, RewardTask(input_str="q")),
    ):
        with pytest.raises(ParameterError, match=r"scores (steps|whole)|nothing to score"):
            asyncio.run(worker.run_task(wrong))
