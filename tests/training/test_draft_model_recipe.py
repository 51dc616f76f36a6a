"""A draft model learns what its target says, from prompts alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forethought.assets import problems
from forethought.cli.main import main
from forethought.errors import ParameterError
from forethought.model import loader
from forethought.training.recipes.draft_model import DraftModelSettings


def test_a_tiny_run_learns_to_be_accepted_and_leaves_a_model_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 steps on 24 short answers: more than 1.1 tokens per step on 4 others."""
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt": p["question"]}) + "\n" for p in problems()[:28]))
    config = tmp_path / "config.yaml"
    config.write_text(
        "{hidden_size: 48, intermediate_size: 64, num_layers: 1, batch_tokens: 1024, rate: 0.01, "
        "check_every: 200, max_tokens: 48}"
    )
    out = tmp_path / "out"
    options = ["--self-distill", str(asked), "--out", str(out), "--config", str(config)]
    options += ["--steps", "100", "--held-out", "4", "--device", "cpu", "--dtype", "float32"]
    assert main(["train", "draft-model", *options]) == 0
    shown = capsys.readouterr().out
    assert f"--speculative draft_target --draft-model {out / 'drafter'}" in shown
    assert float(shown.split(": ")[1].split(" tokens")[0]) > 1.1
    model = loader.load(out / "drafter", dtype="float32")
    assert (model.vocab_size, model.max_positions) == (512, 1024)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden_size": 50, "num_heads": 4, "num_kv_heads": 1}, "multiple of num_heads"),
        ({"hidden_size": 48, "num_heads": 3, "num_kv_heads": 2}, "multiple of num_kv_heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        DraftModelSettings(**sizes)  # type: ignore[arg-type]
