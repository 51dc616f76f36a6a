"""``forethought train``: from prompts to a drafter that the printed command generates with."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forethought.assets import problems, reasoner_dir
from forethought.cli.main import main
from forethought.training import run, teacher

SIZES = {
    "draft-model": "hidden_size: 24, intermediate_size: 32, num_layers: 1",
    "eagle3": "ttt_length: 2, intermediate_size: 32",
    "mtp": "depths: 2",
    "redrafter": "draft_len: 2, blocks: 1, exit_dim: 64",
}
QUICK = "batch_tokens: 512, max_tokens: 24, temperatures: [0.0]"


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """A dozen prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text("".join(problem["question"] + "\n" for problem in problems()[:12]))
    return path


def options(asked: Path, out: Path, settings: str, *more: str) -> list[str]:
    config = asked.with_name("config.yaml")
    config.write_text(f"{{{settings}, {QUICK}}}")
    given = ["--self-distill", str(asked), "--out", str(out), "--config", str(config)]
    return [*given, "--held-out", "2", "--dtype", "float32", *more]


@pytest.mark.parametrize("kind", SIZES)
def test_the_command_that_is_printed_at_the_end_generates_with_the_drafter(
    kind: str, asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["train", kind, *options(asked, tmp_path / "out", SIZES[kind], "--steps", "3")]) == 0
    )
    *_, cost, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"cost: 3 steps in \d+ s, texts in \d+ s; \d+ s of .* in this run", cost)
    command = shlex.split(last)
    assert command[0] == "forethought"
    asks = ["--json", "--max-tokens", "12", "--dtype", "float32"]
    assert main([*command[1:], *asks, "--max-draft-len", "2"]) == 0  # whether it pays or not
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["metrics"]["drafted"] > 0
    assert main(["generate", "...", *asks]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == drafted["text"]


TERMINATED = """
import signal, sys
from forethought.cli.main import main
from forethought.training.trainer import Trainer

learn = Trainer._learn

def terminated(trainer):
    if trainer.step == 3:
        signal.raise_signal(signal.SIGTERM)
    return learn(trainer)

Trainer._learn = terminated
sys.exit(main(sys.argv[1:]))
"""
"""The program, which is terminated at its fourth step."""


def test_a_run_that_is_terminated_has_saved_and_goes_on_where_it_was(
    asked: Path, tmp_path: Path
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    given = options(asked, out, "num_heads: 1, log_every: 1, check_every: 1000", "--steps", "24")
    ended = subprocess.run(
        [sys.executable, "-c", TERMINATED, "train", "medusa", *given],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGTERM
    assert "saved; the same command goes on" in ended.stderr.splitlines()[-1]
    assert 3 <= torch.load(out / "checkpoint.pt")["step"] < 24
    whole.mkdir()
    shutil.copyfile(out / "texts.jsonl", whole / "texts.jsonl")
    for folder in (out, whole):
        assert main(["train", "medusa", *given, "--out", str(folder)]) == 0
    resumed, expected = (
        load_file(folder / "drafter" / "medusa_lm_head.safetensors") for folder in (out, whole)
    )
    for name, weight in expected.items():
        assert torch.equal(resumed[name], weight), name


def test_a_terminal_sees_tokens_per_second_the_time_left_and_the_acceptance(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    given = options(asked, tmp_path / "out", "num_heads: 1, check_every: 2", "--steps", "4")
    assert main(["train", "medusa", *given]) == 0
    shown = capsys.readouterr().err
    assert re.search(r"12/12 \[.*answers/s", shown)
    assert re.search(
        r"4/4 \[.*<.*, loss \d+\.\d+, [\d,]+ tokens/s, acceptance length \d\.\d\d", shown
    )


def test_a_model_trains_its_drafter_on_prompts_and_answers_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(teacher: Any, count: int, path: Path, *_: Any) -> None:
        questions = [problem["question"] for problem in problems()[: count + 3]]
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))

    monkeypatch.setattr(run, "write_prompts", write)
    out, config = tmp_path / "out", tmp_path / "config.yaml"
    config.write_text(f"{{num_heads: 1, {QUICK}}}")
    given = ["--model", str(reasoner_dir()), "--self-prompts", "6", "--out", str(out)]
    given += ["--config", str(config), "--held-out", "2", "--steps", "2", "--json"]
    assert main(["train", "medusa", *given]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_steps"] == 2
    assert report["text_seconds"] > 0
    assert report["training_seconds"] > 0
    assert report["processor_seconds"] > 0
    assert len((out / "texts.jsonl").read_text().splitlines()) == 6


def test_the_embedded_reasoner_writes_no_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "medusa", "--self-prompts", "64", "--out", str(tmp_path)]) == 2
    assert "the embedded reasoner writes no prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--held-out", "0"], "0 held-out texts"),
        (["--held-out", "7"], "Hold out at least 1 and at most half of them (--held-out)"),
        (["--steps", "0"], "steps"),
        (["--seed", "-1"], "seed"),
        (["--dtype", "float8"], "--dtype"),
        (["--device", "cuda"], "torch finds no CUDA device"),
        (["--device", "abacus"], "invalid device"),
        (["--self-distill", "/nowhere.txt"], "/nowhere.txt"),
        (["--out", "/dev/null/x"], "cannot write to /dev/null/x"),
        (["--target", "/nowhere/at/all"], "no model at /nowhere/at/all"),
        (["--revision", "main"], "is on this machine"),
        (["--data", "/nowhere.jsonl"], "either --data or --self-distill"),
        (["--self-prompts", "64"], "either --data or --self-distill, or --self-prompts"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_loaded(
    asked: Path,
    tmp_path: Path,
    more: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "cuda" in more and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(teacher.loader, "load", loaded)
    assert main(["train", "medusa", *options(asked, tmp_path / "out", "num_heads: 1", *more)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize("name", ["checkpoint.pt", "texts.jsonl"])
def test_a_run_that_left_something_broken_is_one_line(
    asked: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("{broken\n" * 12)
    assert main(["train", "medusa", *options(asked, out, "num_heads: 1")]) == 2
    shown = capsys.readouterr().err
    assert (shown.count("\n"), "cannot go on" in shown, name in shown) == (1, True, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line_and_status_1(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "checkpoint.tmp").symlink_to("/dev/full")
    assert main(["train", "medusa", *options(asked, out, "num_heads: 1", "--steps", "1")]) == 1
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
