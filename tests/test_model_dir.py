"""A model is a local directory or a Hub id, and what is neither is refused with the cause."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hub_server
import reward_models
from forethought import assets
from forethought.assets import drafter_dir, heads_dir, reasoner_dir
from forethought.config.drafters import NGramDecodingConfig
from forethought.config.engine import LlmArgs
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.errors import ModelError, ParameterError
from forethought.model_dir import check_model_dir, find_model_dir
from forethought.speculative.heads.checkpoint import Checkpoint
from hub_server import HubServer, cached, files_of
from models import tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)

NEEDED: dict[str, bytes] = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
}
DUPLICATES = dict.fromkeys(
    (
        *("pytorch_model.bin", "medusa_lm_head.pt", "consolidated.safetensors", "model.gguf"),
        *("consolidated.00.pth", "original/model.safetensors", "onnx/model.onnx", "optimizer.pt"),
        *("README.md", "modeling.py"),
    ),
    b"duplicate",
)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server.serving() as server:
        server.repositories["org/model"] = {"main": {**NEEDED, **DUPLICATES}}
        yield server


def find(environment: dict[str, str], *arguments: object, cwd: Path | None = None) -> str:
    """What a process of its own prints: the directory, or the error."""
    program = (
        "import sys, ast\n"
        "from forethought.errors import UsageError\n"
        "from forethought.model_dir import find_model_dir\n"
        "name, more = ast.literal_eval(sys.argv[1])\n"
        "try: print(find_model_dir(name, **more))\n"
        "except UsageError as error: print(error)"
    )
    name, more = arguments[0], arguments[1] if len(arguments) > 1 else {}
    done = subprocess.run(
        [sys.executable, "-c", program, repr((name, more))],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, done.stdout
    return done.stdout.strip()


def test_a_hub_id_brings_the_files_that_are_needed_and_no_duplicates(
    hub: HubServer, tmp_path: Path
) -> None:
    online = hub.environment(tmp_path)
    directory = Path(find(online, "org/model"))
    assert files_of(directory) == NEEDED
    assert sorted(hub.fetched) == sorted(NEEDED)
    assert find(hub.environment(tmp_path, HF_HUB_OFFLINE="1"), "org/model") == str(directory)
    assert find(hub.environment(tmp_path, HF_ENDPOINT=unreachable()), "org/model") == str(directory)
    assert sorted(hub.fetched) == sorted(NEEDED)


def test_other_formats_code_and_tokenizers_alone_are_fetched_where_they_are_wanted(
    hub: HubServer, tmp_path: Path
) -> None:
    old = {name: data for name, data in NEEDED.items() if name != "model.safetensors"}
    hub.repositories["org/old"] = {"main": {**old, **DUPLICATES}}
    environment = hub.environment(tmp_path)
    weights = {name: DUPLICATES[name] for name in ("pytorch_model.bin", "medusa_lm_head.pt")}
    assert files_of(Path(find(environment, "org/old"))) == {**old, **weights}
    found = find(environment, "org/model", {"weights": False, "code": True})
    assert files_of(Path(found)) == {**old, "modeling.py": b"duplicate"}


def test_a_revision_is_fetched_by_name_and_an_unknown_one_refused(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.repositories["org/model"]["v1"] = {**NEEDED, "model.safetensors": b"older"}
    environment = hub.environment(tmp_path)
    older = Path(find(environment, "org/model", {"revision": "v1"}))
    assert (older / "model.safetensors").read_bytes() == b"older"
    assert "has no revision 'v2'" in find(environment, "org/model", {"revision": "v2"})


def test_an_existing_directory_wins_over_the_hub_and_has_no_revisions(
    hub: HubServer, tmp_path: Path
) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    environment = hub.environment(tmp_path)
    assert find(environment, "org/model", cwd=tmp_path) == "org/model"
    assert not hub.fetched
    with pytest.raises(ParameterError, match="is on this machine"):
        find_model_dir(tmp_path, "v1")


@pytest.mark.parametrize("name", [*assets.names(), "forethought/drafter", "forethought/medusa"])
def test_an_embedded_model_is_found_by_name_without_the_hub(
    name: str, hub: HubServer, tmp_path: Path
) -> None:
    assert find(hub.environment(tmp_path), name) == str(assets.embedded_dir(name))
    assert not hub.fetched
    with pytest.raises(ParameterError, match="is on this machine"):
        find_model_dir(name, "v1")


def test_an_unknown_embedded_name_is_refused_and_never_looked_for_on_the_hub(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.repositories["forethought/countdwon"] = hub.repositories["org/model"]
    said = find(hub.environment(tmp_path), "forethought/countdwon")
    assert "unknown embedded model 'forethought/countdwon'" in said
    assert "did you mean 'forethought/countdown'?" in said
    assert not hub.fetched


def test_a_private_model_needs_the_token_of_the_environment(hub: HubServer, tmp_path: Path) -> None:
    hub.private.add("org/model")
    hub.token = "hf_of_the_test"
    said = find(hub.environment(tmp_path), "org/model")
    assert "cannot get the model org/model" in said
    assert "HF_TOKEN" in said
    environment = hub.environment(tmp_path, HF_TOKEN=hub.token)
    assert files_of(Path(find(environment, "org/model"))) == NEEDED


def unreachable() -> str:
    """An address at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_without_a_network_it_is_one_line_with_the_cause(hub: HubServer, tmp_path: Path) -> None:
    nowhere = unreachable()
    said = find(hub.environment(tmp_path, HF_ENDPOINT=nowhere), "org/model")
    assert said.startswith("cannot get the model org/model: there is no such directory")
    assert f"the Hugging Face Hub at {nowhere} cannot be reached" in said
    assert "HF_HUB_OFFLINE" in find(hub.environment(tmp_path, HF_HUB_OFFLINE="1"), "org/model")
    assert "no such model on the Hugging Face Hub" in find(hub.environment(tmp_path), "org/other")


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_what_the_hub_answers_is_the_cause_that_is_told(
    hub: HubServer, tmp_path: Path, status: int
) -> None:
    hub.failing = status
    said = find(hub.environment(tmp_path), "org/model")
    assert f"HTTP {status}" in said
    assert "cannot be reached" not in said
    assert ("HF_TOKEN" in said) == (status in (401, 403))


