"""Arguments of vLLM, SGLang, TensorRT-LLM and transformers, as they are given to our classes.

One table per class. An argument that means what one of our fields means is taken under that name;
one whose value changes nothing here is dropped; every other one is refused by name, with what does
the same here. ``StrictModel`` and ``RequestParams`` read the table of their class before they
refuse unknown names.

Dropped are values that choose among kernels, processes or statistics which this engine does not
have, and values that say what it does anyway. No dropped value would change a token, a limit or
what is returned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from forethought.errors import ParameterError

_Table = Mapping[str, "ForeignArgument"]


@dataclass(frozen=True, slots=True)
class ForeignArgument:
    """What becomes of one argument of another engine."""

    name: str = ""
    """Our field of the same meaning; ``kv_cache_config.max_tokens`` is one of a nested one."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Their value -> ours, where the two differ."""
    dropped: Collection[Any] | None = ()
    """Values that change nothing here; None: all of them."""
    entries: _Table | None = None
    """Of a mapping: its entries, of which each is dropped or refused."""
    fix: str = ""
    """What does the same here."""

    def put(self, owner: str, name: str, value: Any, result: dict[str, Any]) -> None:
        """Add what ``value`` means to the fields in ``result``.

        Raises ParameterError if it cannot be honoured, or the field is given under its own name
        too.
        """
        if self.entries is not None and isinstance(value, Mapping):
            rest = translate(f"{name} of {owner}", value, (), self.entries)
            if rest:
                raise ParameterError.unknown(f"{name} of {owner}", rest, self.entries)
        elif self.name:
            _put(owner, name, self.name, _of(self.values, value), result)
        elif self.dropped is not None and not _is_among(value, self.dropped):
            raise self._refusal(owner, name, value)

    def _refusal(self, owner: str, name: str, value: Any) -> ParameterError:
        why = "it is an argument of another engine"
        if self.dropped:
            allowed = " or ".join(map(repr, self.dropped))
            why = f"it is an argument of another engine, and only {allowed} is taken, not {value!r}"
        what = f"{owner} has no parameter {name!r}"
        return ParameterError(what, why, self.fix or "Leave it out", param=name)


def translate(
    owner: str, values: Mapping[str, Any], fields: Collection[str], table: _Table
) -> dict[str, Any]:
    """Values by our own names; names that are neither fields nor in the table stay as they are.

    Args:
        owner: name of the class, for messages.
        values: by name; foreign ones that are None are not given.
        fields: names of the fields of the class, and their aliases.

    Raises:
        ParameterError: an argument of another engine that cannot be honoured.
    """
    foreign = [name for name in values if name not in fields and name in table]
    result = {name: value for name, value in values.items() if name not in foreign}
    for name in foreign:
        if values[name] is not None:
            table[name].put(owner, name, values[name], result)
    return result


def _put(owner: str, foreign: str, path: str, value: Any, result: dict[str, Any]) -> None:
    """Set the field at ``path``, which ``foreign`` is another name of."""
    outer, _, inner = path.rpartition(".")
    fields = result
    if outer:
        fields = result[outer] = _as_dict(result.get(outer))
    if fields.get(inner) not in (None, value):
        raise ParameterError(
            f"{owner} got two values for {path}",
            f"{fields[inner]!r}, and {value!r} as {foreign}",
            f"Give {path} alone",
            param=foreign,
        )
    fields[inner] = value


def _as_dict(config: Any) -> dict[str, Any]:
    """The fields that a nested configuration was given, whatever form it has."""
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    return {name: getattr(config, name) for name in config.model_fields_set}


def _of(values: Mapping[Any, Any], value: Any) -> Any:
    return values[value] if isinstance(value, bool | str) and value in values else value


def _is_among(value: Any, allowed: Collection[Any]) -> bool:
    return any(type(value) is type(one) and value == one for one in allowed)


# ---- what the tables are written with ------------------------------------------------------------


def _same(name: str, values: Mapping[Any, Any] | None = None) -> ForeignArgument:
    return ForeignArgument(name, values or {})


def _only(*values: Any, fix: str = "") -> ForeignArgument:
    return ForeignArgument(dropped=values, fix=fix)


def _refused(fix: str) -> ForeignArgument:
    return ForeignArgument(fix=fix)


_ANY = ForeignArgument(dropped=None)
_NO = _only(False)
_ONE = _only(1, fix="Only tensor_parallel_size spreads a model over processes")
_NO_ENGINE = _refused("Leave it out: no engine is built ahead, the checkpoint is run as it is")
_INVERTED = {True: False, False: True}
_NO_GRAPHS = {True: False, False: "auto"}

