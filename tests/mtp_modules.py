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
        for module in modules:
            torch.nn.init.normal_(module.eh_proj.weight, std=0.3)
            for weight in module.parameters():
                if weight.ndim == 1:
                    weight.data += 0.2 * torch.randn(weight.shape)
    if layout == "qwen":  # modules share all but their blocks
        first = modules[0]
        for module in modules[1:]:
            module.enorm, module.hnorm, module.eh_proj = first.enorm, first.hnorm, first.eh_proj
            module.model.base_model.norm = first.model.base_model.norm
    return modules


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mtp-modules-")


@functools.cache
def bigram_module(architecture: str, layout: str = "qwen") -> Path:
    """A module that drafts well for ``models.bigram``: what it gives is mostly the embedding of the
    token, as there.
    """
    path = Path(_directory().name) / f"{architecture}-bigram"
    [module] = random_modules(architecture, 1, layout)
    hidden = module.eh_proj.out_features
    both = [torch.eye(hidden), 0.2 * torch.randn(hidden, hidden) / hidden**0.5]
    module.eh_proj.weight.data = torch.cat(both[:: -1 if module.layout.hidden_first else 1], 1)
    module.enorm.weight.data.fill_(1.0)
    module.model.base_model.norm.weight.data.fill_(1.0)
    for name, weight in module.model.base_model.layers.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.data *= 0.03
    save_modules([module], path, layout)
    return path


@functools.cache
def saved(architecture: str = "llama", count: int = 1, layout: str = "deepseek") -> Path:
    """A directory with such modules alone; made once per process."""
    path = Path(_directory().name) / f"{architecture}-{count}-{layout}"
    first = load(architecture).num_layers if layout == "deepseek" else 0
    save_modules(random_modules(architecture, count, layout), path, layout, first)
    return path
