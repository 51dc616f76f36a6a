"""The engine's arguments as a caller writes them. ``"auto"`` is allowed here and nowhere below.

``engine.resolve`` turns these into numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

import pydantic
from pydantic import AliasChoices, Field, SerializeAsAny

from forethought import assets
from forethought.config.base import StrictModel
from forethought.config.foreign_arguments import (
    KV_CACHE_ARGUMENTS,
    LLM_ARGUMENTS,
    ForeignArgument,
)
from forethought.config.quantization import QUANTIZATIONS, Quantization
from forethought.config.speculation import DecodingBaseConfig, read_configs
from forethought.errors import ParameterError

if TYPE_CHECKING:
    import torch

_SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
    "float": "float32",
}
DtypeName = Literal[
    "auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16", "half", "float"
]
"""The names that ``dtype`` may have; ``torch.bfloat16`` and its like will do as well."""

KvDtypeName = Literal["auto", "float32", "bfloat16", "int8", "fp32", "bf16", "float"]
"""The names that ``KvCacheConfig.dtype`` may have, as those of ``dtype``."""

ToolFormatName = Literal[
    "hermes",
    "qwen3_coder",
    "llama3",
    "mistral",
    "mistral_args",
    "deepseek_v3",
    "deepseek_v3_1",
    "harmony",
]
"""How models write calls of tools; see ``llm.tool_format``."""


def _full_name(value: Any) -> Any:
    """The name of a dtype, of ``torch.bfloat16`` or a short name."""
    name = str(value).removeprefix("torch.")
    return _SHORT_NAMES.get(name, name)


class KvCacheConfig(StrictModel):
    """The KV cache: its page size, how large it is, whether prefixes are reused."""

    foreign_arguments: ClassVar[Mapping[str, ForeignArgument]] = KV_CACHE_ARGUMENTS

    tokens_per_block: int = Field(
        default=16, ge=1, le=4096, validation_alias=AliasChoices("tokens_per_block", "page_size")
    )
    """Tokens in one page."""
    dtype: KvDtypeName = "auto"
    """In which keys and values are held; "auto": the model's dtype. "int8" has a scale per token
    and KV head. Another one than the model's needs a CPU."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the cache holds; None: as the memory fractions below allow."""
    free_gpu_memory_fraction: float = Field(default=0.9, gt=0.0, le=1.0)
    """On CUDA: the share of the memory left after loading the model, less what CUDA graphs take and
    a tenth of it, at most 2 GiB, which steps need."""
    host_cache_size: int | None = Field(default=None, ge=1)
    """On CPU: bytes for the cache; None: a tenth of the free memory, at most 4 GiB."""
    enable_block_reuse: bool = True
    """Whether full pages are kept and found again by later prompts with the same prefix."""

    @pydantic.field_validator("dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: Any) -> Any:
        return _full_name(value)


class GuidedDecodingConfig(StrictModel):
    """What compiling the grammar of one request may cost; see docs/structured-output.md."""

    max_grammar_bytes: int = Field(default=2**20, ge=1, le=2**20)
    """Bytes of a schema, expression or grammar, or of all choices together. Beyond a megabyte the
    stack of llguidance's compiler would not be safe."""
    compile_timeout: float = Field(default=60.0, gt=0.0, le=3600.0)
    """Seconds until a request whose grammar is not compiled fails."""


class KvEventsConfig(StrictModel):
    """What the prefix cache gains and loses, published over ZMQ for routers such as llm-d's and
    Dynamo's: vLLM's fields of the same name, and its form.
    """

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    """"null": nothing is published."""
    endpoint: str = Field(min_length=1)
    """Where batches are published: bound with ``*`` or ``::`` in it (``tcp://*:5557``), or with
    ``ipc://`` or ``inproc://``; a subscriber's own address, to connect to, else."""
    replay_endpoint: str | None = Field(default=None, min_length=1)
    """Where subscribers ask for batches that they have missed; it is bound."""
    buffer_steps: int = Field(default=10_000, ge=1)
    """Batches that are kept for them."""
    hwm: int = Field(default=100_000, ge=1)
    """Batches that may wait for a slow subscriber; what comes then it misses."""
    max_queue_size: int = Field(default=100_000, ge=2)
    """Events that may wait to be published. With the next one all are dropped, and subscribers are
    told that all pages are cleared."""
    topic: str = ""

    @property
    def is_bound(self) -> bool:
        """Whether the endpoint is bound, as vLLM has it."""
        is_local = self.endpoint.startswith(("ipc://", "inproc://"))
        return is_local or "*" in self.endpoint or "::" in self.endpoint


class LlmArgs(StrictModel):
    """Everything that ``LLM`` and ``AsyncLLM`` accept, beside ``config.foreign_arguments``."""

    foreign_arguments: ClassVar[Mapping[str, ForeignArgument]] = LLM_ARGUMENTS

    model: Path | None = None
    """Local Hugging Face directory, Hub id such as ``Qwen/Qwen3-0.6B``, or a GGUF file, such as
    ``user/repository:Q4_K_M`` or ``ollama:smollm2``; None: the embedded reasoner."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a model of the Hub; None: its main branch."""
    tokenizer: Path | None = None
    """Directory or Hub id of the tokenizer, if it is not the model's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``auto``: the dtype in the model's config; float32 on a CPU that has no fast products in it,
    if the weights take at most half of the free memory then. Quantised weights run in bfloat16 on
    a CPU."""
    quantization: Quantization | None = None
    """Store the weights in 8 or 4 bits, rounded at load; None: as the checkpoint has them. ``w8a8``
    and ``w4a8``: round activations to 8 bits, too, and multiply integers, on a CPU alone: faster,
    at a little more error."""
    device: str = "auto"
    """``auto``: CUDA where torch has it, else CPU."""
    attention: str = "auto"
    """Attention backend by name."""
    num_threads: int | Literal["auto", "torch"] = "auto"
    """Threads of a step on a CPU. ``auto``: by the size of the weights, at most as many as torch
    has and as the process may use; ``torch``: as torch has them. A number holds for the whole
    process."""
    forward: Literal["auto", "native", "torch"] = "auto"
    """What computes the layers on a CPU: ``native`` is C++, compiled at the first start, for
    Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma3 and Phi3 in float32, bfloat16 and quantised;
    ``torch`` is everything else; ``auto``: native where the model, a C++ compiler and the
    processor allow it and torch has no faster products in the dtype."""
    expert_memory: float | None = Field(default=None, gt=0)
    """GiB of memory for the experts of a mixture that runs natively. The others are left in a
    temporary file, and read as tokens choose them. None: all are in memory."""
    layer_window: int | None = Field(default=None, ge=1)
    """Layers of a model that runs natively which are in memory at a time, fewer than it has. The
    others are left in a temporary file, and read in every step. None: all are in memory."""
    fuse: bool = True
    """Use the fused forward where the architecture allows it; the plain one otherwise."""
    cuda_graphs: Literal["auto"] | bool = "auto"
    """Whether steps that only decode are captured as CUDA graphs and replayed by one launch.
    ``auto``: on CUDA with attention ``triton``, for the fused forward; True: for any forward, and
    refused where it cannot be captured."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes that have a slice of every layer each, on a GPU each or on a CPU. Beyond 1 the
    model runs through the fused forward and without CUDA graphs. An exception in a forward, and the
    end of any of them, end the engine."""
    max_batch_size: int = Field(default=64, ge=1)
    """Sequences in one step."""
    max_num_tokens: int = Field(default=2048, ge=1)
    """Tokens in one step: decodes first, then chunks of prefills."""
    num_continuous_decode_steps: int | None = Field(default=None, ge=1)
    """Decode steps that are made in one call at most, where all running requests decode without a
    grammar or thinking budget, without drafts or with chains of one drafter, and no other one can
    begin. It saves most of what a step costs beside the forward. Where clients run beside the steps
    a call ends with the step in which one waits for something. None: 16, and 1 for streams of
    ``LLM``, and for clients of a model on a GPU."""
    max_seq_len: int | None = Field(default=None, ge=2)
    """Prompt and output of one sequence together; None: the model's context."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be prefilled over several steps."""
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    guided_decoding_config: GuidedDecodingConfig = Field(default_factory=GuidedDecodingConfig)
    kv_events_config: KvEventsConfig | None = None
    """Publish what the prefix cache gains and loses; None: nothing is. Its subscribers read the
    token ids of all prompts."""
    snapshot_dir: Path | None = None
    """Directory of the named KV snapshots of sessions; made when the first one is saved."""
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    """From which the seeds of unseeded requests are drawn; None: from the operating system."""
    trust_remote_code: bool = False
    adapters: Mapping[str, Path] = Field(default_factory=dict)
    """LoRA adapters of the model by the names that requests choose them by: directories as PEFT
    saves them, with ``adapter_config.json`` and ``adapter_model.safetensors``."""
    tool_format: ToolFormatName | None = None
    """How the model writes calls of tools; None: as its tokenizer's response template says, or else
    as its chat template writes them."""
    speculative_config: tuple[SerializeAsAny[DecodingBaseConfig], ...] = ()
    """The drafter, or several, each asked where those before it propose nothing. Dictionaries will
    do, with ``decoding_type`` as in YAML, and names alone: ``"draft_target"``, as for
    ``--speculative``. Left out: the MTP modules in the model's checkpoint, if it has some, under
    goodput control; None or empty: no drafts."""

    @pydantic.field_validator("model")
    @classmethod
    def _no_heads(cls, value: Path | None) -> Path | None:
        """Refuse embedded heads by what they are."""
        short = str(value).removeprefix(assets.PREFIX)
        if assets.is_embedded(value) and short in assets.HEADS:
            raise ParameterError(
                f"{value} is no model",
                f"it is a head that drafts for {assets.REASONER}",
                f"Give it as speculative_config={short!r}, or as a speculative_model",
            )
        return value

    @pydantic.field_validator("dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: Any) -> Any:
        """Accept ``torch.bfloat16`` and the short names as well, without importing torch."""
        return _full_name(value)

    @pydantic.field_validator("quantization", mode="before")
    @classmethod
    def _quantization_name(cls, value: Any) -> Any:
        """Explain the names of formats, which other engines take here."""
        if isinstance(value, str) and value not in QUANTIZATIONS:
            raise ParameterError(
                "invalid quantization in LlmArgs",
                f"got {value!r}, but it must be one of {', '.join(QUANTIZATIONS)}, in which "
                "weights are stored that the checkpoint has in full",
                "Leave it out for a checkpoint in AWQ, GPTQ, compressed-tensors or fp8, which says "
                "itself how it is quantised",
            )
        return value

    @pydantic.field_validator("num_threads")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("Input should be greater than or equal to 1")
        return value

    @pydantic.field_validator("kv_cache_config", mode="before")
    @classmethod
    def _kv_from_dict(cls, value: Any) -> Any:
        return KvCacheConfig.from_dict(value) if isinstance(value, dict) else value

    @pydantic.field_validator("kv_events_config", mode="before")
    @classmethod
    def _events_from_dict(cls, value: Any) -> Any:
        return KvEventsConfig.from_dict(value) if isinstance(value, dict) else value

    @property
    def published_kv_events(self) -> KvEventsConfig | None:
        """``kv_events_config``, unless that switches them off."""
        config = self.kv_events_config
        is_on = config is not None and config.enable_kv_cache_events and config.publisher == "zmq"
        return config if is_on else None

    @pydantic.field_validator("guided_decoding_config", mode="before")
    @classmethod
    def _guided_from_dict(cls, value: Any) -> Any:
        return GuidedDecodingConfig.from_dict(value) if isinstance(value, dict) else value

    @pydantic.field_validator("speculative_config", mode="before")
    @classmethod
    def _read_speculative(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        return read_configs(value, info.data.get("model"))


class LlmOptions(TypedDict, total=False):
    """The fields of ``LlmArgs`` beside ``model``, as keyword arguments of ``LLM`` and ``AsyncLLM``.

    For editors and type checkers only: what they mean and which values are allowed is in
    ``LlmArgs``, which checks them.
    """

    revision: str | None
    tokenizer: str | Path | None
    dtype: DtypeName | torch.dtype
    quantization: Quantization | None
    device: str
    attention: str
    num_threads: int | Literal["auto", "torch"] | None
    forward: Literal["auto", "native", "torch"]
    expert_memory: float | None
    layer_window: int | None
    fuse: bool
    cuda_graphs: Literal["auto"] | bool
    tensor_parallel_size: int
    max_batch_size: int
    max_num_tokens: int
    num_continuous_decode_steps: int | None
    max_seq_len: int | None
    enable_chunked_prefill: bool
    kv_cache_config: KvCacheConfig | Mapping[str, Any]
    kv_events_config: KvEventsConfig | Mapping[str, Any] | None
    snapshot_dir: str | Path | None
    seed: int | None
    trust_remote_code: bool
    adapters: Mapping[str, Path] | Mapping[str, str | Path]
    tool_format: ToolFormatName | None
    speculative_config: (
        DecodingBaseConfig
        | Mapping[str, Any]
        | str
        | Sequence[DecodingBaseConfig | Mapping[str, Any] | str]
        | None
    )
    guided_decoding_config: GuidedDecodingConfig | Mapping[str, Any]