# ---- LLM, AsyncLLM -------------------------------------------------------------------------------

_GRAPHS = "Leave it out: cuda_graphs says whether there are graphs, their sizes are chosen here"
_CUDA_GRAPH_CONFIG: _Table = {
    "batch_sizes": _ANY,
    "max_batch_size": _ANY,
    "enable_padding": _ANY,
    "mode": _only("decode", fix=_GRAPHS),
}
_MOE_CONFIG: _Table = {
    "backend": _ANY,
    "max_num_tokens": _ANY,
    "disable_finalize_fusion": _ANY,
    "use_low_precision_moe_combine": _NO,
    "load_balancer": _refused("Leave it out: experts are not spread over processes"),
}
_SCHEDULER_CONFIG: _Table = {
    "capacity_scheduler_policy": _only(
        "MAX_UTILIZATION", fix="Leave it out: sequences are preempted where pages run out"
    ),
    "context_chunking_policy": _only("FIRST_COME_FIRST_SERVED"),
    "waiting_queue_policy": _only("fcfs", fix="Leave it out: priority of SamplingParams orders"),
}

_QUANTISATION = "Leave it out: a checkpoint says itself how it is quantised; quantization rounds"
_MEMORY = (
    "Use kv_cache_config with free_gpu_memory_fraction, the share of the memory that is free once "
    "the model is loaded; max_tokens for a number of tokens; on a CPU host_cache_size in bytes"
)
_LORA = "Give adapters={name: directory}; requests choose one by SamplingParams(adapter=name)"
_MULTI_NODE = "Leave it out: an engine runs on one machine"
_GUIDED = "Leave it out: llguidance compiles all grammars; guided_decoding_config bounds them"
_LOG = "Leave it out: counts are in llm.stats and, of a server, in /metrics"

_TENSORRT_LLM: _Table = {
    "backend": _only("pytorch", fix="Leave it out: there is one backend"),
    "cuda_graph_config": ForeignArgument(entries=_CUDA_GRAPH_CONFIG, fix=_GRAPHS),
    "moe_config": ForeignArgument(entries=_MOE_CONFIG),
    "scheduler_config": ForeignArgument(entries=_SCHEDULER_CONFIG),
    "disable_overlap_scheduler": _only(True, False),
    "kv_cache_free_gpu_memory_fraction": _same("kv_cache_config.free_gpu_memory_fraction"),
    "print_iter_log": _only(False, fix=_LOG),
    "enable_iter_perf_stats": _ANY,
    "enable_iter_req_stats": _ANY,
    "iter_stats_max_iterations": _ANY,
    "request_stats_max_iterations": _ANY,
    "max_stats_len": _ANY,
    "perf_metrics_max_requests": _ANY,
    "return_perf_metrics": _only(False, fix=_LOG),
    "enable_energy_metrics": _NO,
    "enable_autotuner": _ANY,
    "autotuner_enabled": _ANY,
    "allreduce_strategy": _ANY,
    "num_postprocess_workers": _ANY,
    "garbage_collection_gen0_threshold": _ANY,
    "sampler_type": _only("auto", "TorchSampler"),
    "use_torch_sampler": _ANY,
    "mixed_sampler": _ANY,
    "enable_trtllm_sampler": _NO,
    "attn_backend": _only("TRTLLM", "FLASHINFER", "VANILLA", fix="Use attention"),
    "moe_backend": _ANY,
    "moe_max_num_tokens": _ANY,
    "cuda_graph_batch_sizes": _ANY,
    "cuda_graph_max_batch_size": _ANY,
    "cuda_graph_padding_enabled": _ANY,
    "use_cuda_graph": _same("cuda_graphs", {True: "auto", False: False}),
    "checkpoint_format": _only("HF"),
    "checkpoint_io_policy": _ANY,
    "context_parallel_size": _ONE,
    "gpus_per_node": _ANY,
    "moe_tensor_parallel_size": _only(1, -1, fix=_ONE.fix),
    "moe_expert_parallel_size": _only(1, -1, fix=_ONE.fix),
    "moe_cluster_parallel_size": _only(1, -1, fix=_ONE.fix),
    "enable_attention_dp": _NO,
    "enable_lm_head_tp_in_adp": _NO,
    "attention_dp_config": _refused(_ONE.fix),
    "pp_partition": _refused(_ONE.fix),
    "cp_config": _refused(_ONE.fix),
    "max_beam_width": _only(1, fix="Use n, or the method beam_search"),
    "max_input_len": _refused("Use max_seq_len, which bounds prompt and output together"),
    "gather_generation_logits": _only(False, fix="Use logprobs of SamplingParams"),
    "stream_interval": _only(1, fix="Leave it out: forethought serve has --stream-interval"),
    "batch_wait_timeout_ms": _only(0, 0.0),
    "batch_wait_timeout_iters": _only(0),
    "batch_wait_max_tokens_ratio": _only(0, 0.0),
    "torch_compile_config": _refused("Leave it out: torch.compile is not used"),
    "torch_compile_enabled": _NO,
    "prefill_cuda_graph_backend": _only("disabled", fix=_GRAPHS),
    "enable_layerwise_nvtx_marker": _NO,
    "enable_min_latency": _NO,
    "force_dynamic_quantization": _NO,
    "quant_config": _refused(_QUANTISATION),
    "peft_cache_config": _refused(_LORA),
    "cache_transceiver_config": _refused(_MULTI_NODE),
    "sparse_attention_config": _refused("Leave it out: attention is over all tokens"),
    "kv_connector_config": _refused("Use snapshot_dir and the named snapshots of sessions"),
    "orchestrator_type": _refused(_MULTI_NODE),
    "env_overrides": _refused("Set environment variables before Python starts"),
    "model_kwargs": _refused("Change config.json in a copy of the model's directory"),
    "custom_tokenizer": _refused("Use tokenizer, a directory or Hub id"),
    "postprocess_tokenizer_dir": _refused("Use tokenizer"),
    "batched_logits_processor": _refused("Use logit_bias or guided_decoding of SamplingParams"),
    "mm_encoder_only": _NO,
    "disable_mm_encoder": _NO,
    "encode_only": _NO,
    "build_config": _NO_ENGINE,
    "fast_build": _NO_ENGINE,
    "enable_build_cache": _NO_ENGINE,
    "workspace": _NO_ENGINE,
    "calib_config": _refused(_QUANTISATION),
    "decoding_config": _refused("Use speculative_config"),
    "sleep_config": _refused("Leave it out: shutdown frees the memory"),
}

