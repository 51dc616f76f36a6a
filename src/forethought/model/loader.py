"""Loads a local Hugging Face directory as a :class:`CausalLM`, or refuses it with the reason.

A plain Llama-like checkpoint that runs natively is read here (``checkpoint_module.py``). Others
load as transformers loads them (sharded safetensors, tied weights, quantised checkpoints where it
can); what such a model needs of attention is found by one small forward, the capability probe of
:mod:`~forethought.model.attention.interface`, and not by the model's name.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from forethought.errors import ModelError, ParameterError
from forethought.kv.pool import PagePool
from forethought.kv.table import PageTable
from forethought.model import backends
from forethought.model.adapter import layer_product
from forethought.model.attention import BACKENDS, create_backend
from forethought.model.attention.base import AttentionBackend, Capability
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.attention_layers import AttentionLayers
from forethought.model.auto_dtype import auto_dtype
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import (
    CausalLM,
    ForwardPath,
    ModelTraits,
    Network,
    TransformersNetwork,
)
from forethought.model.checkpoint_module import (
    CheckpointModule,
    open_checkpoint,
)
from forethought.model.checkpoint_tensors import GgufTensors
from forethought.model.decoder_layers import DecoderLayers
from forethought.model.device import has_fast_matmul
from forethought.model.fused_ops import has_kernels
from forethought.model.hidden_states import decoder_layers, decoder_of
from forethought.model.layer_window import check_layer_window, check_mapped_dtype
from forethought.model.loaded_weights import unsupported
from forethought.model.module_traits import traits_of
from forethought.model.quantization import (
    BITS,
    Quantization,
    QuantizedLinear,
    QuantizedWeight,
    check_quantizable,
    has_rounded_input,
    pack_linears,
    quantize_linears,
    use_native_products,
)
from forethought.model.quantized_experts import QuantizedExperts, quantize_experts, routers
from forethought.model.recurrent_layers import RecurrentLayers, step_widths
from forethought.model.rotary import find_rotary
from forethought.model.shard import Shard, cut
from forethought.model_dir import check_generation_config, gguf_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Forward = Literal["auto", "native", "torch"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SMALL_WEIGHTS = 50_000_000
"""Weights of a model up to which the native forward is as fast as torch's best kernels."""
_TRIAL_TOKENS = 4
"""Of a forward in which layers in C++ are compared with their modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadSettings:
    """The arguments of ``load``, where they are explained."""

    directory: Path
    dtype: torch.dtype | str
    device: torch.device
    backend: AttentionBackend
    fuse: bool
    trust_remote_code: bool
    quantization: Quantization | None
    forward: Forward
    shard: Shard | None
    adapted: Collection[str]
    expert_bytes: int | None
    layer_window: int | None


def load(
    path: str | Path,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    attention: str | AttentionBackend = "auto",
    fuse: bool = True,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    forward: Forward = "torch",
    shard: Shard | None = None,
    adapted: Collection[str] = (),
    expert_bytes: int | None = None,
    layer_window: int | None = None,
) -> CausalLM:
    """Load the model in the directory ``path``.

    Args:
        path: directory with ``config.json`` and weights.
        dtype: a name such as ``"bfloat16"``, a torch dtype, or ``"auto"``: the checkpoint's, or
            float32 on a CPU that has no fast products in it and memory enough.
        device: of the weights.
        attention: a backend, its name, or ``"auto"``.
        fuse: replace the forward by the fused one where the architecture allows it.
        trust_remote_code: run model code from the directory.
        quantization: quantise the weights as they are after loading; None: leave them.
        forward: ``native``: compute the layers in C++; ``torch``: do not; ``auto``: where it can
            be done and is faster.
        shard: the slice to load of a model that has passed ``check_shardable``; None: all of it.
        adapted: names of the linears that adapters are going to add to: a forward is taken that can
            do so.
        expert_bytes: of memory for the experts of the native forward; the others are in a file.
            None: all of them are in memory.
        layer_window: layers in memory; the others are in a file. None: all of them are in memory.

    Raises:
        ModelError: the directory is missing or broken, or the model is not supported; it cannot run
            natively and must, as with ``expert_bytes`` and ``layer_window``.
        UnknownNameError: no attention backend has this name.
        ParameterError: no such dtype.
    """
    device = torch.device(device)
    settings = _LoadSettings(
        directory=Path(path),
        dtype=dtype,
        device=device,
        backend=create_backend(attention, device) if isinstance(attention, str) else attention,
        fuse=fuse,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
        forward="native" if layer_window is not None else forward,  # no other can leave layers out
        shard=shard,
        adapted=adapted,
        expert_bytes=expert_bytes,
        layer_window=layer_window,
    )
    attention_name = attention if isinstance(attention, str) else attention.name
    return _load(settings, _settings_refusal(settings, attention_name, forward))


def _load(settings: _LoadSettings, refusal: str | None) -> CausalLM:
    """``refusal``: why, by the settings, no model can run natively; None: one could."""
    _check_settings(settings, refusal)
    lm = _load_plain_checkpoint(settings) if refusal is None else None
    return _load_module(settings, refusal) if lm is None else lm


def _settings_refusal(settings: _LoadSettings, attention: str, requested: Forward) -> str | None:
    """Why no model can run natively with these settings; None: one could. ``requested``: the
    forward that ``load`` was called with.
    """
    if settings.shard is not None and requested != "torch":
        return f"tensor_parallel_size={settings.shard.size} asks for the fused forward"
    if requested == "torch":
        return "it was not asked for"
    if settings.device.type != "cpu":
        return f"the model runs on {settings.device.type}"
    if not settings.fuse:
        return "fuse=False asks for the module of transformers"
    if attention != "auto":
        return f"attention={attention!r} asks for another backend"
    return backends.cpu().why_unavailable()


def _check_settings(settings: _LoadSettings, refusal: str | None) -> None:
    """Raise ParameterError for an unknown dtype, and what ``check_layer_window`` raises; before
    weights are read.
    """
    dtype, layer_window = settings.dtype, settings.layer_window
    if isinstance(dtype, str) and dtype != "auto" and dtype not in DTYPES:
        raise ParameterError("unknown dtype", repr(dtype), f"Allowed: auto, {', '.join(DTYPES)}")
    if layer_window is not None:
        check_layer_window(
            layer_window,
            settings.directory,
            settings.quantization,
            refusal,
            settings.expert_bytes,
        )


def _load_module(settings: _LoadSettings, refusal: str | None) -> CausalLM:
    """A model that transformers reads. ``refusal``: why, by the settings, it cannot run natively;
    None: it may.
    """
    module = _read_module(settings, may_be_native=refusal is None)
    layers, vocab_size = _place(module, settings)
    if settings.quantization is not None:
        _quantize(module, settings.quantization)
    fuse, forward = settings.fuse, settings.forward
    with torch.inference_mode():
        is_native = fuse and _runs_parts(module, forward)
        recurrent = RecurrentLayers.of(module, is_native, fuse and has_kernels(settings.device))
        traits = traits_of(module, layers, vocab_size, recurrent.state_bytes if recurrent else 0)
        transformers = TransformersNetwork(module, recurrent)
        if recurrent is not None and recurrent.is_native:
            transformers = _with_native_parts(transformers, settings, traits)
        if transformers.attention is not None:
            traits = replace(traits, layers=transformers.attention.profiles)
        refusal = refusal or _adapter_refusal(settings.adapted)
        network, path = _choose_network(settings, transformers, traits, refusal)
    return CausalLM(network, settings.backend, traits, path)


def _place(
    module: PreTrainedModel, settings: _LoadSettings
) -> tuple[tuple[LayerProfile, ...], int]:
    """Move a module, or its shard, to the device.

    Returns:
        What its layers need of attention, and the size of its vocabulary.
    """
    from forethought.model.transformers_module import probe, refusing

    directory, shard = settings.directory, settings.shard
    if shard is None:
        with refusing(directory, "loading"):
            module.to(settings.device)
    layers, vocab_size = probe(module, directory)
    _check_capabilities(layers, settings.backend, directory)
    if shard is not None:  # cut first: the device may not have memory for all of it
        layers = cut(module, layers, shard, directory)
        module.to(settings.device)
    return layers, vocab_size


def _with_native_parts(
    network: TransformersNetwork, settings: _LoadSettings, traits: ModelTraits
) -> TransformersNetwork:
    """Have attention, experts, MLPs, norms and linears of a module with recurrent layers computed
    in C++, where they agree with the module, and torch is not faster.
    """
    module, recurrent, backend = network.module, network.recurrent, settings.backend
    assert recurrent is not None
    if _slower_natively(module, settings.forward, in_parts=True) is not None:
        return network

    def try_forward(attention: AttentionLayers) -> None:
        profiled = replace(traits, layers=attention.profiles)
        lm = CausalLM(replace(network, attention=attention), backend, profiled)
        table = PageTable(PagePool(1, _TRIAL_TOKENS))
        table.append(_TRIAL_TOKENS)
        row = Row([*range(_TRIAL_TOKENS)], 0, table)
        lm.forward(Batch.build([row]), lm.storage(1, _TRIAL_TOKENS))

    attention = AttentionLayers(module, traits.layers, try_forward)
    backends.cpu().use_native_parts(module, routers(module) | step_widths(module))
    if attention.num_native < len(traits.layers):
        return replace(network, attention=attention if attention.has_native else None)
    try:
        layers = decoder_layers(decoder_of(module))
    except ModelError:  # there is no list of them
        return replace(network, attention=attention)
    decoder = DecoderLayers.of(
        layers,
        recurrent,
        attention,
        find_rotary(decoder_of(module)),
        lambda: try_forward(attention),
    )
    network = replace(network, attention=attention, decoder=decoder)
    if decoder is None:
        return network
    profiled = replace(traits, layers=attention.profiles)
    whole = backends.cpu().module_forward(CausalLM(network, backend, profiled))
    return replace(network, whole=whole)


def _read_module(settings: _LoadSettings, *, may_be_native: bool) -> PreTrainedModel:
    """The module of transformers, in the memory of the CPU. Raises ModelError where a layer window
    needs weights that stay mapped from their file, and they would be converted.
    """
    from forethought.model.transformers_module import checked_module, read_config, refusing

    directory, dtype, device = settings.directory, settings.dtype, settings.device
    config, rounds_input = read_config(directory, settings.trust_remote_code), False
    _check_quantization(directory, config, settings.quantization, device)
    if dtype == "auto":
        rounds_input = device.type == "cpu"
        is_quantized = settings.quantization is not None
        dtype = auto_dtype(directory, config, device, is_quantized, may_be_native)
    if settings.layer_window is not None:
        check_mapped_dtype(dtype, config, directory)
    module = checked_module(directory, config, dtype, settings.trust_remote_code, rounds_input)
    with refusing(directory, "loading"):
        return module.eval().requires_grad_(False)


def _adapter_refusal(adapted: Collection[str]) -> str | None:
    """Why adapters of these linears need the module of transformers; None: they do not."""
    name = next((name for name in adapted if layer_product(name) is None), None)
    return None if name is None else f"an adapter adds to {name}"


def _load_plain_checkpoint(settings: _LoadSettings) -> CausalLM | None:
    """A plain checkpoint in the native forward, without transformers; None: it is not plain, or
    torch computes it. Raises ModelError for weights that are not finite, and for
    ``expert_bytes``: it has no experts.
    """
    directory, backend, quantization = (
        settings.directory,
        settings.backend,
        settings.quantization,
    )
    module = open_checkpoint(directory, quantization, rounds_input=settings.dtype == "auto")
    if module is None or backends.cpu().refusal(module) is not None or not _has_library():
        return None
    check_generation_config(directory, module.config.vocab_size)
    module.dtype = _checkpoint_dtype(module, settings)
    if module.dtype not in (torch.float32, torch.bfloat16):
        return None
    if native_refusal(module, settings.forward) is not None:
        return None
    if settings.expert_bytes is not None:
        raise _no_stored_experts("it has none")
    layers = module.profiles()
    _check_capabilities(layers, backend, directory)
    module.read()
    if quantization is not None:
        logger.info("%d linear layers quantised to %s", module.num_linears, quantization)
    traits = traits_of(module, layers, module.config.vocab_size)
    with torch.inference_mode():
        network = backends.cpu().network(
            module,
            traits.max_positions,
            [None] * len(layers),
            layer_window=settings.layer_window,
        )
    return CausalLM(network, backend, traits, ForwardPath(settings.forward, "native"))


def _checkpoint_dtype(module: CheckpointModule, settings: _LoadSettings) -> torch.dtype:
    """Of the weights of a plain checkpoint on a CPU."""
    dtype = settings.dtype
    if dtype == "auto":
        is_quantized = settings.quantization is not None or module.has_blocks
        dtype = auto_dtype(
            settings.directory, module.config, torch.device("cpu"), is_quantized, native=True
        )
    if isinstance(dtype, torch.dtype):
        return dtype
    return module.config.dtype if dtype == "auto" else DTYPES[dtype]


def _has_library() -> bool:
    """Whether the native forward can be loaded, or compiled."""
    try:
        backends.cpu().uses_amx()
    except ModelError:
        return False
    return True


def _runs_parts(module: PreTrainedModel, forward: Forward) -> bool:
    """Whether parts of a module that torch runs may be computed in C++."""
    return forward == "auto" and module.device.type == "cpu" and _has_library()


def _check_quantization(
    directory: Path, config: Any, quantization: Quantization | None, device: torch.device
) -> None:
    from forethought.model.transformers_module import quant_method

    method = quant_method(directory, config)
    if quantization is not None and gguf_files(directory) is not None:
        method = "the blocks of its GGUF file" if GgufTensors(directory, True).has_blocks else None
    if quantization is not None and method is not None:
        raise ModelError(
            f'quantization="{quantization}" is not possible for the model in {directory}',
            f"its weights are quantised already, by {method}",
            "Leave the argument out, or give a checkpoint in 16 or 32 bits",
        )
    if quantization is not None and has_rounded_input(quantization) and device.type != "cpu":
        raise ModelError(
            f'quantization="{quantization}" is not possible on {device.type}',
            "activations are multiplied in 8 bits on a CPU alone",
            f'Use quantization="int{BITS[quantization]}"',
        )


def _quantize(module: PreTrainedModel, quantization: Quantization) -> None:
    """Raises ModelError for a model that cannot be quantised."""
    check_quantizable(module, quantization)
    num_experts = quantize_experts(module, quantization)
    num_linears = quantize_linears(module, quantization, routers(module) | step_widths(module))
    logger.info(
        "%d linear layers and %d experts quantised to %s", num_linears, num_experts, quantization
    )


def _choose_network(
    settings: _LoadSettings,
    transformers: TransformersNetwork,
    traits: ModelTraits,
    refusal: str | None,
) -> tuple[Network, ForwardPath]:
    """The network of a module, and how it was chosen: native, fused or ``transformers``.
    ``refusal``: why, by the settings, it cannot be native. Raises ModelError if it must be.
    """
    module, forward = transformers.module, settings.forward
    if settings.expert_bytes is not None and not any(w.is_expert for w in traits.weights):
        raise _no_stored_experts("it has none")
    reason = _native_network(settings, module, traits, refusal)
    if not isinstance(reason, str):
        return reason, ForwardPath(forward, "native")
    if forward == "native":
        raise ModelError(
            'forward="native" is not possible for this model',
            reason,
            'Leave it out, or set forward="auto"',
        )
    if settings.expert_bytes is not None:
        raise _no_stored_experts(f"it does not run natively: {reason}")
    from forethought.model.llama.network import FusedNetwork, is_fusable

    if _runs_parts(module, forward):
        use_native_products(module)
    if settings.fuse and is_fusable(module):
        return FusedNetwork(module, traits.max_positions), ForwardPath(forward, "fused", reason)
    pack_linears(module)
    if transformers.recurrent is not None and transformers.recurrent.is_native:
        also = ", and its attention" if transformers.attention else ""
        reason = f"{reason}; its recurrent layers run in C++{also}"
    return transformers, ForwardPath(forward, "transformers", reason)


def _native_network(
    settings: _LoadSettings, module: PreTrainedModel, traits: ModelTraits, refusal: str | None
) -> Network | str:
    """The native network of a module, or the reason why there is none. Raises ModelError where it
    has to be native and the compiler fails.
    """
    cpu, forward = backends.cpu(), settings.forward
    try:
        reason = refusal or native_refusal(module, forward)
        if reason is None:
            windows = [layer.window for layer in traits.layers]
            network: Network = cpu.network(
                module,
                traits.max_positions,
                windows,
                settings.expert_bytes,
                settings.layer_window,
            )
            return network
        if reason == cpu.NO_COMPILER and forward == "auto" and cpu.refusal(module) is None:
            cpu.warn_unavailable(reason)
    except ModelError as error:  # the compiler fails
        if forward == "native":
            raise
        reason = error.why
        cpu.warn_unavailable(reason, error.fix)
    return reason


def _no_stored_experts(why: str) -> ModelError:
    return ModelError(
        "experts of this model cannot be left in a file", why, "Leave expert_memory out"
    )


def native_refusal(
    module: PreTrainedModel | CheckpointModule, forward: Forward = "auto"
) -> str | None:
    """Why a module on a CPU does not run natively; None: it does. Raises ModelError if the native
    forward cannot be compiled.
    """
    return backends.cpu().refusal(module) or _slower_natively(module, forward)


def _slower_natively(
    module: PreTrainedModel | CheckpointModule, forward: Forward, *, in_parts: bool = False
) -> str | None:
    """Why ``auto`` leaves a model to torch although it could run natively, or parts of its module
    (``in_parts``) could. Raises ModelError if the native forward cannot be compiled.

    Measured in bf16, one thread of a Xeon with AMX, models of 4, 15 and 150 million weights,
    batches of 1 to 64. Where both use AMX, or neither does, the native forward decodes up to 5
    times as many tokens per second, and never fewer; with AMX its prefills of 512 tokens take from
    0.8 to 1.6 times as long. Where oneDNN alone uses AMX, the native one is ahead with 15 million
    weights in batches up to 16, and decodes half as fast as torch with 150 million in such batches.
    In 8 and 4 bits it decodes 1.6 to 5 times as fast with up to 15 million weights. With 150
    million it decodes 2.2 to 3 times as fast in 8 bits (and prefills half as fast), and 0.7 to 2
    times as fast in 4 bits. Mixtures of experts in 4 bits decode 1.0 to 6 times as fast and prefill
    twice as fast (one thread of an AMD EPYC with AVX-512, 50 and 300 million weights of experts),
    and parts of models with recurrent layers 2.2 and 1.2 times as fast (there, 100 million).
    """
    dtype = module.dtype
    if forward == "native" or dtype == torch.float32 or not has_fast_matmul(dtype, module.device):
        return None
    if _num_weights(module) <= MAX_SMALL_WEIGHTS or _rounds_input(module):
        return None
    if _has_4_bits(module) and not (in_parts or _has_quantized_experts(module)):
        return f"torch has kernels for weights in 4 bits and {str(dtype).removeprefix('torch.')}"
    torch_amx = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    if backends.cpu().uses_amx() or not torch_amx:
        return None
    return "oneDNN multiplies bfloat16 by AMX here, and the compiled native forward cannot"


def _has_4_bits(module: PreTrainedModel | CheckpointModule) -> bool:
    """Whether any weight is quantised to 4 bits."""
    if isinstance(module, CheckpointModule):
        return module.quantization == "int4"
    weights = (m.weight for m in module.modules() if isinstance(m, QuantizedLinear))
    return any(isinstance(weight, QuantizedWeight) and weight.bits == 4 for weight in weights)


def _has_quantized_experts(module: PreTrainedModel | CheckpointModule) -> bool:
    return any(isinstance(part, QuantizedExperts) for part in module.modules())


def _rounds_input(module: PreTrainedModel | CheckpointModule) -> bool:
    """Whether activations are quantised, for which torch has the reference alone."""
    if isinstance(module, CheckpointModule):
        quantization = module.quantization
        return module.has_blocks or (quantization is not None and has_rounded_input(quantization))
    weights = (m.weight for m in module.modules() if isinstance(m, QuantizedLinear))
    return any(weight is not None and weight.rounds_input for weight in weights)


def _num_weights(module: PreTrainedModel | CheckpointModule) -> int:
    """Of all layers, quantised ones among them, which are no parameters."""
    if isinstance(module, CheckpointModule):
        return module.num_weights
    quantised = (part for part in module.modules() if isinstance(part, QuantizedLinear))
    return sum(weight.numel() for weight in module.parameters()) + sum(
        part.in_features * part.out_features for part in quantised
    )


def _check_capabilities(
    layers: tuple[LayerProfile, ...], backend: AttentionBackend, directory: Path
) -> None:
    needed: frozenset[Capability] = frozenset().union(*(layer.needs() for layer in layers))
    lacking = sorted(needed - backend.capabilities)
    if lacking:
        raise unsupported(
            directory,
            f"it needs {', '.join(lacking)}, which the attention backend {backend.name!r} lacks",
            f"Use another attention backend: {', '.join(BACKENDS.names())}",
        )
