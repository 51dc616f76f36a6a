"""The comparison with other engines: the protocol of their processes, and its figures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers import cases
from benchmarks.peers.contestant import BASE, Failed
from benchmarks.peers.gguf_file import read_tensors, write_gguf
from benchmarks.peers.random_models import save_random_model
from benchmarks.peers.worker import CLOCKS, Answer, Request, Settings, answer, serve

from forethought.gguf.view import view_of
from forethought.model.checkpoint_tensors import GgufTensors


class Counting:
    """An engine that continues every prompt by counting."""

    def prepare(self, source: Path, folder: Path, settings: Settings) -> Path:
        return source / settings.form

    def load(self, settings: Settings) -> None:
        self.settings = settings

    def generate(self, request: Request) -> Answer:
        pairs = zip(request.prompts, request.lengths, strict=True)
        return Answer([list(range(prompt[-1] + 1, prompt[-1] + 1 + n)) for prompt, n in pairs])

    def version(self) -> str:
        return "counting 1"


class Contestant:
    """Answers after so many seconds, the tokens of ``Counting`` from ``shift`` on; may fail."""

    def __init__(self, label: str, seconds: float, shift: int = 0, lives: int = 99) -> None:
        self.label, self.seconds, self.shift, self.lives = label, seconds, shift, lives

    def generate(self, request: Request) -> dict[str, Any]:
        self.lives -= 1
        if self.lives < 0:
            raise Failed("it is over")
        tokens = Counting().generate(request).tokens
        half = [
            [*row[: len(row) // 2], *(t + self.shift for t in row[len(row) // 2 :])]
            for row in tokens
        ]
        return {"seconds": self.seconds, "first": self.seconds / 4, "tokens": half}


def test_a_worker_answers_each_line_and_an_error_ends_nothing() -> None:
    lines = [
        {
            "verb": "prepare",
            "values": {
                "source": "/a",
                "folder": "/b",
                "settings": {"model": "", "dtype": "float32", "form": "int8"},
            },
        },
        {"verb": "load", "values": {"model": "/a", "dtype": "float32"}},
        {"verb": "generate", "values": {"prompts": [[7]], "lengths": [2, 3]}},
        {"verb": "generate", "values": {"prompts": [[7], [1]], "lengths": [2, 1]}},
    ]
    written: list[str] = []
    serve(
        Counting(), io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), written.append
    )
    prepared, loaded, broken, generated = map(json.loads, written)
    assert prepared == {"path": "/a/int8"}
    assert loaded["version"] == "counting 1"
    assert loaded["peak"] >= loaded["resident"] >= loaded["anonymous"] > 0
    assert broken["error"].startswith("ValueError")
    assert generated["tokens"] == [[8, 9], [2]]


def test_seconds_are_of_the_clock_that_the_request_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLOCKS, "processor", iter([100.0, 107.5]).__next__)
    values = {"prompts": [[7]], "lengths": [2], "clock": "processor"}
    made = answer(Counting(), {"verb": "generate", "values": values})
    assert made["seconds"] == 7.5


def test_ratios_are_to_the_base_and_agreement_ends_at_the_first_difference() -> None:
    contestants = [Contestant(BASE, 2.0), Contestant("other", 1.0, shift=5)]
    requests = [cases.Prompts(100).fixed(2, 3, 4) for _ in range(3)]
    found = cases.run(contestants, requests, cases.throughput, pytest.fail)["tokens/s"]
    assert found == {BASE: (4.0, 1.0, 1.0), "other": (8.0, 2.0, 0.5)}


def test_who_fails_is_reported_and_not_asked_again() -> None:
    contestants = [Contestant(BASE, 1.0), Contestant("other", 1.0, lives=2)]
    failed: list[str] = []
    requests = [cases.Prompts(100).fixed(1, 2, 2) for _ in range(5)]
    found = cases.run(
        contestants, requests, cases.throughput, lambda each, why: failed.append(each.label)
    )
    assert failed == ["other"]
    assert found["tokens/s"]["other"] == (2.0, 1.0, 1.0)


def test_a_long_context_gives_the_speed_of_the_prompt_and_of_decoding_behind_it() -> None:
    request = cases.Prompts(100).fixed(1, 50, 16, timed=True)
    answer = Contestant(BASE, 4.0).generate(request)
    assert cases.behind_context(request, answer) == {"prefill": 50.0, "decode": 5.0}
    assert cases.behind_context(request, answer | {"first": None}) == {}


def test_no_prompt_of_random_tokens_comes_twice() -> None:
    prompts = cases.Prompts(1000)
    found = [tuple(prompt) for _ in range(5) for prompt in prompts.mixed(64).prompts]
    assert len(set(found)) == len(found) == 5 * 64


def test_the_file_of_a_model_with_recurrent_layers_has_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))
    source = save_random_model("hybrid2m", tmp_path / "model", "float32")
    write_gguf(source, tmp_path / "model.gguf", "float32")
    stored = GgufTensors(view_of(tmp_path / "model.gguf"), rounds_input=False)
    weights = dict(read_tensors(source))
    assert stored.names == set(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(stored.tensor(name, torch.float32), torch.from_numpy(weight))