_VLLM: _Table = {
    "max_num_seqs": _same("max_batch_size"),
    "max_num_batched_tokens": _same("max_num_tokens"),
    "max_model_len": _same("max_seq_len"),
    "enable_prefix_caching": _same("kv_cache_config.enable_block_reuse"),
    "block_size": _same("kv_cache_config.tokens_per_block"),
    "enforce_eager": _same("cuda_graphs", _NO_GRAPHS),
    "gpu_memory_utilization": _refused(_MEMORY),
    "kv_cache_memory_bytes": _refused(_MEMORY),
    "num_gpu_blocks_override": _refused(_MEMORY),
    "kv_cache_dtype": _same("kv_cache_config.dtype"),
    "calculate_kv_scales": _NO,
    "swap_space": _only(0, 0.0, fix="Leave it out: paused sequences keep or recompute their pages"),
    "cpu_offload_gb": _only(0, 0.0, fix="Use quantization for a model that is too large"),
    "preemption_mode": _refused("Leave it out: paused sequences keep or recompute their pages"),
    "pipeline_parallel_size": _ONE,
    "data_parallel_size": _only(
        1, fix="Start several servers, and one with --upstream before them"
    ),
    "enable_expert_parallel": _only(False, fix=_ONE.fix),
    "distributed_executor_backend": _only("mp", "uni", fix=_MULTI_NODE),
    "disable_custom_all_reduce": _ANY,
    "tokenizer_mode": _only("auto", fix="Leave it out: tokenizers are those of transformers"),
    "tokenizer_revision": _refused("Give tokenizer as a directory with the revision that you mean"),
    "code_revision": _refused("Use revision"),
    "hf_token": _refused("Set HF_TOKEN"),
    "hf_overrides": _refused("Change config.json in a copy of the model's directory"),
    "hf_config_path": _refused("Change config.json in a copy of the model's directory"),
    "download_dir": _refused("Set HF_HOME"),
    "load_format": _only("auto", "AUTO", "safetensors", fix="Give a directory with safetensors"),
    "config_format": _only("auto", "hf"),
    "model_impl": _only("auto", fix="Use fuse and forward"),
    "attention_backend": _refused("Use attention"),
    "rope_scaling": _refused("Change config.json in a copy of the model's directory"),
    "rope_theta": _refused("Change config.json in a copy of the model's directory"),
    "skip_tokenizer_init": _only(False, fix="Leave it out: prompts may be token ids in any case"),
    "max_logprobs": _refused("Leave it out: logprobs of SamplingParams takes up to 64"),
    "disable_log_stats": _ANY,
    "disable_log_requests": _ANY,
    "enable_lora": _ANY,
    "lora_config": _refused(_LORA),
    "lora_modules": _refused(_LORA),
    "max_loras": _refused(_LORA),
    "max_lora_rank": _refused(_LORA),
    "guided_decoding_backend": _only("llguidance", "guidance", "auto", fix=_GUIDED),
    "structured_outputs_config": _refused(_GUIDED),
    "tool_call_parser": _refused("Leave it out: the chat template tells; or use tool_format"),
    "enable_auto_tool_choice": _ANY,
    "reasoning_parser": _refused("Leave it out: thoughts are found by the model's template"),
    "generation_config": _only(
        "vllm",
        "trtllm",
        fix="Leave it out: sampling is what SamplingParams says; chat and serve have the option",
    ),
    "override_generation_config": _refused("Leave it out: sampling is what SamplingParams says"),
    "served_model_name": _refused("Use --served-model-name of forethought serve"),
    "otlp_traces_endpoint": _refused("Use the environment variables of OpenTelemetry"),
    "compilation_config": _refused("Use cuda_graphs, or forward on a CPU"),
    "cudagraph_capture_sizes": _ANY,
    "max_seq_len_to_capture": _ANY,
    "limit_mm_per_prompt": _refused("Leave it out: models read text alone"),
    "scheduling_policy": _only("priority", fix="Leave it out: equal priorities go by arrival"),
    "async_scheduling": _ANY,
    "disable_async_output_proc": _ANY,
    "num_scheduler_steps": _same("num_continuous_decode_steps"),
    "num_lookahead_slots": _only(0),
    "use_v2_block_manager": _ANY,
    "prefix_caching_hash_algo": _ANY,
    "disable_cascade_attn": _ANY,
    "disable_sliding_window": _only(False, fix="Leave it out: windows are the model's own"),
    "use_tqdm_on_load": _ANY,
    "enable_sleep_mode": _only(False, fix="Leave it out: shutdown frees the memory"),
    "logits_processors": _refused("Use logit_bias or guided_decoding of SamplingParams"),
    "worker_use_ray": _only(False, fix=_MULTI_NODE),
    "kv_transfer_config": _refused(_MULTI_NODE),
    "runner": _only("auto", "generate"),
    "task": _only("auto", "generate"),
    "num_speculative_tokens": _refused("Use speculative_config with max_draft_len"),
}

