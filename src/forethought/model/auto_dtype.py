"""The dtype of weights that nobody has chosen: the checkpoint's, or what is fast on the CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from forethought.model import backends
from forethought.model.checkpoint_module import CheckpointConfig
from forethought.model.device import free_host_memory, has_fast_matmul
from forethought.model_dir import gguf_files

logger = logging.getLogger(__name__)

FLOAT32_SHARE = 0.5
"""Share of the free memory that the weights may take in float32, where 16 bits are slow."""


def auto_dtype(
    directory: Path, config: Any, device: torch.device, quantised: bool, native: bool
) -> torch.dtype | str:
    """What ``"auto"`` means: the checkpoint's dtype, unless the CPU has no fast products in it.

    Then it is float32, if that takes at most a share of the free memory. On a CPU quantised weights
    are multiplied by bf16, the dtype of torch's kernels for them, unless it is slow and the model
    runs natively; those that are dequantised as they are read are not quantised any more.
    """
    settings, dequantised = getattr(config, "quantization_config", None), False
    if settings is not None:
        from forethought.model import quantized_checkpoint

        settings = quantized_checkpoint.settings_of(directory, config)
        dequantised = settings is not None and quantized_checkpoint.is_dequantised(settings)
    if quantised or (settings is not None and not dequantised):
        if device.type != "cpu":
            return "auto"
        slow = not has_fast_matmul(torch.bfloat16, device)
        is_native = native and (
            isinstance(config, CheckpointConfig)
            or backends.cpu().causal_lm_class(config) is not None
        )
        return torch.float32 if slow and is_native else torch.bfloat16
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype
    if not isinstance(stored, torch.dtype) or has_fast_matmul(stored, device):
        return "auto"
    stored_size = torch.float8_e4m3fn.itemsize if dequantised else stored.itemsize
    size = _weight_bytes(directory) * torch.float32.itemsize // stored_size
    if size > FLOAT32_SHARE * free_host_memory():
        logger.warning(
            "this CPU has no fast products in %s, and the weights in float32 would take more than "
            "half of the free memory: steps will be slow%s",
            stored,
            "" if dequantised else '. Use quantization="int8"',
        )
        return "auto"
    logger.info("weights in float32: this CPU has no fast products in %s", stored)
    return torch.float32


def _weight_bytes(directory: Path) -> int:
    in_directory = [*directory.glob("*.safetensors")] or [*directory.glob("pytorch_model*.bin")]
    files = gguf_files(directory) or in_directory
    return sum(path.stat().st_size for path in files)
