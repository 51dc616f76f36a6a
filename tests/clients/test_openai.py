"""The official ``openai`` package: chats, streams, tools, parsed answers, responses, errors."""

import json

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class Digit(BaseModel):
    digit: int


@pytest.fixture
def client(server):
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(client, model):
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_a_chat_is_answered_with_usage_and_reasoning(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0.0)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert "7" in choice.message.content
    assert choice.message.reasoning_content
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(client, model):
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0.0)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_many_chats_at_once_get_the_answers_of_one_alone(server, model):
    async with AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        import asyncio

        async def ask(number):
            messages = [{"role": "user", "content": f"What is {number} + 4?"}]
            answer = await client.chat.completions.create(
                model=model, messages=messages, temperature=0.0, max_tokens=60
            )
            return answer.choices[0].message.model_dump()

        alone = [await ask(number) for number in range(2)]
        together = await asyncio.gather(*map(ask, [0, 1] * 4))
    assert together == alone * 4


def test_a_method_is_chosen_by_the_name_of_the_model_or_by_a_field(client, model):
    by_name = client.chat.completions.create(
        model=f"majority_vote@3-{model}", messages=QUESTION, temperature=0.6, seed=1
    )
    by_field = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0.6,
        seed=1,
        extra_body={"method": "majority_vote@3"},
    )
    assert by_name.choices[0].message.content == by_field.choices[0].message.content
    plain = client.chat.completions.create(model=model, messages=QUESTION, temperature=0.6, seed=1)
    assert by_name.usage.completion_tokens > plain.usage.completion_tokens


def test_samples_logprobs_and_seeds(client, model):
    fields = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 1.0, "seed": 3}
    fields["reasoning_effort"] = "none"  # log-probabilities of a thought stand apart
    answer = client.chat.completions.create(**fields, n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    again = client.chat.completions.create(**fields, n=2)
    assert [c.message for c in again.choices] == [c.message for c in answer.choices]


def test_a_forced_tool_is_called_with_arguments_of_its_schema(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "add"}},
    )
    choice = answer.choices[0]
    assert choice.message.tool_calls[0].function.name == "add"
    arguments = json.loads(choice.message.tool_calls[0].function.arguments)
    assert arguments["a"] in (1, 2)
    assert arguments["b"] in (3, 4)


def test_an_answer_is_parsed_into_a_model(client, model):
    answer = client.chat.completions.parse(
        model=model, messages=QUESTION, response_format=Digit, max_tokens=400
    )
    assert isinstance(answer.choices[0].message.parsed, Digit)


def test_a_completion_continues_a_text(client, model):
    answer = client.completions.create(model=model, prompt="3 + 4 =", max_tokens=4, temperature=0)
    stream = client.completions.create(
        model=model, prompt="3 + 4 =", max_tokens=4, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text
    assert answer.usage.completion_tokens <= 4


def test_a_response_is_made_and_streamed(client, model):
    fields = {"model": model, "input": "What is 3 + 4?", "temperature": 0.0}
    response = client.responses.create(**fields)
    assert response.status == "completed"
    assert "7" in response.output_text
    with client.responses.stream(**fields) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == response.output_text == text


def test_errors_have_the_classes_of_the_client(client, model):
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="nothing", messages=QUESTION)
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            model=model, messages=QUESTION, extra_body={"no_such_field": 1}
        )
    assert caught.value.param == "no_such_field"
    with pytest.raises(APIStatusError):
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)


def test_the_id_of_a_request_comes_back(client, model):
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"


def test_a_client_that_stops_reading_ends_the_request(client, model, server):
    import urllib.request

    stream = client.chat.completions.create(
        model=model, messages=QUESTION, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    for _ in range(600):
        with urllib.request.urlopen(f"{server}/v1/load") as page:
            if json.load(page)["running"] == 0:
                return
    pytest.fail("the request went on without its client")