_SGLANG: _Table = {
    "model_path": _refused("Use model"),
    "tokenizer_path": _same("tokenizer"),
    "tp_size": _same("tensor_parallel_size"),
    "context_length": _same("max_seq_len"),
    "max_running_requests": _same("max_batch_size"),
    "max_total_tokens": _same("kv_cache_config.max_tokens"),
    "page_size": _same("kv_cache_config.tokens_per_block"),
    "random_seed": _same("seed"),
    "disable_radix_cache": _same("kv_cache_config.enable_block_reuse", _INVERTED),
    "disable_cuda_graph": _same("cuda_graphs", _NO_GRAPHS),
    "mem_fraction_static": _refused(_MEMORY),
    "chunked_prefill_size": _refused("Use max_num_tokens, which bounds a step"),
    "max_prefill_tokens": _refused("Use max_num_tokens, which bounds a step"),
    "dp_size": _only(1, fix="Start several servers, and one with --upstream"),
    "pp_size": _ONE,
    "ep_size": _ONE,
    "log_level": _refused("Set the level of logging's logger forethought"),
    "grammar_backend": _only("llguidance", fix=_GUIDED),
    "speculative_algorithm": _refused("Use speculative_config with decoding_type"),
    "speculative_draft_model_path": _refused("Use speculative_config with speculative_model"),
    "speculative_num_steps": _refused("Use speculative_config with max_draft_len"),
    "speculative_num_draft_tokens": _refused("Use speculative_config with max_total_draft_tokens"),
    "speculative_eagle_topk": _refused("Use speculative_config with dynamic_tree_max_topK"),
}

