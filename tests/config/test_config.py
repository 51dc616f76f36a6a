"""Engine arguments: aliases work; the unknown and the impossible are refused by name."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from forethought.config import engine
from forethought.config.drafters import NGramDecodingConfig
from forethought.config.engine import KvCacheConfig, LlmArgs, LlmOptions
from forethought.errors import ParameterError


def test_dtypes_may_be_names_short_names_or_torch_dtypes() -> None:
    import torch

    for value in ("bfloat16", "bf16", torch.bfloat16):
        assert LlmArgs.from_dict({"dtype": value}).dtype == "bfloat16"


def test_the_page_size_has_two_names() -> None:
    for name in ("tokens_per_block", "page_size"):
        args = LlmArgs.from_dict({"model": "somewhere", "kv_cache_config": {name: 3}})
        assert args.kv_cache_config == KvCacheConfig(tokens_per_block=3)
        assert args.model == Path("somewhere")


def test_null_in_a_file_is_not_given() -> None:
    file = {
        "cuda_graph_config": None,
        "dtype": None,
        "max_batch_size": None,
        "kv_cache_config": {"page_size": None, "max_attention_window": None, "max_tokens": 64},
        "speculative_config": None,
        "disable_overlap_scheduler": None,
    }
    expected = LlmArgs(kv_cache_config=KvCacheConfig(max_tokens=64))
    assert LlmArgs.from_dict(file) == LlmArgs(**file) == expected
    assert LlmArgs.from_dict({"kv_cache_config": None}) == LlmArgs()
    with pytest.raises(ParameterError, match="no parameter 'swap_space'"):
        LlmArgs(swap_space=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": "x"}, r"no parameter 'modle': did you mean 'model'\?"),
        ({"dtype": "int9"}, "invalid dtype in LlmArgs"),
        ({"model": 3}, "invalid model in LlmArgs: got 3, but it must be a path"),
        ({"max_batch_size": 0}, "invalid max_batch_size in LlmArgs: got 0"),
        ({"kv_cache_config": {"pagesize": 1}}, "KvCacheConfig has no parameter 'pagesize'"),
        ({"kv_cache_config": {"page_size": 0}}, "invalid page_size in KvCacheConfig"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        LlmArgs.from_dict(values)


def members(annotation: Any) -> set[Any]:
    """The types of a union, and the values of a literal; what is neither, alone."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*map(members, get_args(annotation)))
    return {annotation}


def test_the_keyword_arguments_of_an_llm_are_the_fields_of_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(engine, "torch", torch, raising=False)  # imported for type checkers only
    options = get_type_hints(LlmOptions)
    fields = LlmArgs.model_fields
    assert set(options) == set(fields) - {"model"}
    for name in set(options) - {"speculative_config"}:  # which is read from many forms into one
        assert members(fields[name].annotation) <= members(options[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer": "somewhere"},
        {"kv_cache_config": {"page_size": 4}},
        {"speculative_config": NGramDecodingConfig(max_draft_len=2)},
        {"speculative_config": [{"decoding_type": "ngram", "max_draft_len": 2}]},
        *[{"dtype": name} for name in sorted(members(get_type_hints(LlmArgs)["dtype"]))],
        *[{"dtype": name} for name in ("fp32", "bf16", "fp16", "half", "float")],
    ],
)
def test_what_the_types_of_the_keyword_arguments_allow_is_accepted(options: Any) -> None:
    assert LlmArgs(**options).model_fields_set == set(options)


@pytest.mark.slow  # mypy without its cache
def test_a_type_checker_knows_the_keyword_arguments_of_an_llm(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        "from forethought import AsyncLLM, LLM, NGramDecodingConfig\n"
        'LLM("model", dtype="bf16", kv_cache_config={"page_size": 4}, max_seq_len=None)\n'
        "LLM(speculative_config=NGramDecodingConfig(max_draft_len=2))\n"
        "LLM(swap_space=2)\n"
        "AsyncLLM(max_pending=3, swap_space=2)\n"
        'LLM(max_batch_size="many")\n'
        'LLM("model", "tokenizer")\n'
        'AsyncLLM("model", "tokenizer")\n'
    )
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\nfollow_imports = silent\n[mypy-torch.*,transformers.*]\n"
        "follow_imports = skip\nignore_missing_imports = True\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(settings), str(snippet)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    lines = [line.split(":")[1] for line in errors]
    assert list(dict.fromkeys(lines)) == ["4", "5", "6", "7", "8"], done.stdout + done.stderr
    assert all('"swap_space"' in line for line in errors[:2])
    assert '"max_batch_size"' in errors[2]
