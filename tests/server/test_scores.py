"""``POST /v1/score`` and ``/v1/rerank``, with a cross-encoder, and with a process reward model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2ForTokenClassification,
)

import reward_models
from forethought.errors import ContextLengthError
from forethought.llm.tokenizer import Tokenizer as ForethoughtTokenizer
from forethought.scaffolding.base_task import RewardTask
from forethought.scaffolding.reward_controller import NativeRewardController
from forethought.server.backends.backend import worker_table
from forethought.server.backends.engine_backend import judging, scored_length
from forethought.server.backends.scored_length import ScoredLength
from forethought.server.backends.scripted_backend import ScriptedBackend
from forethought.server.endpoints import scores
from forethought.workers.reward import RewardWorker
from http_servers import Served, scripted, served

REWARD = NativeRewardController.WorkerTag.REWARD.value
QUERY = "What is 3 + 4?"
DOCUMENTS = ["It is 7.", "The answer is 9, and then some.", "3 + 4 = 7"]


class Judged(ScriptedBackend):
    """A script with a reward model, which it closes."""

    def __init__(self, judge: RewardWorker) -> None:
        super().__init__(["hello"])
        self._judge, self.reward = judge, judging(judge)
        self.workers = worker_table(self.worker, judge)
        self.scores_are_logits = judge.scores_are_logits
        self.scored_length = scored_length(judge)

    def close(self) -> None:
        self._judge.shutdown()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = reward_models.tokenizer()
    words.chat_template = None  # it reads pairs of texts
    path = tmp_path_factory.mktemp("encoder") / "model"
    return reward_models.save(path, BertForSequenceClassification, words, num_labels=1)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Served]:
    backend = Judged(RewardWorker(directory, dtype="float32"))
    with served(backend) as running:
        yield running
    backend.close()


@pytest.fixture(scope="module")
def logits(directory: Path) -> list[float]:
    """Of each document, as transformers computes it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = BertForSequenceClassification.from_pretrained(directory)
    values = []
    for document in DOCUMENTS:
        with torch.inference_mode():
            inputs = tokenizer(QUERY, document, return_tensors="pt")
            values.append(float(model(**inputs).logits[0, 0]))
    return values


def test_scores_are_the_sigmoids_of_the_logits(server: Served, logits: list[float]) -> None:
    body = {"model": "scripted", "text_1": QUERY, "text_2": DOCUMENTS}
    answer = server.send("/v1/score", body).json
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    values = [entry["score"] for entry in answer["data"]]
    assert values == pytest.approx(torch.tensor(logits).sigmoid().tolist(), abs=1e-4)
    assert answer["usage"]["prompt_tokens"] > 0
    raw = server.send("/score", {**body, "use_activation": False}).json["data"]
    assert [entry["score"] for entry in raw] == pytest.approx(logits, abs=1e-4)


