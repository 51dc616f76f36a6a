"""The profile of a model: what its files say of how it is to be used, and who uses it."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from pathlib import Path

import pytest

from engines import drain, expect_empty
from forethought import AsyncLLM, SamplingParams
from forethought.config.engine import LlmArgs
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.errors import ParameterError
from forethought.llm.profile import ModelProfile
from forethought.llm.tokenizer import Tokenizer
from forethought.scaffolding import EngineWorker, GenerationTask
from models import tiny
from mtp_modules import saved
from tokens import speaking, thinking

PROMPT = [3, 1, 4, 1, 5]


def profile_of(path: Path, **generation: object) -> ModelProfile:
    """The profile of a model with this ``generation_config.json``."""
    (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelProfile.read(Tokenizer.load(path), path)


# ---- what files say ------------------------------------------------------------------------------


def test_a_model_that_thinks_says_how_a_thought_opens_and_where_the_answer_is() -> None:
    path = thinking()
    profile = ModelProfile.read(Tokenizer.load(path), path)
    assert profile.thinking_markers == ("<think>", "</think>")
    assert profile.opens_thought
    assert profile.to_dict()["answer"] == "after </think>"


def test_a_switch_of_the_template_is_named(tmp_path: Path) -> None:
    shutil.copytree(thinking(), tmp_path / "m")
    tokenizer = Tokenizer.load(tmp_path / "m")
    template = tokenizer.hf.chat_template
    tokenizer.hf.chat_template = "{% if enable_thinking %}{% endif %}" + template
    assert ModelProfile.read(tokenizer, tmp_path / "m").thinking_switch == "enable_thinking"
    tokenizer.hf.chat_template = "{{ messages[0].thinking }}{{ 'thinking' }}" + template
    assert ModelProfile.read(tokenizer, tmp_path / "m").thinking_switch is None
    assert profile_of(tmp_path / "m").thinking_switch is None


def test_sampling_is_that_of_the_generation_config(tmp_path: Path) -> None:
    shutil.copytree(speaking(), tmp_path / "m")
    profile = profile_of(tmp_path / "m", temperature=0.6, top_k=20, typical_p=0.9)
    assert profile.sampling == {"temperature": 0.6, "top_k": 20}
    assert profile.not_honoured == ("typical_p",)
    assert not profile.thinks
    assert profile.to_dict()["answer"] == "the whole text"


# ---- defaults of tasks ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> AsyncLLM:
    return AsyncLLM(speaking(), dtype="float32")


def sampled(worker: EngineWorker, **fields: object) -> dict[str, object]:
    """The sampling parameters of a task with these fields."""
    task = GenerationTask(input_str="Hello", max_tokens=1, **fields)  # type: ignore[arg-type]
    asyncio.run(worker.run_task(task))
    assert isinstance(task.llm_request_params, dict)
    return task.llm_request_params


def test_a_worker_takes_defaults_where_neither_task_nor_controller_sets_a_field(
    llm: AsyncLLM,
) -> None:
    worker = EngineWorker(llm, sampling_defaults={"temperature": 0.6, "top_k": 5}, temperature=0.7)
    params = sampled(worker)
    assert (params["temperature"], params["top_k"]) == (0.7, 5)
    params = sampled(worker, temperature=0.0, top_k=0)
    assert params.get("temperature", 1.0) == 0.0
    assert params.get("top_k", 0) == 0
    assert sampled(EngineWorker(llm)).get("temperature", 1.0) == 1.0


def test_a_default_outside_its_range_is_refused(llm: AsyncLLM) -> None:
    for defaults in ({"top_p": 2.0}, {"warmth": 1.0}):
        with pytest.raises(ParameterError):
            EngineWorker(llm, sampling_defaults=defaults)


# ---- drafters inside -----------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A target whose checkpoint has two MTP modules."""
    path = tmp_path / "target"
    shutil.copytree(tiny("llama"), path)
    shutil.copy(saved("llama", 2) / "model.safetensors", path / "mtp.safetensors")
    return path


def built(path: Path, **fields: object) -> Engine:
    cache = {"max_tokens": 512}
    args = LlmArgs.from_dict({"model": path, "dtype": "float32", "kv_cache_config": cache} | fields)
    return resolve.build(args, path)


def tokens_of(machine: Engine) -> list[int]:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    [sequence] = machine.add(PROMPT, params)
    drain(machine)
    expect_empty(machine)
    return sequence.tokens


def test_mtp_modules_in_a_checkpoint_draft_by_themselves_and_change_no_token(
    shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        machine = built(shipped)
    assert list(machine.speculation.names) == ["mtp"]
    [line] = [r.message for r in caplog.records if "mtp in the checkpoint" in r.message]
    assert "--speculative none" in line
    plain = built(shipped, speculative_config=[])
    assert list(plain.speculation.names) == []
    assert tokens_of(machine) == tokens_of(plain) == tokens_of(built(tiny("llama")))


def test_a_drafter_of_the_callers_choice_is_the_only_one(shipped: Path) -> None:
    assert list(built(shipped, speculative_config="ngram").speculation.names) == ["ngram"]


def test_modules_that_fail_to_load_cost_the_drafts_and_nothing_else(
    shipped: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(resolve, "build_drafter_entry", fail)
    machine = built(shipped)
    assert list(machine.speculation.names) == []
    assert "mtp in the checkpoint: not used, as it fails" in caplog.text
    assert len(tokens_of(machine)) == len(PROMPT) + 24


def test_modules_that_do_not_fit_are_left_out_and_the_log_says_why(
    shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(saved("llama", 1, "qwen") / "model.safetensors", shipped / "mtp.safetensors")
    from safetensors.torch import load_file, save_file

    tensors = load_file(shipped / "mtp.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, shipped / "mtp.safetensors")
    with caplog.at_level(logging.INFO):
        machine = built(shipped)
    assert list(machine.speculation.names) == []
    assert "not used, as its checkpoint lacks mtp.fc.weight" in caplog.text
    assert tokens_of(machine) == tokens_of(built(tiny("llama")))
