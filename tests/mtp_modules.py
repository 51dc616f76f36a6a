"""MTP modules with random weights for tiny targets, in every layout."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

from engines import load
from forethought.speculative.heads.mtp import MtpModule, save_modules


def random_modules(architecture: str, count: int = 1, layout: str = "deepseek") -> list[MtpModule]:
    """Fresh modules in which no two weights are alike."""
    lm = load(architecture)
    with torch.random.fork_rng():
        torch.manual_seed(count)
        modules = [MtpModule.fresh(lm, layout) for _ in range(count)]
        if layout == "qwen":  # they share all but their blocks
            for module in modules[1:]:
                for part in ("enorm", "hnorm", "eh_proj"):
                    getattr(module, part).load_state_dict(getattr(modules[0], part).state_dict())
                module.model.base_model.norm.load_state_dict(
                    modules[0].model.base_model.norm.state_dict()
                )
        for module in modules:
            torch.nn.init.normal_(module.eh_proj.weight, std=0.3)
            for weight in module.parameters():
                if weight.ndim == 1:
                    weight.data += 0.2 * torch.randn(weight.shape)
    return modules


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mtp-modules-")


@functools.cache
def saved(architecture: str = "llama", count: int = 1, layout: str = "deepseek") -> Path:
    """A directory with such modules alone; made once per process."""
    path = Path(_directory().name) / f"{architecture}-{count}-{layout}"
    first = load(architecture).num_layers if layout == "deepseek" else 0
    save_modules(random_modules(architecture, count, layout), path, layout, first)
    return path
