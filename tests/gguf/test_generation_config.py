"""What ends an answer is all that a file says, or names by a token that ends turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gguf
from forethought.gguf.file import GgufFile
from forethought.gguf.generation_config import generation_config_of
from forethought.gguf.metadata import Metadata
from forethought.gguf.tokenizer import TokenType, Vocabulary
from gguf_files import add_tokenizer, byte_letters, write_model

CONTROL, NORMAL = TokenType.CONTROL, TokenType.NORMAL


def generation(
    folder: Path,
    tokens: dict[str, TokenType] | None = None,
    params: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Of a file with further tokens, whose ids begin at 259."""

    def add(writer: gguf.GGUFWriter, size: int) -> None:
        texts = ["<pad>", "<s>", "</s>", *byte_letters(), *(tokens or {})]
        kinds = [CONTROL] * 3 + [NORMAL] * 256 + list((tokens or {}).values())
        add_tokenizer(writer, "gpt2", texts, kinds, pre="qwen2", merges=[])

    named = {key.replace("__", "."): value for key, value in changes.items()}
    path = write_model(folder / "model.gguf", vocabulary=add, changes=named)
    return generation_config_of(Vocabulary(Metadata(GgufFile.open(path))), params)


def test_the_ends_are_those_of_the_file_and_of_turns(tmp_path: Path) -> None:
    tokens = {"<|im_end|>": CONTROL, "<|eot_id|>": NORMAL, "<|other|>": CONTROL}
    assert generation(tmp_path) == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0}
    assert generation(tmp_path, tokens)["eos_token_id"] == [2, 259]
    more = {"tokenizer__ggml__eot_token_id": 261, "tokenizer__ggml__eom_token_id": 2**31}
    assert generation(tmp_path, tokens, **more)["eos_token_id"] == [2, 261, 259]


def test_a_message_of_harmony_does_not_end_an_answer(tmp_path: Path) -> None:
    tokens = {"<|return|>": CONTROL, "<|end|>": CONTROL, "<|call|>": CONTROL}
    assert generation(tmp_path, tokens)["eos_token_id"] == [2, 259, 261]
    eot = {"tokenizer__ggml__eot_token_id": 260}
    assert generation(tmp_path, tokens, **eot)["eos_token_id"] == [2, 259, 261]
    assert generation(tmp_path, {"<|end|>": CONTROL})["eos_token_id"] == [2, 259]


def test_stops_of_ollama_that_are_tokens_end_an_answer(tmp_path: Path) -> None:
    tokens = {"<|done|>": CONTROL}
    stops = {"stop": ["<|done|>", "User:", 3, "a"]}
    assert generation(tmp_path, tokens, stops)["eos_token_id"] == [2, 259]
    assert generation(tmp_path, tokens, {"stop": "<|done|>"})["eos_token_id"] == [2, 259]


@pytest.mark.parametrize("params", [None, {"temperature": 0.5, "repeat_penalty": 1.1}])
def test_advice_on_sampling_has_the_names_of_transformers(
    params: dict[str, Any] | None, tmp_path: Path
) -> None:
    stored = {
        "general__sampling__temp": 0.7,
        "general__sampling__top_k": 20,
        "general__sampling__min_p": 0.05,
        "general__sampling__xtc_probability": 0.5,
        "general__sampling__xtc_threshold": 0.2,
        "general__sampling__mirostat": 2,
    }
    result = generation(tmp_path, params=params, **stored)
    assert result["do_sample"] is True
    assert result["temperature"] == (0.5 if params else 0.7)
    assert (result["top_k"], result["min_p"]) == (20, 0.05)
    assert result.get("repetition_penalty") == (1.1 if params else None)
    assert (result["xtc_probability"], result["xtc_threshold"]) == (0.5, 0.2)
    assert "mirostat" not in result


def test_a_temperature_of_zero_is_no_sampling(tmp_path: Path) -> None:
    result = generation(tmp_path, params={"temperature": 0, "top_p": "much", "top_k": -1})
    assert result["do_sample"] is False
    assert not {"temperature", "top_p", "top_k"} & set(result)
