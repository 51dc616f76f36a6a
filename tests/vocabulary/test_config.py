"""Engine arguments: aliases work; the unknown and the impossible are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forethought.config import KvCacheConfig, LlmArgs
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
    with pytest.raises(ParameterError, match="no parameter 'cuda_graph_config'"):
        LlmArgs(cuda_graph_config={})  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": "x"}, r"no parameter 'modle': did you mean 'model'\?"),
        ({"dtype": "int9"}, "invalid dtype in LlmArgs"),
        ({"max_batch_size": 0}, "invalid max_batch_size in LlmArgs: got 0"),
        ({"kv_cache_config": {"pagesize": 1}}, "KvCacheConfig has no parameter 'pagesize'"),
        ({"kv_cache_config": {"page_size": 0}}, "invalid page_size in KvCacheConfig"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        LlmArgs.from_dict(values)
