"""Arguments of other engines are taken, or refused by name with what does the same here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from pydantic import AliasChoices

from forethought.config import drafters, foreign_arguments
from forethought.config.base import RequestParams, StrictModel
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    NGramDecodingConfig,
)
from forethought.config.engine import KvCacheConfig, LlmArgs
from forethought.config.foreign_arguments import ForeignArgument
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.errors import ParameterError

TABLES: dict[type[Any], Mapping[str, ForeignArgument]] = {
    LlmArgs: foreign_arguments.LLM_ARGUMENTS,
    KvCacheConfig: foreign_arguments.KV_CACHE_ARGUMENTS,
    SamplingParams: foreign_arguments.SAMPLING_ARGUMENTS,
}
DRAFTERS = [one for one in vars(drafters).values() if isinstance(one, type)]
DRAFTERS = [one for one in DRAFTERS if issubclass(one, DecodingBaseConfig)]

TENSORRT_LLM = """
backend: pytorch
tensor_parallel_size: 1
pipeline_parallel_size: 1
moe_expert_parallel_size: 1
max_batch_size: 16
max_num_tokens: 4096
max_seq_len: 512
enable_chunked_prefill: true
enable_attention_dp: false
disable_overlap_scheduler: false
print_iter_log: false
enable_iter_perf_stats: true
num_postprocess_workers: 4
stream_interval: 1
sampler_type: auto
trust_remote_code: false
cuda_graph_config:
  enable_padding: true
  batch_sizes: [1, 2, 4, 8, 16]
moe_config:
  backend: TRTLLM
scheduler_config:
  capacity_scheduler_policy: MAX_UTILIZATION
  context_chunking_policy: FIRST_COME_FIRST_SERVED
torch_compile_config: null
cache_transceiver_config: null
kv_cache_config:
  dtype: auto
  enable_block_reuse: false
  free_gpu_memory_fraction: 0.8
  tokens_per_block: 32
  event_buffer_max_size: 0
  enable_partial_reuse: true
speculative_config:
  decoding_type: NGram
  max_draft_len: 4
  max_matching_ngram_size: 3
  is_auto_heuristic: false
  use_rejection_sampling: true
