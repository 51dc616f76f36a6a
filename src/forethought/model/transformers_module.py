"""Loads a Hugging Face directory by transformers, as a module of its own classes, or refuses it.

What is not transformers' (dtype, network, traits) is in ``loader.py``, which imports this file only
where it needs it: transformers' code takes longer to import than torch.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.quantizers.auto import AutoHfQuantizer

from forethought.errors import ModelError
from forethought.model import quantized_checkpoint
from forethought.model.attention.base import KEYWORD
from forethought.model.attention.interface import ATTENTION, PROBE, CapabilityProbe
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.loaded_weights import (
    broken,
    check_report,
    check_shapes,
    check_values,
    unsupported,
)
from forethought.model.recurrent_layers import find_recurrent_layers
from forethought.model_dir import (
    check_checkpoint,
    check_generation_config,
    first_words,
    gguf_files,
    read_json,
)
from forethought.transformers_loading import (
    one_module_at_a_time,
    without_kernel_advice,
    without_progress_bars,
)

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROBE_TOKENS = 3
_SCALES = re.compile(r"\.(weight_scale\w*|input_scale|qweight|qzeros|scales|absmax)$")
"""Names of the scales of quantised weights."""
_UNQUANTISED = "Give the checkpoint in 16 or 32 bits"


def read_config(directory: Path, trust_remote_code: bool) -> Any:
    """The configuration; refuses what can be refused by it."""
    shapes = check_checkpoint(directory)
    written = read_json(directory / "config.json")
    _check_model_type(directory, written, trust_remote_code)
    _check_names(directory, written)
    with refusing(directory, "reading its config.json"):
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    if getattr(config, "vision_config", None) is not None:
        logger.warning("%s also sees images: its language part alone is loaded", directory.name)
    if config.is_encoder_decoder:
        raise unsupported(directory, "it is an encoder-decoder; only decoders are served")
    text = config.get_text_config(decoder=True)
    check_generation_config(directory, text.vocab_size)
    if shapes and getattr(config, "quantization_config", None) is None:
        copied = copy.deepcopy(config)
        make = partial(
            AutoModelForCausalLM.from_config, copied, trust_remote_code=trust_remote_code
        )
        with refusing(directory, "reading its config.json"):
            check_shapes(make, text.num_hidden_layers, shapes, directory)
    return config


def _check_model_type(directory: Path, written: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Refuse a ``model_type`` that neither transformers nor the directory has code for."""
    name = written.get("model_type")
    if name in CONFIG_MAPPING or (trust_remote_code and "auto_map" in written):
        return
    why = f"transformers {transformers.__version__} has no model_type {name!r}"
    fix = "Upgrade transformers, or choose another model"
    if "auto_map" in written:
        fix = "Its code is in the directory: read it, then set trust_remote_code=True"
    if name is None:
        why, fix = "its config.json has no model_type", "Choose a directory that transformers wrote"
    raise ModelError(f"the model in {directory} is not supported", why, fix)


def _check_names(directory: Path, written: Mapping[str, Any]) -> None:
    """Refuse a dtype that torch, or an activation that transformers does not have."""
    for name in ("dtype", "torch_dtype", "hidden_act", "activation_function"):
        value = str(written.get(name) or "")
        dtype = getattr(torch, value.removeprefix("torch."), None)
        if value and not (isinstance(dtype, torch.dtype) if "dtype" in name else value in ACT2FN):
            why = f"{name} of its config.json is {value!r}, which is unknown"
            raise broken(directory, why, "Correct the field")


def checked_module(
    directory: Path,
    config: Any,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    rounds_input: bool = False,
) -> PreTrainedModel:
    """The module with its weights, which fit the configuration and are finite. ``rounds_input``:
    blocks of a GGUF file are multiplied by activations in 8 bits.
    """
    if gguf_files(directory) is not None:
        module = _gguf_module(directory, config, dtype, rounds_input)
    else:
        module = _module(directory, config, dtype, trust_remote_code)
    _check_module(module, directory)
    check_values(module.named_parameters(), directory, "model")
    return module


