"""Checkpoints with quantised weights, written here as their formats say."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought.errors import ModelError
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model import auto_dtype, loader
from forethought.model.batch import Batch, Row
from forethought.model.llama.network import FusedNetwork
from forethought.model.quantized_checkpoint import AWQ_ORDER, StoredTensors, load_others
from forethought.training.backbone import LoraAdapters
from models import prompts, tiny

GROUP = 32


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    config = Qwen3Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        attention_bias=True,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    module.save_pretrained(path)
    return path


def integers(out, width, bits, seed):
    """Values [out, width], zero points and scales [out, groups]; scales are exact in 16 bits."""
    source = torch.Generator().manual_seed(seed)
    groups = width // GROUP
    values = torch.randint(0, 2**bits, (out, width), generator=source)
    zeros = torch.randint(1, 2**bits, (out, groups), generator=source)
    scales = torch.randint(1, 9, (out, groups), generator=source) / (64 * 2 ** (bits - 4))
    return values, zeros, scales


def exact(values, zeros, scales):
    """(q - z) s, [out, width]."""
    z = zeros.repeat_interleave(values.shape[1] // zeros.shape[1], 1)
    s = scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)
    return (values - z).float() * s


def word(values, bits):
    """The int32 whose lowest bits are the first value."""
    number = sum(value << bits * index for index, value in enumerate(values))
    return number - 2**32 if number >= 2**31 else number


def packed(values, bits, dim, order=None):
    """One int32 for 32 / bits values along ``dim``; order: the value in each place of an int32."""
    per, rows = 32 // bits, (values if dim == 1 else values.t()).tolist()
    order = order or range(per)
    words = [
        [
            word([row[start + place] for place in order if start + place < len(row)], bits)
            for start in range(0, len(row), per)
        ]
        for row in rows
    ]
    matrix = torch.tensor(words, dtype=torch.int32)
    return (matrix if dim == 1 else matrix.t()).contiguous()


def awq(name, out, width, seed):
    values, zeros, scales = integers(out, width, 4, seed)

    tensors = {
        "qweight": packed(values.t(), 4, 1, AWQ_ORDER),
        "qzeros": packed(zeros.t(), 4, 1, AWQ_ORDER),
        "scales": scales.t().half().contiguous(),
    }
    return tensors, exact(values, zeros, scales)


def gptq(bits, v2=False):
    def write(name, out, width, seed):
        values, zeros, scales = integers(out, width, bits, seed)
        tensors = {
            "qweight": packed(values, bits, 1).t().contiguous(),
            "qzeros": packed((zeros if v2 else zeros - 1).t(), bits, 1),
            "scales": scales.t().half().contiguous(),
            "g_idx": torch.arange(width, dtype=torch.int32) // GROUP,
        }
        return tensors, exact(values, zeros, scales)

    return write


def compressed(symmetric):
    def write(name, out, width, seed):
        values, zeros, scales = integers(out, width, 4, seed)
        zeros = torch.full_like(zeros, 8) if symmetric else zeros
        tensors = {
            "weight_packed": packed(values, 4, 1),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([out, width]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros, 4, 0)
        return tensors, exact(values, zeros, scales)

    return write


def channels(name, out, width, seed):
    values, _, scales = integers(out, width, 8, seed)
    values, scales = (values - 128).to(torch.int8), scales[:, :1]
    tensors = {"weight": values, "weight_scale": scales.bfloat16()}
    return tensors, values.float() * scales


def fp8_channels(name, out, width, seed):
    values, _, scales = integers(out, width, 4, seed)
    eight = ((values - 8) / 4).to(torch.float8_e4m3fn)
    tensors = {"weight": eight, "weight_scale": scales[:, :1].bfloat16()}
    return tensors, eight.float() * scales[:, :1]


def one_scale(name, out, width, seed):
    values, _, scales = integers(out, width, 8, seed)
    values, scale = (values - 128).to(torch.int8), scales[:1, 0]
    return {"weight": values, "weight_scale": scale.bfloat16()}, values.float() * scale


def fp8_blocks(rows, columns, scale):
    """Blocks of as many outputs and inputs, of which the last have fewer."""

    def write(name, out, width, seed):
        values, _, _ = integers(out, width, 4, seed)
        eight = ((values - 8) / 4).to(torch.float8_e4m3fn)
        shape = (-(-out // rows), -(-width // columns))
        grid = torch.arange(1, 1 + shape[0] * shape[1]).float().view(shape) / 64
        whole = grid.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :width]
        return {"weight": eight, scale: grid}, eight.float() * whole

    return write


def pack_quantized(**weights):
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FORMATS = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq(4)),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        gptq(4, v2=True),
    ),
    "gptq_8": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, gptq(8)),
    "compressed": (pack_quantized(**INT4, symmetric=True), compressed(True)),
    "compressed_zeros": (pack_quantized(**INT4, symmetric=False), compressed(False)),
    "compressed_int8": (
        pack_quantized(num_bits=8, type="int", strategy="channel", symmetric=True),
        channels,
    ),
    "compressed_fp8": (
        pack_quantized(num_bits=8, type="float", strategy="channel", symmetric=True),
        fp8_channels,
    ),
    "compressed_one_scale": (
        pack_quantized(num_bits=8, type="int", strategy="tensor", symmetric=True),
        one_scale,
    ),
    "compressed_static": (
        pack_quantized(**INT4, symmetric=True, actorder="static"),
        compressed(True),
    ),
    "compressed_fp8_blocks": (
        pack_quantized(num_bits=8, type="float", strategy="block", block_structure=[24, 20]),
        fp8_blocks(24, 20, "weight_scale"),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        fp8_blocks(32, 32, "weight_scale_inv"),
    ),
    "fp8_odd": (
        {"quant_method": "fp8", "weight_block_size": [24, 20]},
        fp8_blocks(24, 20, "weight_scale_inv"),
    ),
}


def write(plain, path, form, shards=1):
    """A checkpoint of the format, and the same model with its weights in float32."""
    settings, make = FORMATS[form]
    tensors, weights = load_file(plain / "model.safetensors"), {}
    stored = dict(tensors)
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        if tensor.dim() == 2 and "proj" in name:
            layer = name.removesuffix(".weight")
            del stored[name]
            parts, weights[name] = make(layer, *tensor.shape, seed)
            stored |= {f"{layer}.{part}": value for part, value in parts.items()}
    path.mkdir()
    names = sorted(stored)
    for shard in range(shards):
        some = {name: stored[name] for name in names[shard::shards]}
        save_file(some, path / f"model-{shard}.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    reference = path / "reference"
    reference.mkdir()
    save_file({**tensors, **weights}, reference / "model.safetensors", metadata={"format": "pt"})
    (reference / "config.json").write_text(json.dumps(config))
    return reference


PROMPT = [5, 17, 3, 44]


def logits(lm):
    """Of the token after ``PROMPT``, in float32."""
    table = PageTable(PagePool(4, 4))
    table.append(len(PROMPT))
    row = Row(PROMPT, 0, table, logits_from=len(PROMPT) - 1)
    return lm.forward(Batch.build([row]), KvStorage(lm.layer_shapes, 4, 4, lm.dtype))[0]


def generated(lm):
    engine = engine_over(lm)
    sequences = [engine.add(prompt, GREEDY)[0] for prompt in prompts()]
    drain(engine)
    expect_empty(engine)
    return outputs(sequences)


@pytest.mark.parametrize("form", FORMATS)
def test_a_quantised_checkpoint_generates_what_its_weights_in_float32_do(plain, form, tmp_path):
    reference = write(plain, tmp_path / "q", form, shards=2)
    lm = loader.load(tmp_path / "q", dtype="float32")
    assert isinstance(lm.network, FusedNetwork)
    assert generated(lm) == generated(loader.load(reference, dtype="float32"))


def test_it_runs_unfused_as_well(plain, tmp_path):
    reference = write(plain, tmp_path / "q", "awq")
    lm = loader.load(tmp_path / "q", dtype="float32", fuse=False)
    assert generated(lm) == generated(loader.load(reference, dtype="float32"))


def groups(**weights):
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def edited(path, **settings):
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= settings
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("form", "settings", "why"),
    [
        ("gptq", {"bits": 3}, "bits=3"),
        ("awq", {"version": "gemv"}, "version=gemv"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format=marlin"),
        ("gptq", {"is_marlin_format": True}, "checkpoint_format=marlin"),
        ("compressed", {"config_groups": {}}, "0 groups"),
        ("compressed", {"format": "nvfp4-pack-quantized"}, "format=nvfp4-pack-quantized"),
        ("compressed", groups(num_bits=4, type="float"), "float of 4 bits"),
        ("compressed", groups(**INT4, actorder="group"), "actorder=group"),
    ],
)
def test_a_variant_that_is_not_read_is_refused_by_name(plain, tmp_path, form, settings, why):
    write(plain, tmp_path / "q", form)
    edited(tmp_path / "q", **settings)
    with pytest.raises(ModelError, match=why):
        loader.load(tmp_path / "q")


def changed(path, change):
    file = path / "model-0.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop(f"{Q}.scales"), f"lacks {Q}.scales"),
        (lambda t: t.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda t: t.update({"model.more": torch.ones(1)}), "no place for model.more"),
        (lambda t: t.update({f"{Q}.g_idx": torch.ones(32, dtype=torch.int32)}), "desc_act"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight is"),
        (lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].to(torch.uint8)}), "torch.uint8"),
        (lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:2]}), "its weight is"),
    ],
)
def test_a_broken_checkpoint_is_refused_with_the_name_of_the_tensor(plain, tmp_path, change, why):
    write(plain, tmp_path / "q", "gptq")
    changed(tmp_path / "q", change)
    with pytest.raises(ModelError, match=why):
        loader.load(tmp_path / "q")


def test_a_refusal_says_what_else_to_give(plain, tmp_path):
    write(plain, tmp_path / "q", "gptq")
    edited(tmp_path / "q", bits=3)
    with pytest.raises(ModelError) as caught:
        loader.load(tmp_path / "q")
    assert "AWQ gemm" in caught.value.fix
    assert "quantised model" in caught.value.what


def test_experts_are_refused_by_the_name_of_their_weights(tmp_path):
    model = tiny("qwen3_moe")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = FORMATS["awq"][0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(model / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="experts"):
        loader.load(tmp_path)


def test_one_scale_for_a_whole_weight_runs_in_the_kernel(plain, tmp_path):
    reference = write(plain, tmp_path / "q", "compressed_one_scale")
    found = loader.load(tmp_path / "q", dtype="bfloat16")
    expected = loader.load(reference, dtype="float32")
    assert logits(found).isfinite().all()
    assert (logits(found) - logits(expected)).norm() < 0.1 * logits(expected).norm()


def test_the_ends_of_sequences_are_those_of_the_generation_config(plain, tmp_path):
    write(plain, tmp_path / "q", "awq")
    (tmp_path / "q" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert loader.load(tmp_path / "q").eos_token_ids == {7, 9}


@pytest.mark.parametrize("form", ["gptq", "gptq_8"])
@pytest.mark.parametrize("bias", [0.0, 1.5])
def test_a_bias_that_the_architecture_lacks_is_added_unless_it_is_zero(plain, tmp_path, form, bias):
    gate = "model.layers.0.mlp.gate_proj"
    reference = write(plain, tmp_path / "q", form)
    before = logits(loader.load(tmp_path / "q", dtype="float32"))
    changed(tmp_path / "q", lambda t: t.update({f"{gate}.bias": torch.full((64,), bias)}))
    after = logits(loader.load(tmp_path / "q", dtype="float32"))
    assert torch.allclose(before, after, atol=1e-4) == (bias == 0.0)
    if bias:
        module = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
        layer = module.get_submodule(gate)
        layer.bias = torch.nn.Parameter(torch.full((64,), bias))
        assert torch.allclose(after, module(torch.tensor([PROMPT])).logits[0, -1], atol=1e-3)


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_a_tied_model_may_store_its_output_projection_as_well(plain, tmp_path, change):
    write(plain, tmp_path / "q", "awq")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    embedding = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding + change
    changed(tmp_path / "q", lambda t: t.update({"lm_head.weight": head}))
    found = loader.load(tmp_path / "q", dtype="float32", fuse=False).network.module
    assert torch.equal(found.lm_head.weight, head)
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == (change == 0.0)
    changed(tmp_path / "q", lambda t: t.pop("lm_head.weight"))
    found = loader.load(tmp_path / "q", dtype="float32", fuse=False).network.module
    assert found.lm_head.weight is found.model.embed_tokens.weight


def test_a_quantised_output_projection_is_not_tied(plain, tmp_path):
    write(plain, tmp_path / "q", "awq")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config |= {"tie_word_embeddings": True, "vocab_size": 96}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    parts, exactly = awq("lm_head", 96, 32, 5)

    def quantise_head(tensors):
        del tensors["lm_head.weight"]
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:96].clone()
        tensors.update({f"lm_head.{part}": value for part, value in parts.items()})

    changed(tmp_path / "q", quantise_head)
    found = loader.load(tmp_path / "q", dtype="float32").network.head
    assert torch.allclose(found(torch.eye(32)).t(), exactly, atol=1e-5)


def test_persistent_buffers_are_read_in_their_own_dtype(plain, tmp_path):
    class WithBuffer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(3))
            self.weight = torch.nn.Parameter(torch.zeros(2))

        def get_output_embeddings(self):
            return None

        get_input_embeddings = get_output_embeddings

    save_file({"scale": torch.full((3,), 0.1), "weight": torch.ones(2)}, tmp_path / "a.safetensors")
    module = WithBuffer()
    load_others(module, StoredTensors(tmp_path), torch.bfloat16)
    assert torch.equal(module.scale, torch.full((3,), 0.1))
    assert module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("awq", torch.bfloat16),
        ("compressed_int8", torch.bfloat16),
        ("compressed_fp8", torch.float32),
        ("fp8", torch.float32),
        ("gptq_8", torch.float32),
    ],
)
def test_weights_that_are_dequantised_take_the_dtype_of_ordinary_ones(
    plain, tmp_path, form, dtype, monkeypatch
):
    write(plain, tmp_path / "q", form)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    monkeypatch.setattr(auto_dtype, "has_fast_matmul", lambda dtype, device: False)
    monkeypatch.setattr(auto_dtype, "free_host_memory", lambda: 2**40)
    assert loader.load(tmp_path / "q").dtype == dtype
    monkeypatch.setattr(auto_dtype, "free_host_memory", lambda: 1)
    assert loader.load(tmp_path / "q").dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_adapters_on_quantised_weights_are_refused(plain, tmp_path, form):
    write(plain, tmp_path / "q", form)
    lm = loader.load(tmp_path / "q", dtype="float32", fuse=False)
    with pytest.raises(ModelError, match="quantised"):
        LoraAdapters(lm.network.module, 2, 4.0)


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_quantising_a_quantised_checkpoint_again_is_refused(plain, tmp_path, form):
    write(plain, tmp_path / "q", form)
    with pytest.raises(ModelError, match="already"):
        loader.load(tmp_path / "q", quantization="int8")