"""


def test_a_whole_configuration_of_tensorrt_llm_is_taken() -> None:
    assert LlmArgs.from_dict(yaml.safe_load(TENSORRT_LLM)) == LlmArgs(
        max_batch_size=16,
        max_num_tokens=4096,
        max_seq_len=512,
        kv_cache_config=KvCacheConfig(
            enable_block_reuse=False, free_gpu_memory_fraction=0.8, tokens_per_block=32
        ),
        speculative_config=NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=3),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"backend": "tensorrt"}, "'backend'"),
        ({"pipeline_parallel_size": 2}, "'pipeline_parallel_size'.*tensor_parallel_size"),
        ({"enable_attention_dp": True}, "'enable_attention_dp'"),
        ({"print_iter_log": True}, "'print_iter_log'.*/metrics"),
        ({"cuda_graph_config": {"mode": "encode"}}, "cuda_graph_config of LlmArgs.*'mode'"),
        ({"cuda_graph_config": {"sizes": []}}, "cuda_graph_config of LlmArgs.*'sizes'"),
        ({"cuda_graph_config": 3}, "'cuda_graph_config'"),
        ({"moe_config": {"load_balancer": {}}}, "moe_config of LlmArgs.*'load_balancer'"),
        ({"torch_compile_config": {}}, "'torch_compile_config'"),
        ({"kv_cache_config": {"dtype": "fp8"}}, "invalid dtype in KvCacheConfig"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "invalid dtype in KvCacheConfig"),
        ({"kv_cache_config": {"use_uvm": True}}, "KvCacheConfig.*'use_uvm'"),
        ({"max_beam_width": 4}, "'max_beam_width'.*beam_search"),
        ({"gpu_memory_utilization": 0.5}, "free_gpu_memory_fraction"),
        ({"swap_space": 4}, "'swap_space'"),
        ({"quantization": "awq"}, "got 'awq'.*Leave it out"),
        ({"num_speculative_tokens": 4}, "speculative_config with max_draft_len"),
        ({"mem_fraction_static": 0.5}, "free_gpu_memory_fraction"),
        ({"max_num_seqs": 4, "max_batch_size": 5}, "two values for max_batch_size: 5, and 4"),
    ],
)
def test_what_would_change_something_is_refused_by_name(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(ParameterError, match=names):
        LlmArgs.from_dict(fields)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_num_seqs": 4}, {"max_batch_size": 4}),
        ({"max_num_batched_tokens": 64}, {"max_num_tokens": 64}),
        ({"max_model_len": 64}, {"max_seq_len": 64}),
        ({"enforce_eager": True}, {"cuda_graphs": False}),
        ({"enforce_eager": False}, {"cuda_graphs": "auto"}),
        ({"enable_prefix_caching": False}, {"kv_cache_config": {"enable_block_reuse": False}}),
        (
            {"block_size": 8, "kv_cache_config": {"max_tokens": 64}},
            {"kv_cache_config": {"tokens_per_block": 8, "max_tokens": 64}},
        ),
        (
            {"block_size": 8, "kv_cache_config": KvCacheConfig(max_tokens=64)},
            {"kv_cache_config": {"tokens_per_block": 8, "max_tokens": 64}},
        ),
        ({"disable_radix_cache": True}, {"kv_cache_config": {"enable_block_reuse": False}}),
        ({"tp_size": 2, "context_length": 9}, {"tensor_parallel_size": 2, "max_seq_len": 9}),
        ({"torch_dtype": "float"}, {"dtype": "float32"}),
        ({"max_num_seqs": 4, "max_batch_size": 4}, {"max_batch_size": 4}),
        ({"max_num_seqs": None, "gpu_memory_utilization": None}, {}),
    ],
)
def test_what_means_the_same_is_taken_under_our_name(
    theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    args = LlmArgs.from_dict(theirs)
    assert (args, args.model_fields_set) == (LlmArgs.from_dict(ours), set(ours))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_new_tokens": 5, "do_sample": True}, {"max_tokens": 5}),
        ({"top_logprobs": 2, "detokenize": True}, {"logprobs": 2}),
        ({"thinking_token_budget": 9}, {"thinking_budget": 9}),
        ({"best_of": 1, "use_beam_search": False, "pad_id": 0}, {}),
        ({"bad_words": None}, {}),
    ],
)
def test_sampling_params_take_what_means_the_same(
    theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    params = SamplingParams(**theirs)
    assert (params, params.given) == (SamplingParams(**ours), set(ours))


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"do_sample": False}, "temperature=0"),
        ({"best_of": 3}, "Use n"),
        ({"structured_outputs": {"json": {}}}, "guided_decoding"),
        ({"bad_words": ["no"]}, "logit_bias"),
        ({"max_tokens": 4, "max_new_tokens": 5}, "Give max_tokens alone"),
    ],
)
def test_sampling_params_refuse_the_rest_with_what_does_the_same(
    fields: dict[str, Any], fix: str
) -> None:
    with pytest.raises(ParameterError, match=fix):
        SamplingParams(**fields)


@pytest.mark.parametrize("config", [NGramDecodingConfig, EagleDecodingConfig])
def test_a_drafter_without_a_model_of_its_own_is_neither_placed_nor_quantised(
    config: type[DecodingBaseConfig],
) -> None:
    for name in ("draft_device", "quantization"):
        with pytest.raises(ParameterError, match=f"no parameter {name!r}.*Leave it out"):
            config(**{name: "cpu"})
    with pytest.raises(ParameterError, match=r"no parameter 'draft_device'.*PearlDecodingConfig"):
        DraftTargetDecodingConfig(speculative_model="d", draft_device="cpu")  # type: ignore[call-arg]


def rows(table: Mapping[str, ForeignArgument]) -> Iterator[tuple[str, ForeignArgument]]:
    for name, row in table.items():
        yield name, row
        if row.entries is not None:
            yield from rows(row.entries)


def field_names(owner: Any) -> set[str]:
    return owner.names() if issubclass(owner, RequestParams) else set(owner.model_fields)


@pytest.mark.parametrize("owner", TABLES, ids=lambda owner: owner.__name__)
def test_rows_lead_to_fields_and_no_field_is_in_the_table(owner: type[Any]) -> None:
    assert not TABLES[owner].keys() & field_names(owner)
    for name, row in rows(TABLES[owner]):
        fields, target = owner, row.name
        if target.startswith("kv_cache_config."):
            fields, target = KvCacheConfig, target.partition(".")[2]
        assert not target or target in field_names(fields), name


def test_rows_of_drafters_lead_to_fields_of_one_of_them() -> None:
    known = {name for config in DRAFTERS for name in field_names(config)}
    for name, row in rows(foreign_arguments.DRAFTING_ARGUMENTS):
        assert not row.name or row.name in known, name


def test_every_row_that_refuses_says_what_to_do() -> None:
    for table in [*TABLES.values(), foreign_arguments.DRAFTING_ARGUMENTS]:
        for name, row in rows(table):
            with_nothing = not row.name and row.dropped == () and row.entries is None
            assert not with_nothing or row.fix, name


def test_no_alias_of_a_field_is_in_its_table() -> None:
    for owner in (LlmArgs, KvCacheConfig, *DRAFTERS):
        assert issubclass(owner, StrictModel)
        for info in owner.model_fields.values():
            if isinstance(info.validation_alias, AliasChoices):
                assert not owner.foreign_arguments.keys() & set(info.validation_alias.choices)
