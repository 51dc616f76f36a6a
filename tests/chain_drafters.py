"""Targets and what drafts chains for them, of which many tokens are accepted."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from eagle_heads import new_directory, random_eagle, random_eagle3
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
)
from forethought.config.speculation import DecodingBaseConfig
from forethought.model import loader
from models import save_random, tiny
from mtp_modules import saved

LIKELY = torch.tensor([40, 100])
"""The tokens that targets and what drafts for them choose from, so that many are accepted."""


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="few-tokens-")


@functools.cache
def few_tokens(architecture: str, seed: int = 1, vocab_size: int | None = None) -> Path:
    """A tiny model that says little but ``LIKELY``."""
    path = Path(_directory().name) / f"{architecture}-{seed}-{vocab_size}"
    config = loader.load(tiny(architecture)).config
    config.vocab_size = vocab_size or config.vocab_size
    save_random(config, path, seed)
    module = AutoModelForCausalLM.from_pretrained(path)
    head = module.lm_head.weight.data
    likely = [token for token in LIKELY.tolist() if token < len(head)]
    kept = head[likely].clone()
    head.zero_()
    head[likely] = kept
    module.save_pretrained(path)
    return path


def draft_model(architecture: str = "llama", vocab_size: int | None = None) -> DecodingBaseConfig:
    model = few_tokens(architecture, 9, vocab_size)
    return DraftTargetDecodingConfig(max_draft_len=4, speculative_model=model)


def eagle(head: Any) -> DecodingBaseConfig:
    directory = new_directory()
    head.save(directory)
    return EagleDecodingConfig(max_draft_len=4, speculative_model=directory)


def eagle3(**traits: Any) -> DecodingBaseConfig:
    head = random_eagle3(draft_vocab=len(LIKELY), **traits)
    head.set_vocabulary(LIKELY)
    return eagle(head)


def mtp(architecture: str = "llama", layout: str = "deepseek", **more: Any) -> DecodingBaseConfig:
    modules = saved(architecture, 1, layout)
    return MTPDecodingConfig(max_draft_len=4, speculative_model=modules, **more)


KINDS: dict[str, tuple[str, Callable[[], DecodingBaseConfig]]] = {
    "draft model": ("llama", draft_model),
    "draft model, window": ("mistral", lambda: draft_model("mistral")),
    "draft model, fewer tokens": ("llama", lambda: draft_model(vocab_size=99)),
    "draft model, more tokens": ("llama", lambda: draft_model(vocab_size=103)),
    "eagle": ("llama", lambda: eagle(random_eagle())),
    "eagle, own embedding": ("llama", lambda: eagle(random_eagle(own_embedding=True))),
    "eagle3": ("llama", eagle3),
    "eagle3, all norms": (
        "llama",
        lambda: eagle3(
            norm_before_residual=True,
            norm_before_fc=True,
            norm_output=True,
            own_embedding=True,
            attention_bias=True,
        ),
    ),
    "mtp": ("llama", mtp),
    "mtp, state unnormed": ("llama", lambda: mtp(fed_back_state="unnormed")),
    "mtp, another layout": ("qwen3", lambda: mtp("qwen3", "qwen")),
    "mtp, window": ("mistral", lambda: mtp("mistral")),
}