_TRANSFORMERS: _Table = {
    "torch_dtype": _same("dtype"),
    "pretrained_model_name_or_path": _refused("Use model"),
    "device_map": _only("auto", fix="Use device"),
    "quantization_config": _refused(_QUANTISATION),
    "load_in_8bit": _same("quantization", {True: "int8", False: None}),
    "load_in_4bit": _same("quantization", {True: "int4", False: None}),
    "attn_implementation": _refused("Use attention"),
    "cache_dir": _refused("Set HF_HOME"),
    "token": _refused("Set HF_TOKEN"),
}

LLM_ARGUMENTS: _Table = {**_TRANSFORMERS, **_SGLANG, **_VLLM, **_TENSORRT_LLM}

_MAMBA = ("ssm_cache_dtype", "ssm_stochastic_rounding", "ssm_philox_rounds", "state_config")
_REBALANCE = (
    *("min_sampled_kv_caches", "cooldown_secs", "target_ratio_update_interval"),
    *("ratio_threshold", "moving_average_decay", "check_interval"),
)
KV_CACHE_ARGUMENTS: _Table = {
    "enable_partial_reuse": _ANY,
    "copy_on_partial_reuse": _ANY,
    "max_attention_window": _refused("Leave it out: windows are the model's own"),
    "sink_token_length": _refused("Leave it out: attention sinks are the model's own"),
    "max_gpu_total_bytes": _only(0, fix="Use max_tokens, or free_gpu_memory_fraction"),
    "secondary_offload_min_priority": _refused("Leave it out: pages are not moved to the host"),
    "disk_cache_size": _only(0, fix="Use snapshot_dir and the named snapshots of sessions"),
    "cross_kv_cache_fraction": _refused("Leave it out: there is no cross attention"),
    "event_buffer_max_size": _only(0, fix="Use kv_events_config, which publishes them"),
    "kv_events_config": _refused("Give it beside kv_cache_config"),
    "attention_dp_events_gather_period_ms": _ANY,
    "iteration_stats_interval": _ANY,
    "use_uvm": _NO,
    "use_kv_cache_manager_v2": _ANY,
    "enable_swa_scratch_reuse": _ANY,
    "max_util_for_resume": _ANY,
    "enable_kv_pool_rebalance": _NO,
    "kv_cache_event_hash_algo": _ANY,
    "disk_prefetch_num_reqs": _only(0),
    **{f"mamba_{name}": _ANY for name in _MAMBA},  # no model here has such a state
    **{f"kv_pool_rebalance_{name}": _ANY for name in _REBALANCE},
}

# ---- SamplingParams ------------------------------------------------------------------------------

_BEAMS = "Use n, or the method beam_search with a reward model"
_SHAPE = "Use guided_decoding=GuidedDecodingParams(json=..., regex=..., grammar=... or choice=...)"
_BAD = "Use logit_bias, {id: -100} for each token"
_LOGITS = "Use logprobs or prompt_logprobs"