def test_as_many_first_texts_make_pairs(server: Served) -> None:
    pairs = {"text_1": [QUERY] * 3, "text_2": DOCUMENTS}
    both = [
        [entry["score"] for entry in server.send("/v1/score", body).json["data"]]
        for body in (pairs, {**pairs, "text_1": QUERY})
    ]
    assert both[0] == pytest.approx(both[1], abs=1e-5)  # texts that come together share a batch
    single = server.send("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS[0]}).json["data"]
    assert len(single) == 1


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ordered_by_their_scores(
    server: Served, logits: list[float], path: str
) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    body = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": True}
    answer = server.send(path, body).json
    order = sorted(range(3), key=lambda index: -logits[index])[:2]
    assert [result["index"] for result in answer["results"]] == order
    assert [result["document"]["text"] for result in answer["results"]] == [
        DOCUMENTS[index] for index in order
    ]
    plain = server.send(path, {"query": QUERY, "documents": documents}).json["results"]
    assert [set(result) for result in plain] == [{"index", "relevance_score"}] * 3


def test_a_config_can_say_that_scores_are_no_logits(directory: Path, tmp_path: Path) -> None:
    path = reward_models.save(
        tmp_path / "model",
        BertForSequenceClassification,
        num_labels=1,
        sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"},
    )
    for model, is_logit in ((path, False), (directory, True)):
        with RewardWorker(model) as worker:
            assert worker.scores_are_logits is is_logit


def test_a_process_reward_model_scores_by_the_product_of_steps(tmp_path: Path) -> None:
    path = reward_models.save(tmp_path / "model", Qwen2ForTokenClassification, num_labels=2)
    backend = Judged(RewardWorker(path, dtype="float32"))
    with served(backend) as running:
        answer = running.send("/v1/score", {"text_1": QUERY, "text_2": "3 + 4\n\nIt is 7."}).json
    tokens, positions = cast("Any", backend.reward).format.encode(QUERY, "3 + 4\n\nIt is 7.")
    assert len(positions) == 2
    task = RewardTask(input_tokens=tokens, step_positions=positions)
    asyncio.run(backend.workers[REWARD].run_task(task))
    backend.close()
    assert answer["data"][0]["score"] == pytest.approx(task.score)


def test_a_small_body_of_much_text_does_not_hold_up_the_event_loop(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, prepare = set[str](), scores._task

    def noted(*args: Any) -> RewardTask:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return prepare(*args)

    monkeypatch.setattr(scores, "_task", noted)
    query, documents = "a " * 100, [f"{number}" for number in range(100)]
    for path, body in (
        ("/v1/rerank", {"query": query, "documents": documents}),
        ("/v1/score", {"text_1": query, "text_2": documents}),
    ):
        assert server.send(path, body).status == 200
    assert threads == {"forethought-request"}


def test_the_first_text_that_is_too_long_ends_a_request_before_others_are_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = reward_models.save(tmp_path / "model", Qwen2ForTokenClassification, num_labels=2)
    backend = Judged(RewardWorker(path, dtype="float32"))
    steps, lengths = cast("Any", backend.reward).format, list[int]()
    encode = steps.encode

    def noted(question: str, answer: str) -> Any:
        lengths.append(len(answer))
        return encode(question, answer)

    monkeypatch.setattr(steps, "encode", noted)
    with served(backend) as running:
        for documents in (["a" * 1_000_000], ["a" * 600, "7"], ["7", "a" * 600, "7"]):
            answer = running.send("/v1/rerank", {"query": QUERY, "documents": documents})
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    backend.close()
    assert lengths == [600, 1, 600]


def test_spaces_that_a_tokenizer_drops_count_for_nothing() -> None:
    words = Tokenizer(WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = BertPreTokenizer()
    length = ScoredLength(ForethoughtTokenizer(PreTrainedTokenizerFast(tokenizer_object=words)), 8)
    length.check_text("a" + " \n" * 1000 + "a")
    for text in ("a " * 1000, "a" * 1000):
        with pytest.raises(ContextLengthError, match="characters"):
            length.check_text(text)


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank"])
def test_a_server_without_a_reward_model_says_what_to_start_it_with(path: str) -> None:
    body = {"query": "a", "documents": ["b"]}
    if path == "/v1/score":
        body = {"text_1": "a", "text_2": "b"}
    with scripted(["hello"]) as running:
        answer = running.send(path, body)
    assert answer.status == 400
    assert "--reward-model DIR" in answer.error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": [1]}, "text_2.0"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "softmax": True}, "softmax"),
        ("/v1/score", {"text_1": "a" * 9000, "text_2": ["b"] * 1000}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 1025}, "documents"),
        ("/v1/rerank", {"query": None, "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents.0.title"),
        ("/v1/rerank", {"query": "a", "documents": [None]}, "documents.0"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "dynasor-scripted"}, "model"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(
    server: Served, path: str, body: Any, param: str
) -> None:
    answer = server.send(path, body)
    assert (answer.status, answer.error["param"]) == (400, param), answer.text


def test_another_model_is_404_and_a_text_that_is_too_long_is_400(server: Served) -> None:
    body = {"query": "a", "documents": ["b"]}
    assert server.send("/v1/rerank", {**body, "model": "other"}).status == 404
    long = {**body, "documents": ["ok", "b " * 3000]}
    assert server.send("/v1/rerank", long).error["code"] == "context_length_exceeded"
    assert server.send("/v1/rerank", body).status == 200


def test_many_documents_are_scored_in_turns(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [f"It is {number}." for number in range(10)]
    body = {"text_1": QUERY, "text_2": documents}
    together = server.send("/v1/score", body).json["data"]
    monkeypatch.setattr(scores, "_AT_ONCE", 3)
    apart = server.send("/v1/score", body).json["data"]
    values = [[entry["score"] for entry in data] for data in (together, apart)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_an_empty_list_of_texts_is_too_short_and_not_of_the_wrong_type(server: Served) -> None:
    answer = server.send("/v1/score", {"text_1": [], "text_2": "b"})
    assert "at least 1 item" in answer.error["message"], answer.text