def test_a_repository_of_gguf_files_and_one_of_an_adapter_are_called_that(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.repositories["org/gguf"] = {"main": {"model.Q4_K_M.gguf": b"GGUF", "README.md": b"#"}}
    said = find(hub.environment(tmp_path), "org/gguf")
    assert "org/gguf" in said
    assert "GGUF" in said
    adapter = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": b"w"}
    hub.repositories["org/lora"] = {"main": adapter}
    with pytest.raises(ModelError, match="an adapter"):
        check_model_dir(Path(find(hub.environment(tmp_path), "org/lora")))


@pytest.mark.parametrize(("kind", "folder"), [("model", "model"), ("draft model", "drafter")])
def test_the_folder_of_a_training_run_is_refused_with_the_one_inside_it(
    tmp_path: Path, kind: str, folder: str
) -> None:
    with pytest.raises(ModelError, match="Check that the directory is complete"):
        check_model_dir(tmp_path, kind)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"Give {tmp_path / folder}"):
        check_model_dir(tmp_path, kind)


@pytest.mark.parametrize("name", ["/nowhere", "a/b/c", "../model", "model name"])
def test_what_can_be_no_hub_id_is_refused_without_asking(name: str) -> None:
    with pytest.raises(ModelError, match="there is no such directory"):
        find_model_dir(name)


def test_a_gguf_file_that_is_not_there_is_no_name_of_the_hub() -> None:
    with pytest.raises(ModelError, match=r"no model at models/x\.gguf: there is no such file"):
        find_model_dir("models/x.gguf")


