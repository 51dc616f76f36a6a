"""instructor: answers as models of pydantic, by a schema and by a forced call.

Its releases exclude versions of what the other clients need, so that no environment of
``make test-clients`` has it: ``pip install --target DIR instructor``, with DIR in PYTHONPATH.
"""

from __future__ import annotations

from typing import Literal

import pytest

instructor = pytest.importorskip(
    "instructor", reason="it goes with none of the other clients: pip install --target"
)
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]


class Sum(pydantic.BaseModel, extra="forbid"):
    """A sum."""

    result: Literal[7, 8]
    is_even: bool


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_an_answer_is_a_model_of_pydantic(server, model, mode):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0),
        mode=instructor.Mode[mode],
    )
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, response_model=Sum, max_retries=0, temperature=0
    )
    assert isinstance(answer, Sum)
    assert answer.result in (7, 8)


def test_a_method_answers_with_a_model_of_pydantic(server, model):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0),
        mode=instructor.Mode.JSON_SCHEMA,
    )
    answer = client.chat.completions.create(
        model=f"majority_vote@4-{model}", messages=QUESTION, response_model=Sum, max_retries=0
    )
    assert isinstance(answer, Sum)