def _module(
    directory: Path, config: Any, dtype: torch.dtype | str, trust_remote_code: bool
) -> PreTrainedModel:
    settings = quantized_checkpoint.settings_of(directory, config)
    if settings is not None and quantized_checkpoint.is_supported(settings):
        return _quantized_module(directory, config, settings, dtype, trust_remote_code)
    quantised = quant_method(directory, config)
    doing = "loading" if quantised is None else f"loading weights quantised by {quantised}"
    with refusing(directory, doing), without_progress_bars(), one_module_at_a_time():
        module, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=PROBE,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # they are in the report
            output_loading_info=True,
        )
    scales = [name for name in report.get("unexpected_keys", ()) if _SCALES.search(str(name))]
    if scales:  # transformers only warns, and reads the weights without them
        why = f"its checkpoint has {min(map(str, scales))}, which its config.json does not explain"
        raise ModelError(f"the model in {directory} is quantised", why, _UNQUANTISED)
    check_report(report, directory)
    return module


def _gguf_module(
    directory: Path, config: Any, dtype: torch.dtype | str, rounds_input: bool
) -> PreTrainedModel:
    from forethought.model import gguf_checkpoint

    if isinstance(dtype, str):
        dtype = config.dtype if dtype == "auto" else DTYPES[dtype]
    with refusing(directory, "loading its GGUF file"):
        return gguf_checkpoint.read(
            directory, config, dtype, rounds_input, attn_implementation=PROBE
        )


def _quantized_module(
    directory: Path,
    config: Any,
    settings: Mapping[str, Any],
    dtype: torch.dtype | str,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """The module of a quantised checkpoint that is read here, and not by transformers."""
    with refusing(directory, f"loading weights quantised by {settings['quant_method']}"):
        if dtype == "auto":
            dtype = config.get_text_config(decoder=True).dtype or torch.bfloat16
        return quantized_checkpoint.read(
            directory,
            config,
            settings,
            DTYPES[dtype] if isinstance(dtype, str) else dtype,
            attn_implementation=PROBE,
            trust_remote_code=trust_remote_code,
        )


def _check_module(module: PreTrainedModel, directory: Path) -> None:
    if getattr(module, "_is_stateful", False) and not find_recurrent_layers(module):
        raise unsupported(
            directory,
            f"{type(module).__name__} keeps recurrent state in a way that is not known here: its "
            "layers do not take it from a cache of transformers",
        )
    if "position_ids" not in inspect.signature(module.forward).parameters:
        raise unsupported(
            directory,
            f"{type(module).__name__} takes no position_ids: it counts positions itself, and "
            "the rows of a batch are packed one after the other",
        )


def quant_method(directory: Path, config: Any) -> str | None:
    """The quantisation method of the weights; None: not quantised. Raises ModelError if
    transformers does not know it, and would read the weights as they are stored.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, Mapping) else settings.to_dict()
    method = str(settings.get("quant_method", "an unnamed method"))
    if "quant_method" not in settings or not AutoHfQuantizer.supports_quant_method(settings):
        why = f"transformers {transformers.__version__} cannot read it"
        raise ModelError(f"the model in {directory} is quantised by {method}", why, _UNQUANTISED)
    return method


def probe(module: PreTrainedModel, directory: Path) -> tuple[tuple[LayerProfile, ...], int]:
    """What each layer needs of attention, and the width of the logits."""
    probe = CapabilityProbe()
    tokens = torch.arange(_PROBE_TOKENS, device=module.device)[None]
    with torch.inference_mode(), refusing(directory, "probing"), without_kernel_advice():
        output = module(
            input_ids=tokens,
            position_ids=tokens,
            use_cache=False,
            logits_to_keep=tokens.new_tensor([1]),
            **{KEYWORD: probe},
        )
        text = module.config.get_text_config(decoder=True)
        num_recurrent = len(find_recurrent_layers(module))
        layers = probe.profile(text.num_hidden_layers, num_recurrent)
    if output.logits.shape[1] != 1:
        raise unsupported(directory, "it ignores logits_to_keep and computes logits for all tokens")
    module.set_attn_implementation(ATTENTION)
    return layers, output.logits.shape[-1]


@contextmanager
def refusing(directory: Path, doing: str) -> Iterator[None]:
    """Turn any exception of transformers into a ModelError with its first line."""
    try:
        yield
    except ModelError as error:
        if str(directory) in error.what:  # it says all already
            raise
        raise unsupported(directory, error.why) from error
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except KeyError as error:
        if error.args[0] not in (PROBE, KEYWORD):
            raise broken(directory, f"{doing} failed: no {error}") from error
        why = "its attention is not called through transformers' attention interface"
        raise unsupported(directory, why) from error
    except Exception as error:  # transformers, safetensors and remote code raise any type
        reason = first_words(error)
        fix = f"{_UNQUANTISED}, or install what is missing" if "quantised" in doing else ""
        raise broken(directory, f"{doing} failed: {reason}", fix) from error
