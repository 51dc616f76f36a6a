"""A directory loads as transformers would load it, or is refused with what, why and what to do."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    MambaConfig,
    RecurrentGemmaConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

import models
from forethought.backends.cpu.library import find_compiler
from forethought.errors import ModelError, ParameterError, UnknownNameError
from forethought.kv.storage import LayerShape
from forethought.model.attention import interface
from forethought.model.attention.base import Capability
from forethought.model.attention.sdpa import SdpaAttention
from forethought.model.loader import load
from forethought.transformers_loading import without_progress_bars
from turns import by_turns

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory of its own, to be broken."""
    return Path(shutil.copytree(models.tiny("llama"), tmp_path / "llama"))


def test_loading_shows_no_bars_and_leaves_the_users_settings_as_they_were(
    llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def count(factory: Any, args: Any, kwargs: Any) -> Any:
        seen.append(kwargs.get("desc"))
        return factory(*args, **kwargs)

    before = transformers_logging.set_tqdm_hook(count)
    try:
        load(llama)
        assert (seen, capfd.readouterr().err) == ([], "")
        AutoModelForCausalLM.from_pretrained(llama)
        assert seen == ["Loading weights"]
        assert "Loading weights" in capfd.readouterr().err
    finally:
        transformers_logging.set_tqdm_hook(before)


def test_a_load_in_one_thread_hides_no_bars_of_another() -> None:
    shown: list[Any] = []

    def show() -> None:
        shown.append(transformers_logging.tqdm([1], file=io.StringIO()).disable)

    with without_progress_bars():
        show()
        other = threading.Thread(target=show)
        other.start()
        other.join()
    show()
    assert shown == [True, False, False]


def test_models_that_two_threads_load_are_made_one_after_the_other(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else transformers' replacement of ``tie_weights`` would stay when both are loaded."""
    together = threading.Barrier(2)
    made: list[bool] = []
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def meet(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.5)
        made.append(together.broken)
        return from_pretrained(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", meet)
    threads = [threading.Thread(target=load, args=(llama,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [True, True], "they met while they made a module"


def refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(path)
    error = caught.value
    assert error.what
    assert error.why
    assert error.fix
    assert str(path) in error.what
    assert "\n" not in str(error)
    return error


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_traits_of_a_model_come_from_the_model() -> None:
    lm = load(models.tiny("deepseek_v3"))
    assert lm.layer_shapes == [LayerShape(4, 12, 6)] * 3
    assert (lm.vocab_size, lm.max_positions) == (models.VOCAB, 256)
    assert lm.eos_token_ids == {2}
    assert (lm.dtype, lm.device.type) == (torch.float32, "cpu")


def test_windows_softcaps_and_sinks_are_found_per_layer() -> None:
    def traits(architecture: str) -> list[tuple[int | None, bool, bool]]:
        layers = load(models.tiny(architecture)).traits.layers
        return [(layer.window, layer.softcap, layer.sinks) for layer in layers]

    assert traits("llama") == [(None, False, False)] * 3
    assert traits("mistral") == [(6, False, False)] * 3
    assert traits("gemma2") == [(6, True, False), (None, True, False), (6, True, False)]
    assert traits("llama4") == [(-6, False, False), (-6, False, False), (None, False, False)]
    assert traits("gpt_oss") == [(6, False, True), (None, False, True), (6, False, True)]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_dtype_asked_for_is_the_dtype_of_the_model(name: str) -> None:
    assert load(models.tiny("llama"), dtype=name).dtype == getattr(torch, name)


def test_auto_dtype_is_that_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = models.transformers_model(models.tiny("llama"))
    models.save_random(module.config, tmp_path / "half", dtype=torch.bfloat16)
    monkeypatch.setattr("forethought.model.auto_dtype.has_fast_matmul", lambda *_: True)
    assert load(tmp_path / "half").dtype == torch.bfloat16


def test_sharded_checkpoints_load(tmp_path: Path) -> None:
    whole = models.transformers_model(models.tiny("llama"))
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert load(tmp_path / "sharded").vocab_size == models.VOCAB


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("forward", "quantization", "architecture"),
    by_turns(["native", "torch"], [None, "int8"], ["llama", "llama_tied_biased"]),
)
def test_a_loaded_model_no_longer_maps_the_file_of_its_weights(
    tmp_path: Path, architecture: str, quantization: Any, forward: Any
) -> None:
    if forward == "native" and find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    path = Path(shutil.copytree(models.tiny(architecture), tmp_path / architecture))
    lm = load(path, dtype="float32", quantization=quantization, forward=forward)
    gc.collect()
    assert lm.path.kind == ("native" if forward == "native" else "fused")
    assert str(path) not in Path("/proc/self/maps").read_text(errors="replace")


def test_all_end_of_sequence_ids_of_the_generation_config_count(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(llama).eos_token_ids == {7, 9}


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nowhere").why


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path).why


def test_a_config_that_is_not_json_is_refused(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    assert "config.json" in refusal(llama).why


def test_an_unknown_model_type_is_refused(llama: Path) -> None:
    edit_config(llama, model_type="no-such-model")
    assert "no-such-model" in refusal(llama).why


def test_code_in_the_directory_needs_trust_remote_code(llama: Path) -> None:
    edit_config(llama, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    assert "has no model_type 'own'" in refusal(llama).why
    assert "trust_remote_code=True" in refusal(llama).fix


@pytest.mark.parametrize("method", ["quanto", "aqlm", "bitsandbytes", "hqq"])
def test_quantised_weights_that_cannot_be_loaded_here_are_called_that(
    llama: Path, method: str
) -> None:
    more = {"load_in_4bit": True} if method == "bitsandbytes" else {"bits": 4}
    edit_config(llama, quantization_config={"quant_method": method, **more})
    error = refusal(llama)
    assert f"quantised by {method}" in error.why
    assert "16 or 32 bits" in error.fix


def test_quantised_weights_that_would_be_read_as_they_stand_are_refused(llama: Path) -> None:
    weights = llama / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight_scale"
    save_file({**load_file(weights), name: torch.ones(1)}, weights, metadata={"format": "pt"})
    assert "is quantised" in refusal(llama).what
    assert name in refusal(llama).why
    edit_config(llama, quantization_config={"quant_method": "modelopt"})
    assert "quantised by modelopt" in refusal(llama).what


def test_a_pointer_of_git_lfs_an_adapter_and_gguf_are_called_by_their_names(
    llama: Path, tmp_path: Path
) -> None:
    (llama / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS" in refusal(llama).why
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "adapter (LORA)" in refusal(adapter).why
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert "GGUF" in refusal(file).why


def test_a_directory_without_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert "weights" in refusal(llama).why


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    assert "encoder-decoder" in refusal(tmp_path / "t5").why


def test_recurrent_state_that_no_cache_holds_is_refused_by_name(tmp_path: Path) -> None:
    config = RecurrentGemmaConfig(**SMALL, lru_width=32, attention_window_size=16)
    models.save_random(config, tmp_path / "model")
    error = refusal(tmp_path / "model")
    assert "RecurrentGemma" in error.why
    assert "recurrent state" in error.why


def test_a_model_without_any_attention_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)
    models.save_random(config, tmp_path / "model")
    assert "Mamba" in refusal(tmp_path / "model").why


def test_a_mask_that_is_neither_causal_nor_of_windows_or_chunks_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    models.save_random(config, tmp_path / "both-ways")
    assert "mask" in refusal(tmp_path / "both-ways").why


def test_a_window_is_found_at_any_width() -> None:
    def found(sees: Any, last: int = 257) -> int:
        return interface._window_of(lambda at, keys: (keys <= at) & sees(at, keys), last)

    for width in (1, 2, 3, 16, 129, 256, 257):
        assert found(lambda at, keys, w=width: at - keys < w) == width
        chunks = -width if width > 1 else 1  # of one position they are windows, too
        assert found(lambda at, keys, w=width: at // w == keys // w) == chunks
    assert found(lambda at, keys: at - keys < 258) == found(lambda at, keys: keys >= 0) == 0
    for strange in (
        lambda at, keys: at - keys != 3,
        lambda at, keys: (at - keys < 9) | (keys == 0),
        lambda at, keys: (at + 1) // 9 == (keys + 1) // 9,
        lambda at, keys: at - keys < (9 if at < 100 else 5),
    ):
        assert found(strange) == interface._UNSUPPORTED


def test_a_model_that_does_not_call_the_registered_attention_is_refused(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)
    models.save_random(config, tmp_path / "bloom")
    refusal(tmp_path / "bloom")


@pytest.mark.parametrize("model_type", ["falcon", "stablelm"])
def test_attention_that_the_probe_does_not_reach_is_refused_with_the_reason(
    model_type: str, tmp_path: Path
) -> None:
    settings = {name: value for name, value in SMALL.items() if name != "head_dim"}
    models.save_random(CONFIG_MAPPING[model_type](**settings), tmp_path / "model")
    assert "attention interface" in refusal(tmp_path / "model").why


def test_a_model_that_counts_positions_by_itself_is_refused(tmp_path: Path) -> None:
    config = BartConfig(vocab_size=64, d_model=16, decoder_layers=1, decoder_attention_heads=2)
    models.save_random(config, tmp_path / "bart")
    assert "position_ids" in refusal(tmp_path / "bart").why


def test_a_backend_that_lacks_what_the_model_needs_is_refused_at_load() -> None:
    class Plain(SdpaAttention):
        name = "plain"
        capabilities = frozenset({Capability.GROUPED_QUERIES, Capability.SLIDING_WINDOW})

    assert load(models.tiny("mistral"), attention=Plain()).backend.name == "plain"
    with pytest.raises(ModelError, match="softcap, which the attention backend 'plain' lacks"):
        load(models.tiny("gemma2"), attention=Plain())


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownNameError, match="sdpa"):
        load(models.tiny("llama"), attention="spda")


def test_an_unknown_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(ParameterError, match="bfloat16"):
        load(models.tiny("llama"), dtype="bf61")


def test_longrope_ends_where_the_frequencies_would_depend_on_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = models.transformers_model(models.tiny("phi3")).config
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    changed = type(config)(
        **{
            **config.to_dict(),
            "rope_parameters": rope,
            "original_max_position_embeddings": 32,
        }
    )
    models.save_random(changed, tmp_path / "long")
    with caplog.at_level(logging.WARNING, "forethought"):
        assert load(tmp_path / "long").max_positions == 32
    assert "32 of 256" in caplog.text
