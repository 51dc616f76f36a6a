"""Plain checkpoints that are read without transformers give what its modules do, bit by bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forethought.assets import MODELS, REWARD_MODELS, embedded_dir
from forethought.errors import ModelError
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.llm.tokenizer import Tokenizer
from forethought.model import loader
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM
from forethought.model.checkpoint_module import CheckpointConfig, CheckpointModule, open_checkpoint
from forethought.model.rotary import RotaryEmbedding
from models import save_random
from tokens import speaking

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}
TOKENS = list(range(5, 75))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the directory of a checkpoint, once."""
    made = dict[tuple[str, str], Path]()

    def of(name: str, dtype: str = "float32") -> Path:
        if (name, dtype) not in made:
            path = made[name, dtype] = tmp_path_factory.mktemp("checkpoint")
            save_random(CONFIGS[name], path, 1, getattr(torch, dtype))
            written = json.loads((path / "config.json").read_text())
            written.setdefault("tie_word_embeddings", CONFIGS[name].tie_word_embeddings)
            (path / "config.json").write_text(json.dumps(written))
        return made[name, dtype]

    return of


def logits_of(lm: CausalLM) -> torch.Tensor:
    storage = KvStorage(lm.layer_shapes, 8, 16, lm.dtype, lm.device)
    table = PageTable(PagePool(8, 16))
    table.append(len(TOKENS))
    rows = [Row(TOKENS, 0, table, logits_from=0)]
    return lm.forward(Batch.build(rows, lm.device), storage)


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool, **settings: Any) -> CausalLM:
    with monkeypatch.context() as patch:
        if not plain:
            patch.setattr(loader, "open_checkpoint", lambda *_, **__: None)
        return loader.load(path, forward="native", **settings)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4", "dtype": "bfloat16"},
    ],
)
def test_logits_and_traits_are_those_of_transformers_modules(
    name: str, settings: dict[str, Any], directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = "bfloat16" if settings.get("dtype") else "float32"
    here, there = (
        loaded(directory(name, stored), monkeypatch, plain, **settings) for plain in (True, False)
    )
    assert isinstance(here.config, CheckpointConfig)
    assert not isinstance(there.config, CheckpointConfig)
    assert torch.equal(logits_of(here), logits_of(there))
    for trait in ("layers", "vocab_size", "max_positions", "eos_token_ids", "dtype"):
        assert getattr(here.traits, trait) == getattr(there.traits, trait), trait
    sizes = [sorted(map(str, lm.traits.weights)) for lm in (here, there)]
    assert sizes[0] == sizes[1]
    assert (here.path, here.hidden_size, here.num_layers) == (
        there.path,
        there.hidden_size,
        there.num_layers,
    )
    ids = torch.tensor([[3, 4], [5, 6]])
    assert torch.equal(here.embed(ids), there.embed(ids))


def test_weights_in_several_files_are_found(
    directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = directory("llama")
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in {*weight_map.values()}:
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, tmp_path / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    here = loaded(tmp_path, monkeypatch, True)
    assert isinstance(here.config, CheckpointConfig)
    assert torch.equal(logits_of(here), logits_of(loaded(source, monkeypatch, True)))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma3_text"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope_parameters": None},
        {"rms_norm_eps": None},
        {"tie_word_embeddings": None},
        {"quantization_config": {"quant_method": "gptq"}},
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
        {"sliding_window": 8, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 10**8},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": [3, 3, 3]},
        {"num_attention_heads": 0},
        {"num_attention_heads": [0]},
        {"hidden_size": [32]},
        {"num_key_value_heads": [2, 2, 2]},
        {"head_dim": [8]},
        {"attention_bias": True},
        {"vocab_size": 127},
    ],
)
def test_what_is_not_plain_is_left_to_transformers(
    changes: dict[str, Any], directory: Any, tmp_path: Path
) -> None:
    shutil.copytree(directory("llama"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with suppress(ModelError):  # of the files themselves
        assert open_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 3, "head_dim": 8},
        {"num_attention_heads": 2, "num_key_value_heads": 4, "head_dim": 8},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 7},
    ],
)
def test_heads_that_cannot_be_shared_or_rotated_are_left_to_transformers(
    sizes: dict[str, int], directory: Any, tmp_path: Path
) -> None:
    shutil.copytree(directory("llama"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    tensors = load_file(tmp_path / "model.safetensors")
    size = {"q_proj": sizes["num_attention_heads"] * sizes["head_dim"]}
    size["k_proj"] = size["v_proj"] = sizes["num_key_value_heads"] * sizes["head_dim"]
    for name in tensors:
        part = name.split(".")[-2]
        if part in size:
            tensors[name] = torch.ones(size[part], 32)
        elif part == "o_proj":
            tensors[name] = torch.ones(32, size["q_proj"])
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path) is None


def test_no_weights_are_read_here_where_torch_computes_them(
    directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[CheckpointModule]()
    monkeypatch.setattr(CheckpointModule, "read", reads.append)
    lm = loader.load(directory("llama"), dtype="float16", forward="auto")
    assert (lm.dtype, lm.path.kind, reads) == (torch.float16, "fused", [])


def test_numbers_that_are_not_finite_are_refused(directory: Any, tmp_path: Path) -> None:
    shutil.copytree(directory("llama"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"NaN or infinite in model\.layers\.1\.mlp\.up_proj"):
        loader.load(tmp_path, forward="native")


@pytest.mark.parametrize("name", ["llama", "llama 3"])
def test_rotary_embeddings_are_those_of_transformers_to_the_last_bit(name: str) -> None:
    config = CONFIGS[name]
    like, positions = torch.empty(0), torch.arange(256)[None]
    found = RotaryEmbedding(config)(like, positions)
    for part, expected in zip(found, LlamaRotaryEmbedding(config)(like, positions), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_the_tokenizer_is_the_one_that_transformers_chooses(kind: str) -> None:
    embedded = [embedded_dir(name) for name in (*MODELS, *REWARD_MODELS, "drafter")]
    for path in (speaking(kind), *embedded):
        hf, expected = Tokenizer.load(path).hf, AutoTokenizer.from_pretrained(path)
        assert type(hf) is type(expected)
        assert hf.get_vocab() == expected.get_vocab()
        assert hf.chat_template == expected.chat_template
        for text in ("Sam has 110 nuts. <|end|>", " a  b\n\té ☃"):
            assert hf(text).input_ids == expected(text).input_ids


HEAVY = (
    *("transformers.modeling_utils", "transformers.models"),
    *("torch._dynamo", "torch.distributed.tensor", "scipy", "sympy", "matplotlib", "pandas"),
    *("forethought.backends.cuda.paged", "forethought.backends.cuda.chain_rounds"),
)
MAX_MODULES = 1690
"""Of a start; 1,585 when this was written, of which torch has 900, and 3,019 before."""


def test_a_start_imports_torch_and_little_else() -> None:
    code = (
        "import sys\n"
        "from forethought import LLM, SamplingParams\n"
        "params = SamplingParams(max_tokens=4, temperature=0.0)\n"
        "assert LLM().generate('Sam has 1', params).outputs[0].token_ids\n"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules))\n"
        "print(len(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, num_modules = run.stdout.split("\n")[:2]
    assert heavy == ""
    assert int(num_modules) < MAX_MODULES
