"""Every method in front of a chat server works on the conversation, or is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from forethought import methods
from forethought.scaffolding.controller import ConversationForm
from forethought.server.backends.remote_backend import RemoteBackend
from forethought.workers.upstream import UpstreamWorker
from http_servers import Served, served
from openai_server import OpenaiServer, serving

CHAT = "/v1/chat/completions"
QUESTION = "Use 2 and 4 to make 6."
HISTORY = [
    {"role": "system", "content": "Answer in Dutch."},
    {"role": "user", "content": "What is 2+3?"},
    {"role": "assistant", "content": "Vijf."},
]
TALK = [*HISTORY, {"role": "user", "content": QUESTION}]
ANSWER = "\\boxed{6}"

DOCUMENTS = ["The sum of 2 and 4 is 6.", "Cheese is yellow."]
BEST: dict[str, Any] = {"method": "best_of_n@2"}
PIPELINE = {
    "layers": [
        [{"type": "generator", "samples": 2}],
        [{"type": "critic"}],
        [{"type": "unit_test_generator"}],
        [{"type": "unit_test_evaluator", "top_k": 2}],
        [{"type": "verifier", "top_k": 2}],
        [{"type": "ranker", "top_k": 2}],
        [{"type": "fuser", "samples": 1}],
    ]
}
POLICY = {"num_probes": 2, "edges": [], "methods": ["self_refine"]}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "majority_vote": {"method": "majority_vote@2"},
    "best_of_n": {**BEST, "method_params": {"reward_controller": "judge"}},
    "judge": {**BEST, "method_params": {"reward_controller": "judge"}},
    "compare": {**BEST, "method_params": {"reward_controller": "compare"}},
    "genrm": {**BEST, "method_params": {"reward_controller": "genrm"}},
    "confidence": {**BEST, "method_params": {"reward_controller": "confidence"}},
    "checker": {
        **BEST,
        "method_params": {"reward_controller": {"method": "checker", "checker": "countdown"}},
    },
    "spct": {
        **BEST,
        "method_params": {
            "reward_controller": {
                "method": "spct",
                "num_critiques": 2,
                "meta_reward_controller": "judge",
            }
        },
    },
    "no_thinking": {"method": "no_thinking+majority_vote@2"},
    "repeated_sampling": {
        "method": "repeated_sampling@2",
        "method_params": {"verifier": "countdown"},
    },
    "budget_vote": {
        "method": "budget_vote",
        "method_params": {"total_tokens": 400, "default_sample_num": 2, "max_sample_num": 2},
    },
    "deepconf": {"method": "deepconf@2"},
    "self_refine": {"method": "self_refine", "method_params": {"num_refinements": 2}},
    "sequential_revision": {
        "method": "sequential_revision",
        "method_params": {"selection": "reward", "reward_controller": "judge"},
    },
    "compute_optimal": {"method": "compute_optimal", "method_params": {"policy": POLICY}},
    "archon": {"method": "archon", "method_params": {"pipeline": PIPELINE}},
    "drag": {"method": "drag", "method_params": {"documents": DOCUMENTS}},
    "iterdrag": {
        "method": "iterdrag",
        "method_params": {"documents": DOCUMENTS, "max_iterations": 2},
    },
}
CANNOT = [name for name in methods.names() if methods.describe(name).conversation != "messages"]


class Behind(OpenaiServer):
    """Answers chats so that every method goes through all that it asks, and notes the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, list[dict[str, Any]]]] = []
        self.says = self.say

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        self.asked.append((path, body.get("messages", [])))
        yield from super().chunks(path, body)

    def say(self, body: dict[str, Any]) -> list[str]:
        last = str(body["messages"][-1]["content"])
        if "Scores:" in last:
            return ["Scores: [", "7, 4]"]
        if last.endswith("The next line:") or ("Documents:" in last and last.endswith(QUESTION)):
            return ["Follow up: ", "what is 2 and 4?"]
        return ["- it is 6\n", "Test 1: Passed [Correct] ", ANSWER]


@pytest.fixture(scope="module")
def behind() -> Iterator[Behind]:
    with serving(Behind()) as running:
        assert isinstance(running, Behind)
        yield running


@pytest.fixture(scope="module")
def server(behind: Behind) -> Iterator[Served]:
    worker = UpstreamWorker([behind.url], "m", thinking_field="thinking_token_budget")
    backend = RemoteBackend(worker, "m")
    with served(backend) as running:
        yield running
    backend.close()


