"""Methods are models of the program ``llm``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

llm = pytest.importorskip("llm", reason="llm is not installed")

QUESTION = "Sam has 110 nuts. He uses 84. How many nuts does Sam have now?"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    from forethought import llm_plugin

    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    registered: dict[str, Any] = {}
    llm_plugin.register_models(lambda model: registered.update({model.model_id: model}))
    yield registered
    for model in registered.values():
        for worker in model._workers.values():
            worker.shutdown()


def test_methods_that_need_no_settings_are_listed(models: dict[str, Any]) -> None:
    assert {"forethought/plain", "forethought/dynasor", "forethought/majority_vote"} <= {*models}
    assert not {"forethought/best_of_n", "forethought/drag", "forethought/judge"} & {*models}


def test_an_answer_comes_without_its_thought_and_with_its_tokens(models: dict[str, Any]) -> None:
    response = models["forethought/majority_vote"].prompt(QUESTION, samples=3, seed=1)
    assert response.text().strip() == "The answer is \\boxed{26}."
    usage = response.usage()
    assert usage.input > 0
    assert usage.output > 20


def test_a_conversation_reaches_the_model(models: dict[str, Any]) -> None:
    from forethought.llm_plugin import _messages

    conversation = models["forethought/plain"].conversation()
    first = conversation.prompt(QUESTION, system="be brief", max_tokens=200)
    first.text()
    second = conversation.prompt("And then?", max_tokens=5)
    second.text()
    roles = [message["role"] for message in _messages(second.prompt, conversation)]
    assert roles[:3] == ["system", "user", "assistant"]


def test_a_mistake_is_shown_as_it_stands(models: dict[str, Any]) -> None:
    with pytest.raises(llm.ModelError, match="nowhere"):
        models["forethought/plain"].prompt("hi", model="/nowhere").text()
