"""``forethought train``: from prompts to a drafter that the printed command generates with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from forethought.assets import problems
from forethought.cli.main import main

SIZES = {
    "draft-model": "hidden_size: 24, intermediate_size: 32, num_layers: 1",
    "eagle3": "unrolled: 2, intermediate_size: 32",
    "mtp": "depths: 2",
    "redrafter": "unrolled: 2, blocks: 1, exit_dim: 64",
}


@pytest.mark.parametrize("kind", SIZES)
def test_the_command_that_is_printed_at_the_end_generates_with_the_drafter(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "prompts.txt"
    asked.write_text("".join(p["question"] + "\n" for p in problems()[:12]))
    config = tmp_path / "config.yaml"
    config.write_text(f"{{{SIZES[kind]}, batch_tokens: 512, max_tokens: 24, temperatures: [0.0]}}")
    options = ["--self-distill", str(asked), "--out", str(tmp_path / "out"), "--config"]
    options += [str(config), "--steps", "3", "--held-out", "2", "--dtype", "float32"]
    assert main(["train", kind, *options]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[0] == "forethought"
    asks = ["--json", "--max-tokens", "12", "--dtype", "float32"]
    assert main([*command[1:], *asks]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["metrics"]["drafted"] > 0
    assert main(["generate", "...", *asks]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == drafted["text"]
