"""Targets that ship MTP modules among their own tensors, as each family names them.

Nothing but ``max_draft_len`` is said: the modules are found, the target is loaded without them, and
drafts are those of the reference implementation.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from engines import drain, expect_empty, outputs
from forethought.config.drafters import MTPDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.engine.engine import Engine
from forethought.engine.resolve import build_drafter_entry
from forethought.engine.scheduler import Limits
from forethought.errors import ModelError
from forethought.kv.storage import KvStorage
from forethought.model import loader
from forethought.model.runner import ModelRunner
from forethought.speculative.drafter import Target
from forethought.speculative.heads.mtp import MtpModule, load_modules, save_modules
from models import greedy, prompts, save_random, tiny
from mtp_reference import Watch, replayed

PROMPTS = prompts((4, 9, 17, 1))
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
GLM: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
FAMILIES = {
    "DeepSeek-V3": ("deepseek_v3", "deepseek"),
    "GLM-4.5": ("glm4_moe", "deepseek"),
    "MiMo": ("qwen2", "mimo"),  # its layers and its attention are Qwen2's
    "Qwen3-Next's names": ("qwen3_moe", "qwen"),
}


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mtp-families-")


@functools.cache
def shipped(family: str) -> Path:
    """A target with a random module in a file of its own directory; made once per process."""
    architecture, layout = FAMILIES[family]
    path = Path(_directory().name) / family
    if architecture == "glm4_moe":
        save_random(CONFIG_MAPPING[architecture](**GLM), path, 1)
    else:
        path.mkdir()
        for file in tiny(architecture).iterdir():
            (path / file.name).write_bytes(file.read_bytes())
    lm = loader.load(path, dtype="float32")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = MtpModule.fresh(lm, layout)
        torch.nn.init.normal_(module.eh_proj.weight, std=0.3)
        for weight in module.parameters():
            if weight.ndim == 1:
                weight.data += 0.2 * torch.randn(weight.shape)
    first = lm.num_layers if layout == "deepseek" else 0
    save_modules([module], path / "apart", layout, first)
    tensors = load_file(path / "apart" / "model.safetensors")
    save_file(tensors, path / "model-mtp.safetensors", metadata={"format": "pt"})
    return path


def machine(path: Path, **more: Any) -> Engine:
    lm = loader.load(path, dtype="float32")
    runner = ModelRunner(lm, KvStorage(lm.layer_shapes, 96, 4, lm.dtype))
    config = MTPDecodingConfig(max_draft_len=3, **more)
    drafters = [build_drafter_entry(config, Target(runner, 64), 8)]
    return Engine(runner, Limits(8, 64, 128), seed=0, drafters=drafters)


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_among_the_targets_own_tensors_are_found_and_read_as_they_were_trained(
    family: str,
) -> None:
    path = shipped(family)
    engine = machine(path)
    watch = Watch(engine)
    sequences = [engine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(engine)
    assert outputs(sequences) == greedy(path, PROMPTS, 10)
    [module] = load_modules(path, loader.load(path, dtype="float32"))
    module.model.set_attn_implementation("eager")
    assert len(watch.seen) > 20
    for tokens, draft, depth in watch.seen[::3]:
        assert draft == replayed(path, module, tokens, depth)
    expect_empty(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_tensor_of_a_module_is_named(family: str, tmp_path: Path) -> None:
    """As the scales of quantised weights would be."""
    path = shipped(family)
    tensors = load_file(path / "model-mtp.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight") or "q_a_proj" in name)
    extra = name + "_scale_inv"
    save_file({**tensors, extra: torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ModelError, match=rf"has unexpected {extra}"):
        load_modules(tmp_path, loader.load(path, dtype="float32"))