def test_the_table_has_every_method() -> None:
    assert sorted([*REQUESTS, *CANNOT]) == sorted(methods.names())


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_of_a_method_has_the_system_prompt_and_the_history(
    name: str, server: Served, behind: Behind
) -> None:
    behind.asked.clear()
    answer = server.send(CHAT, {"messages": TALK, "temperature": 0.7, **REQUESTS[name]})
    assert answer.status == 200, answer.text
    assert behind.asked
    for path, messages in behind.asked:
        assert path == CHAT
        assert [{k: m[k] for k in ("role", "content")} for m in messages[:3]] == HISTORY
        assert len(messages) > 3
        roles = [message["role"] for message in messages]
        assert roles[-1] == "user"
        assert all(before != after for before, after in itertools.pairwise(roles))
        glued = [m for m in messages if QUESTION + "\n" + ANSWER in str(m["content"])]
        assert not glued


@pytest.mark.parametrize("name", ["self_refine", "sequential_revision", "genrm"])
def test_what_a_method_asks_about_an_answer_follows_it_as_a_message(
    name: str, server: Served, behind: Behind
) -> None:
    behind.asked.clear()
    server.send(CHAT, {"messages": TALK, "temperature": 0.7, **REQUESTS[name]})
    longer = [messages for _, messages in behind.asked if len(messages) > 4]
    assert longer
    for messages in longer:
        assert messages[3] == {"role": "user", "content": QUESTION}
        assert messages[4]["role"] == "assistant"
        assert messages[4]["content"].endswith(ANSWER)


@pytest.mark.parametrize("name", CANNOT)
def test_a_method_that_cannot_is_refused_by_name_and_says_so(name: str, server: Served) -> None:
    found = {each["name"]: each for each in server.send("/v1/methods").json["data"]}
    assert found[name]["conversation"] is False
    settings = {"sleep_time": {"context": "Some text."}}.get(name, {})
    answer = server.send(CHAT, {"messages": TALK, "method": name, "method_params": settings})
    assert answer.status == 400
    assert name in answer.error["message"]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("majority_vote@2", {"generation_controller": "dynasor"}),
        ("compute_optimal", {"policy": {**POLICY, "methods": ["beam_search@2"]}}),
    ],
)
def test_one_inside_another_is_refused_by_name_as_well(
    method: str, params: dict[str, Any], server: Served
) -> None:
    answer = server.send(CHAT, {"messages": TALK, "method": method, "method_params": params})
    assert answer.status == 400
    assert "dynasor" in answer.text or "beam_search" in answer.text


@pytest.mark.parametrize("name", ["no_thinking", "budget_vote"])
def test_a_method_that_limits_thoughts_needs_a_field_for_it(name: str, behind: Behind) -> None:
    backend = RemoteBackend(UpstreamWorker([behind.url], "m"), "m")
    with served(backend) as running:
        found = {each["name"]: each for each in running.send("/v1/methods").json["data"]}
        assert found[name]["conversation"] is False
        answer = running.send(CHAT, {"messages": TALK, "method": name})
        assert answer.status == 400
        assert name in answer.error["message"]
        assert "--thinking-field" in answer.error["message"]
    backend.close()


def test_methods_that_answer_conversations_say_so(server: Served) -> None:
    found = {each["name"]: each for each in server.send("/v1/methods").json["data"]}
    can = [name for name in REQUESTS if name not in methods.REWARDS]
    assert all(found[name]["conversation"] is True for name in can)
    assert ConversationForm.MESSAGES == "messages"


def test_feedback_is_not_of_the_shape_of_the_answer_and_calls_no_tool(
    server: Served, behind: Behind
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    behind.requests.clear()
    body = {"messages": TALK, "method": "self_refine", "response_format": {"type": "json_object"}}
    server.send(CHAT, {**body, "tools": [tool], "method_params": {"num_refinements": 1}})
    answer, feedback, better = behind.requests
    for asked in (answer, better):
        assert asked["response_format"] == {"type": "json_object"}
        assert asked["tool_choice"] == "auto"
    assert "response_format" not in feedback
    assert feedback["tool_choice"] == "none"


def test_an_answer_that_calls_a_tool_is_not_revised(server: Served, behind: Behind) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    behind.requests.clear()
    behind.tool_call = {"name": "add", "arguments": ['{"a":', " 1}"]}
    try:
        body = {"messages": TALK, "method": "self_refine", "tools": [tool]}
        choice = server.send(CHAT, body).json["choices"][0]
    finally:
        behind.tool_call = None
    assert len(behind.requests) == 1
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"a": 1}',
    }