@pytest.mark.parametrize(
    ("name", "meant"), [("smolm2", "smollm2"), ("countdwn", "forethought/countdown")]
)
def test_a_misspelt_model_of_a_package_is_named(
    hub: HubServer, tmp_path: Path, name: str, meant: str
) -> None:
    assert f"Give {meant}, if you mean that" in find(hub.environment(tmp_path), name)
    assert "if you mean that" not in find(hub.environment(tmp_path), "org/other")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, which the suite may not ask."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_an_engine_and_its_drafters_come_from_the_cache(cache: Path) -> None:
    from forethought.llm.llm import LLM

    target = cached(cache, "org/reasoner", reasoner_dir())
    cached(cache, "org/drafter", drafter_dir())
    heads = cached(cache, "org/medusa", heads_dir("medusa"))
    draft = {
        "decoding_type": "Draft_Target",
        "max_draft_len": 2,
        "speculative_model": "org/drafter",
    }
    medusa = {"decoding_type": "Medusa", "speculative_model_dir": "org/medusa"}
    with LLM("org/reasoner", dtype="float32", speculative_config=[draft, medusa]) as llm:
        assert llm.model_dir == target
        drafted = llm.generate("Tom has 3 pens.", GREEDY)
    with LLM(dtype="float32") as llm:
        plain = llm.generate("Tom has 3 pens.", GREEDY)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.outputs[0].metrics.drafted > 0
    by_id = MedusaDecodingConfig.from_dict(medusa)
    assert by_id.medusa_choices == MedusaDecodingConfig(speculative_model=heads).medusa_choices
    assert by_id.with_local_model().speculative_model == heads


def test_a_tokenizer_a_reward_model_and_a_target_come_from_the_cache(
    cache: Path, tmp_path: Path
) -> None:
    from transformers import Qwen2ForSequenceClassification

    from forethought.llm.llm import LLM
    from forethought.training.run import TargetModel, TrainingRun
    from forethought.workers.reward import RewardWorker

    cached(cache, "org/reasoner", reasoner_dir())
    judge = reward_models.save(tmp_path / "judge", Qwen2ForSequenceClassification, num_labels=1)
    cached(cache, "org/judge", judge)
    LLM(tokenizer="org/reasoner", dtype="float32").shutdown()
    RewardWorker("org/judge").shutdown()
    run = TrainingRun("medusa", {}, tmp_path / "out", TargetModel("org/reasoner"))
    assert run.teacher.directory == find_model_dir("org/reasoner")


def test_a_missing_draft_model_is_told_before_the_target_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from forethought.llm.llm import LLM
    from forethought.model import loader

    monkeypatch.setattr(loader, "load", lambda *_, **__: pytest.fail("the target was loaded"))
    config = {"decoding_type": "Pearl", "max_draft_len": 2, "speculative_model": "/nowhere/at/all"}
    with pytest.raises(ModelError, match="/nowhere/at/all"):
        LLM(speculative_config=config)


def test_revisions_belong_to_models() -> None:
    with pytest.raises(ParameterError, match="is on this machine"):
        find_model_dir(reasoner_dir(), "main")
    with pytest.raises(ParameterError, match="there is no speculative_model"):
        NGramDecodingConfig(revision="main")
    assert LlmArgs(model="org/model", revision="main").revision == "main"


def broken(tmp_path: Path, **files: str) -> Path:
    """A directory like a model's, with other files beside or instead."""
    directory = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    directory = broken(tmp_path, **{"model.safetensors": text})
    for refuse in (check_model_dir, Checkpoint.read):
        with pytest.raises(
            ModelError, match=r"model\.safetensors is a pointer of Git LFS.*lfs pull"
        ):
            refuse(directory)


def test_an_adapter_is_called_one_with_the_model_that_it_belongs_to(tmp_path: Path) -> None:
    directory = tmp_path / "lora"
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"an adapter \(LORA\).*Give org/base as the model"):
        check_model_dir(directory)


def test_gguf_is_called_by_its_name_as_a_file_and_in_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path):
        with pytest.raises(ModelError, match="GGUF"):
            check_model_dir(find_model_dir(path))


def test_the_command_line_generates_with_a_model_and_a_drafter_of_the_hub(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.repositories["org/reasoner"] = {"v1": files_of(reasoner_dir())}
    hub.repositories["org/drafter"] = {"main": files_of(drafter_dir())}
    options = ["--model", "org/reasoner", "--revision", "v1", "--draft-model", "org/drafter"]
    options += ["--speculative", "draft_target", "--max-draft-len", "4"]
    options += ["--dtype", "float32", "--max-tokens", "12"]
    done = subprocess.run(
        [sys.executable, "-m", "forethought", "generate", "2 pens", *options, "--json"],
        env=hub.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["model"] == "org/reasoner"
    assert report["metrics"]["drafted"] > 0
