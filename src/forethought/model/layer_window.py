"""Which models may leave layers in a file, checked before their weights are read.

What holds the layers is the native forward's: ``backends/cpu/layer_window.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forethought.errors import ModelError, ParameterError
from forethought.model import backends
from forethought.model.checkpoint_module import open_checkpoint
from forethought.model.checkpoint_tensors import GgufTensors
from forethought.model.quantization import Quantization
from forethought.model_dir import gguf_files


def check_layer_window(
    size: int,
    directory: Path,
    quantization: Quantization | None,
    refusal: str | None,
    expert_bytes: int | None,
) -> None:
    """Raise ModelError where layers of a model cannot be left in a file, and ParameterError where
    the window makes no sense.

    Args:
        size: layers in memory.
        directory: of the model.
        quantization: of its weights as they are read.
        refusal: why no model can run natively with the other settings; None: one could.
        expert_bytes: of memory for experts; None: all of them are in memory.
    """
    if expert_bytes is not None:
        raise ParameterError(
            "layer_window and expert_memory exclude each other",
            "whole layers are left in a file, or experts alone",
            "Leave one of them out",
        )
    if refusal is not None:
        raise _not_native(refusal)
    backends.cpu().uses_amx()  # raises ModelError where there is no library
    module = open_checkpoint(directory)
    refusal = None if module is None else backends.cpu().refusal(module)
    if refusal is not None:
        raise _not_native(refusal)
    if module is not None and module.has_blocks and quantization is not None:
        raise no_layer_window("its weights are quantised already", "Leave quantization out")
    config = _mapped_config(directory, quantization) if module is None else module.config
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    if size >= num_layers:
        raise ParameterError(
            f"layer_window={size}",
            f"the model has {num_layers} layers, so that all of them would be in memory",
            "Give fewer, or leave it out",
        )


def check_mapped_dtype(dtype: torch.dtype | str, config: Any, directory: Path) -> None:
    """Raise ModelError where weights that transformers reads would be converted, all at once, or
    have a dtype that the native forward lacks.
    """
    name, requested = (str(x).removeprefix("torch.") for x in (config.dtype, dtype))
    if "float16" in (requested, name if requested == "auto" else ""):
        raise no_layer_window("its weights would be in float16", 'Use dtype="bfloat16"')
    if requested not in ("auto", name) and gguf_files(directory) is None:
        raise no_layer_window(
            f"its weights are in {name}, and would all be in memory to be converted",
            f'Use dtype="{name}"',
        )


def _mapped_config(directory: Path, quantization: Quantization | None) -> Any:
    """The configuration of a model that is not read layer by layer: its weights stay mapped from
    its files until its layers are packed. Raises ModelError where they would not.
    """
    from forethought.model.transformers_module import quant_method, read_config

    config = read_config(directory, trust_remote_code=False)
    if backends.cpu().causal_lm_class(config) is None:
        raise _not_native(f"{config.model_type} is not among its families")
    if gguf_files(directory) is not None:
        if not GgufTensors(directory, True).has_blocks:
            raise no_layer_window("its weights would all be in memory, as its file has no blocks")
    elif quant_method(directory, config) is not None:
        raise no_layer_window("its quantised weights would all be in memory to be packed")
    elif getattr(config, "num_experts", None):
        raise no_layer_window(
            "its experts would all be in memory to be merged", "Give a GGUF file of the model"
        )
    if quantization is not None:
        raise no_layer_window(
            "its layers are not read one by one: all would be in memory to be quantised",
            "Leave quantization out, or give a GGUF file of the model",
        )
    return config


def _not_native(why: str) -> ModelError:
    return no_layer_window(f"it does not run natively: {why}")


def no_layer_window(why: str, fix: str = "Leave layer_window out") -> ModelError:
    """The refusal of a model whose layers cannot be left in a file."""
    return ModelError("layers of this model cannot be left in a file", why, fix)