SAMPLING_ARGUMENTS: _Table = {
    "max_new_tokens": _same("max_tokens"),
    "max_completion_tokens": _same("max_tokens"),
    "min_new_tokens": _same("min_tokens"),
    "num_return_sequences": _same("n"),
    "random_seed": _same("seed"),
    "sampling_seed": _same("seed"),
    "stop_strings": _same("stop"),
    "stop_words": _same("stop"),
    "eos_token_id": _refused("Use stop_token_ids, beside the model's own"),
    "end_id": _refused("Use stop_token_ids, beside the model's own"),
    "pad_id": _ANY,
    "pad_token_id": _ANY,
    "top_logprobs": _same("logprobs"),
    "num_logprobs": _same("logprobs"),
    "thinking_token_budget": _same("thinking_budget"),
    "do_sample": _only(True, fix="Use temperature=0, which is greedy"),
    "best_of": _only(1, fix="Use n, or the method best_of_n with a reward model"),
    "use_beam_search": _only(False, fix=_BEAMS),
    "num_beams": _only(1, fix=_BEAMS),
    "beam_width_array": _refused(_BEAMS),
    "beam_search_diversity_rate": _refused(_BEAMS),
    "length_penalty": _refused(_BEAMS),
    "early_stopping": _refused(_BEAMS),
    "no_repeat_ngram_size": _only(0, fix="Use repetition_penalty or frequency_penalty"),
    "top_p_min": _refused("Use top_p or min_p"),
    "top_p_decay": _refused("Use top_p or min_p"),
    "top_p_reset_ids": _refused("Use top_p or min_p"),
    "bad": _refused(_BAD),
    "bad_words": _refused(_BAD),
    "bad_token_ids": _refused(_BAD),
    "allowed_token_ids": _refused(_SHAPE),
    "embedding_bias": _refused("Use logit_bias"),
    "logits_processor": _refused(f"Use logit_bias. {_SHAPE}"),
    "logits_processors": _refused(f"Use logit_bias. {_SHAPE}"),
    "apply_batched_logits_processor": _NO,
    "structured_outputs": _refused(_SHAPE),
    "response_format": _refused(_SHAPE),
    "guided_json": _refused(_SHAPE),
    "guided_regex": _refused(_SHAPE),
    "guided_choice": _refused(_SHAPE),
    "guided_grammar": _refused(_SHAPE),
    "json_schema": _refused(_SHAPE),
    "json": _refused(_SHAPE),
    "regex": _refused(_SHAPE),
    "ebnf": _refused(_SHAPE),
    "detokenize": _only(True, fix="Leave it out: outputs have text and token_ids"),
    "spaces_between_special_tokens": _only(True),
    "add_special_tokens": _only(True, fix="Give the prompt as token ids"),
    "truncate_prompt_tokens": _refused("Cut the prompt's token ids"),
    "exclude_input_from_output": _only(True, fix="Leave it out: join prompt and text"),
    "return_full_text": _only(False, fix="Leave it out: join prompt and text"),
    "return_context_logits": _only(False, fix=_LOGITS),
    "return_generation_logits": _only(False, fix=_LOGITS),
    "return_encoder_output": _NO,
    "return_perf_metrics": _only(False, fix=_LOG),
    "additional_model_outputs": _refused("Leave it out: outputs are text, tokens and logprobs"),
    "flat_logprobs": _NO,
    "logprob_token_ids": _refused(_LOGITS),
    "output_kind": _refused("Use generate for the whole output, stream for what there is so far"),
    "stream_interval": _refused("Use stream, and skip items"),
    "skip_reading_prefix_cache": _only(False, fix="Use a cache_salt of its own"),
    "lookahead_config": _refused("Use speculative_config of the LLM"),
    "skip_clone": _ANY,
    "max_length": _refused("Use max_tokens, which counts new tokens alone"),
    "nsigma": _same("top_n_sigma"),
    "top_nsigma": _same("top_n_sigma"),
    "dry_range": _refused("Use dry_penalty_last_n, of which -1 is all tokens"),
    "typical_p": _only(1.0, fix="Use top_p or min_p"),
    "stream": _refused("Call stream instead of generate"),
    "lora_request": _refused(_LORA),
}

# ---- speculative_config --------------------------------------------------------------------------

_GATE = "Use acceptance_rate_window_size and acceptance_rate_threshold"
_ON_TARGET = "Leave it out: it drafts on the target's device; PearlDecodingConfig has draft_device"

DRAFTING_ARGUMENTS: _Table = {
    "num_speculative_tokens": _same("max_draft_len"),
    "model": _same("speculative_model"),
    "draft_tensor_parallel_size": _only(1),
    "disable_by_batch_size": _refused("Use max_concurrency"),
    "prompt_lookup_max": _same("max_matching_ngram_size"),
    "prompt_lookup_min": _only(1, fix="Leave it out: the longest n-gram that matches is used"),
    "speculative_token_tree": _refused("Use eagle_choices, draft_choices or medusa_choices"),
    "load_format": _only("auto"),
    "use_rejection_sampling": _ANY,  # acceptance is exact, greedy and sampled
    "allow_advanced_sampling": _ANY,
    "advanced_sampling_mode": _ANY,
    "enable_penalty": _only(True, fix="Leave it out: penalties hold with drafts too"),
    "acceptance_window": _only(0, fix=_GATE),
    "acceptance_length_threshold": _refused(_GATE),
    "is_auto_heuristic": _only(False, fix="Use decoding_type AUTO"),
    "mtp_eagle_one_model": _ANY,
    "num_nextn_predict_layers_from_model_config": _ANY,
    "max_non_leaves_per_layer": _refused("Use max_total_draft_tokens"),
    "sa_config": _refused("Give a list: this drafter, and SuffixDecodingConfig after it"),
    "draft_device": _refused(_ON_TARGET),
    "quantization": _refused(
        "Leave it out: heads are stored as their checkpoint has them; the models of "
        "DraftTargetDecodingConfig and PearlDecodingConfig can be quantised"
    ),
}
