"""The loop that trains every drafter: it learns, it is seeded, and a pause changes nothing."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forethought.errors import ParameterError, UsageError
from forethought.training import trainer as trainer_module
from forethought.training.trainer import (
    DRAFTER,
    ParameterGroup,
    Progress,
    Trainer,
    TrainingSettings,
    seeded,
)


class Line:
    """Learns a linear map from noisy examples, with noise of its own in the loss."""

    def __init__(self, scale: float = 1.0) -> None:
        self.module = nn.Linear(3, 1)
        self._scale = scale
        self.saved = 0

    def groups(self) -> list[ParameterGroup]:
        return [
            ParameterGroup([self.module.weight]),
            ParameterGroup([self.module.bias], lambda progress: self._scale),
        ]

    def batch(self, step: int) -> Tensor:
        return torch.randn(8, 3)

    def loss(self, batch: Tensor) -> Tensor:
        wanted = batch.sum(-1, keepdim=True) + 0.1 * torch.randn(len(batch), 1)
        return (self.module(batch) - wanted).pow(2).mean()

    def save(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        torch.save(self.module.state_dict(), directory / "weights")
        self.saved += 1


SETTINGS = TrainingSettings(steps=30, rate=0.05, check_every=10, log_every=10)


def make(directory: Path, settings: TrainingSettings = SETTINGS, **more: object) -> Trainer:
    with seeded(settings.seed):
        recipe = Line()
    return Trainer(recipe, settings, directory, **more)  # type: ignore[arg-type]


def weights(trainer: Trainer) -> list[float]:
    return [x for w in trainer.recipe.module.parameters() for x in w.flatten().tolist()]


def test_steps_lower_the_loss(tmp_path: Path) -> None:
    trainer = make(tmp_path, SETTINGS.model_copy(update={"steps": 200}))
    batch = torch.randn(64, 3)
    before = trainer.recipe.loss(batch).item()
    trainer.run()
    assert trainer.recipe.loss(batch).item() < before / 10


def test_a_seed_decides_the_weights_and_nothing_else_does(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    first.run()
    torch.manual_seed(99)
    torch.rand(7)
    second.run()
    assert weights(first) == weights(second)
    other = make(tmp_path / "c", SETTINGS.model_copy(update={"seed": 1}))
    other.run()
    assert weights(other) != weights(first)


def test_the_callers_random_numbers_are_left_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    make(tmp_path).run()
    assert torch.rand(3).tolist() == expected


@pytest.mark.parametrize("pause", [1, 10, 17, 29])
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tmp_path: Path, pause: int) -> None:
    whole, begun = make(tmp_path / "whole"), make(tmp_path / "parts")
    whole.run()
    begun.run(until=pause)
    resumed = make(tmp_path / "parts")
    assert resumed.step == pause
    resumed.run()
    assert weights(resumed) == weights(whole)
    assert resumed.step == 30


def test_a_run_goes_on_only_with_the_settings_that_it_began_with(tmp_path: Path) -> None:
    make(tmp_path).run(until=5)
    make(tmp_path, SETTINGS.model_copy(update={"check_every": 3, "log_every": 1}))
    with pytest.raises(ParameterError, match=r"its rate was 0\.05, and now 0\.1 is given"):
        make(tmp_path, SETTINGS.model_copy(update={"rate": 0.1}))


def test_it_is_evaluated_while_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Path] = []

    def check(directory: Path) -> dict[str, float]:
        seen.append(directory)
        assert (directory / "weights").exists()
        return {"acceptance_length": 1.0 + len(seen)}

    trainer = make(tmp_path, check=check)
    with caplog.at_level(logging.INFO, "forethought.training.trainer"):
        assert trainer.run() == {"acceptance_length": 4.0}
    assert seen == [tmp_path / DRAFTER] * 3
    assert '"acceptance_length": 2.0' in caplog.text
    assert '"loss": ' in caplog.text
    assert make(tmp_path, check=check).run() == {"acceptance_length": 5.0}  # nothing left to do


def test_a_group_with_scale_0_stays_as_it_is(tmp_path: Path) -> None:
    with seeded(0):
        recipe = Line(scale=0.0)
    bias = recipe.module.bias.tolist()
    Trainer(recipe, SETTINGS, tmp_path).run()
    assert recipe.module.bias.tolist() == bias


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    settings = TrainingSettings(steps=100, warm_up=0.1, decay_from=0.5)
    trainer = Trainer.__new__(Trainer)
    trainer.settings = settings
    found = [trainer._schedule(step / 100) for step in range(101)]
    assert found[0] == pytest.approx(0.1)
    assert found[9] == pytest.approx(1.0)
    assert found[10:50] == [1.0] * 40
    assert found[75] == pytest.approx(0.5)
    assert found[100] == 0.0


def test_bf16_products_leave_the_weights_in_float32(tmp_path: Path) -> None:
    trainer = make(tmp_path, SETTINGS.model_copy(update={"dtype": "bfloat16"}))
    trainer.run()
    assert {w.dtype for w in trainer.recipe.module.parameters()} == {torch.float32}
    exact = make(tmp_path / "exact")
    exact.run()
    assert weights(trainer) != weights(exact)
    assert weights(trainer) == pytest.approx(weights(exact), abs=0.1)


@pytest.mark.parametrize(
    ("target_dtype", "fast", "dtype", "in_bf16"),
    [
        (torch.bfloat16, True, "auto", True),
        (torch.bfloat16, False, "auto", False),
        (torch.float32, True, "auto", False),
        (torch.bfloat16, True, "float32", False),
        (torch.float32, False, "bfloat16", True),
    ],
)
def test_products_are_in_bf16_for_a_target_in_bf16_where_that_is_fast(
    target_dtype: torch.dtype,
    fast: bool,
    dtype: str,
    in_bf16: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_module, "has_fast_matmul", lambda dtype, device: fast)
    trainer = make(tmp_path, SETTINGS.model_copy(update={"dtype": dtype}))
    trainer.recipe.target_dtype = target_dtype  # type: ignore[attr-defined]
    seen: list[torch.dtype] = []
    trainer.recipe.module.register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    trainer.run(until=1)
    assert seen == [torch.bfloat16 if in_bf16 else torch.float32]


# ---- what is saved, and when ------------------------------------------------------------------


def test_a_run_is_saved_every_so_many_seconds_without_being_evaluated(tmp_path: Path) -> None:
    trainer = make(tmp_path, SETTINGS.model_copy(update={"save_seconds": 1e-9}))
    saved: list[int] = []
    trainer._save = lambda: saved.append(trainer.step)  # type: ignore[method-assign]
    trainer.run()
    assert saved == list(range(1, 31))
    assert trainer.recipe.saved == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_step_and_the_run_is_saved(
    tmp_path: Path, number: signal.Signals
) -> None:
    came: list[int] = []
    before = signal.signal(number, lambda number, frame: came.append(number))
    try:
        whole = make(tmp_path / "whole")
        whole.run()
        begun = make(tmp_path / "parts")
        learn = begun._learn

        def interrupted() -> Tensor:
            if begun.step == 4:
                signal.raise_signal(number)
                assert not came
            assert not came or begun.step > 4
            return learn()

        begun._learn = interrupted  # type: ignore[method-assign]
        begun.run(until=9)
        assert came == [number]
        handler = signal.getsignal(number)
    finally:
        signal.signal(number, before)
    assert handler is not before
    resumed = make(tmp_path / "parts")
    assert resumed.step == 9
    resumed.run()
    assert weights(resumed) == weights(whole)


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    trainer = make(tmp_path)

    def endless() -> Tensor:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    trainer._learn = endless  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert trainer.step == 0


def test_a_signal_that_is_ignored_stays_so_and_other_threads_train_as_well(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = make(tmp_path / "a")
        learn = trainer._learn
        trainer._learn = lambda: (signal.raise_signal(signal.SIGINT), learn())[1]  # type: ignore
        trainer.run()
    finally:
        signal.signal(signal.SIGINT, before)
    other = make(tmp_path / "b")
    thread = threading.Thread(target=other.run)
    thread.start()
    thread.join()
    assert weights(other) == weights(trainer)


def test_each_step_is_told_with_its_loss_its_speed_and_the_time_left(tmp_path: Path) -> None:
    class Sized(Line):
        def batch(self, step: int) -> Any:
            return SimpleNamespace(num_tokens=7, examples=super().batch(step))

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch.examples)

    reported: list[Progress] = []
    Trainer(
        Sized(), SETTINGS, tmp_path, lambda _: {"acceptance_length": 2.5}, reported.append
    ).run()
    assert [progress.step for progress in reported] == list(range(1, 31))
    assert all(progress.tokens_per_second > 0 for progress in reported)
    assert (reported[0].seconds_left > 0, reported[-1].seconds_left) == (True, 0.0)
    found = [progress.results for progress in reported]
    assert (found[9], found[10]) == ({}, {"acceptance_length": 2.5})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_as_such_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    begun = make(tmp_path)
    begun.run(until=10)
    (tmp_path / "checkpoint.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write .*checkpoint\.pt: .*No space left"):
        make(tmp_path).run()
    assert make(tmp_path).step == 10


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_broken_checkpoint_is_refused_with_what_to_do(
    tmp_path: Path, content: bytes | None
) -> None:
    make(tmp_path).run(until=10)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-200] if content is None else content)
    with pytest.raises(UsageError, match=r"cannot go on from .*checkpoint\.pt.*Remove it"):
        make(tmp_path)


def test_a_checkpoint_reaches_the_disk_before_it_takes_the_place_of_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (calls.append("fsync"), fsync(number))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths))[1])
    make(tmp_path)._save()
    assert calls == ["fsync", "replace", "fsync"]
