"""LiteLLM, as a client of an OpenAI-compatible server."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before it is imported: it would be fetched

import litellm
import pytest

QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture
def where(server, model):
    return {"model": f"openai/{model}", "api_base": f"{server}/v1", "api_key": "none"}


def test_a_chat_and_its_stream_are_the_same(where):
    answer = litellm.completion(**where, messages=QUESTION, temperature=0.0)
    stream = litellm.completion(**where, messages=QUESTION, temperature=0.0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content
    assert "7" in text
    assert answer.usage.completion_tokens > 0


def test_thoughts_are_found(where):
    answer = litellm.completion(**where, messages=QUESTION, temperature=0.0)
    assert answer.choices[0].message.reasoning_content


def test_methods_go_through(where):
    answer = litellm.completion(
        **where, messages=QUESTION, temperature=0.0, extra_body={"method": "dynasor"}
    )
    assert answer.choices[0].message.content


def test_errors_are_mapped(where):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**where, messages=QUESTION, extra_body={"no_such_field": 1})


def test_embeddings_go_through(where):
    texts = ["What is 3 + 4?", "What is 3 + 5?"]
    answer = litellm.embedding(**where, input=texts, encoding_format="float")
    assert [len(entry["embedding"]) for entry in answer.data] == [256, 256]
    assert answer.usage.prompt_tokens > 0


def test_documents_are_ranked(server, model):
    answer = litellm.rerank(
        model=f"hosted_vllm/{model}",
        api_base=server,
        api_key="none",
        query="What is 3 + 4?",
        documents=["3 + 4 = 7. The answer is 7.", "3 + 4 = 9. The answer is 9."],
        top_n=1,
    )
    assert [result["index"] for result in answer.results] in ([0], [1])


def test_ollamas_api_goes_through(server, model):
    answer = litellm.completion(
        model=f"ollama_chat/{model}", api_base=server, messages=QUESTION, temperature=0.0
    )
    assert "7" in answer.choices[0].message.content
