"""One training loop for every drafter: seeded, resumable, evaluated while it runs.

A recipe brings the module, the batch of each step and its loss; the loop brings AdamW, the
schedule, checkpoints and logs. Batches are functions of the step, and so is every random number
drawn in it: a run that was interrupted ends with the weights of one that was not. Knows nothing
about drafters or targets.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor, nn

from forethought.config.base import StrictModel
from forethought.errors import ParameterError, UsageError
from forethought.model_dir import replace_file

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"
DRAFTER = "drafter"
"""Where in the run's directory the trained drafter is written, at every check and at the end."""
MODEL = "model"
"""Where beside it a recipe that adapts the target writes the adapted one."""
_FREE = frozenset({"check_every", "log_every", "save_seconds"})
"""Settings that may differ when a run goes on."""
Check = Callable[[Path], dict[str, float]]
"""Measures a drafter that was written to a directory: name -> value."""


class TrainingSettings(StrictModel):
    """What all recipes have in common; each adds its own fields."""

    adapts: ClassVar[bool] = False
    """Whether the target is trained, too, and written beside the drafter."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    steps: int = Field(default=1000, ge=1)
    rate: float = Field(default=1e-3, gt=0.0)
    """Peak learning rate."""
    warm_up: float = Field(default=0.02, ge=0.0, le=1.0)
    """Share of the steps in which the rate rises."""
    decay_from: float = Field(default=0.3, ge=0.0, lt=1.0)
    """Share of the steps after which the rate falls, linearly to nothing."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    clip: float = Field(default=1.0, gt=0.0)
    """Largest norm of the gradient."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of a step, filling included."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the products; weights and their updates stay in float32."""
    check_every: int = Field(default=500, ge=1)
    """Steps between checkpoints that are evaluated."""
    save_seconds: float = Field(default=60.0, gt=0.0)
    """Most seconds between checkpoints, evaluated or not."""
    log_every: int = Field(default=50, ge=1)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share a schedule."""

    parameters: Sequence[nn.Parameter]
    scale: Callable[[float], float] = lambda progress: 1.0
    """Progress of the run, 0 to 1 -> what the learning rate is multiplied by."""


class Recipe(Protocol):
    """What is trained, and how it is told."""

    @property
    def module(self) -> nn.Module:
        """What a checkpoint holds, in float32."""

    def groups(self) -> list[ParameterGroup]:
        """What is trained of it."""

    def batch(self, step: int) -> Any:
        """What is learned from in a step, counted from 0: a function of nothing else.

        Its ``num_tokens``, where it has that attribute, are counted for the tokens per second.
        """

    def loss(self, batch: Any) -> Tensor:
        """A float32 scalar to lower."""

    def save(self, directory: Path) -> None:
        """Write the drafter as it is used, and beside it, as ``MODEL``, the target if it adapts."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    step: int
    """Steps done."""
    num_steps: int
    loss: float
    """Of the step just done."""
    tokens_per_second: float
    """Of training since the run began or went on; 0 where batches do not say their size."""
    seconds_left: float
    """As long as the steps to come take if they take as long as those since then."""
    found: Mapping[str, float]
    """What the last evaluation measured; nothing before the first one."""


class Trainer:
    """Runs a recipe.

    While it runs, SIGINT and SIGTERM wait for the end of the step: the run is saved, and then ends
    as it would have ended without (``KeyboardInterrupt``, or the end of the process). A second one
    does not wait.

    Args:
        recipe: made under ``seeded``, so that its initial weights are the seed's.
        settings: the loop's part is looked at; all of it is kept with the checkpoint.
        directory: for checkpoint and drafter. Where a checkpoint lies there, the run goes on.
        check: called with the directory of the drafter every ``check_every`` steps.
        on_step: called after each step, such as to move a progress bar.

    Raises:
        ParameterError: the checkpoint was made with other settings.
        UsageError: it cannot be read.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: TrainingSettings,
        directory: Path,
        check: Check | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> None:
        self.recipe, self.settings, self.directory = recipe, settings, directory
        self._check, self._on_step = check, on_step
        self._found: dict[str, float] | None = None
        self._tokens = 0  # of the batch at hand
        self._groups = recipe.groups()
        self._optimizer = torch.optim.AdamW(
            [{"params": list(group.parameters)} for group in self._groups],
            lr=settings.rate,
            betas=(0.9, 0.98),
            weight_decay=settings.weight_decay,
        )
        self.step, self.seconds = 0, 0.0
        directory.mkdir(parents=True, exist_ok=True)
        self._load()

    def run(self, until: int | None = None) -> dict[str, float]:
        """Train to the end, or until so many steps are done.

        Returns:
            What the last check measured; nothing without one.

        Raises:
            KeyboardInterrupt: SIGINT came, and the run is saved.
            OSError: a checkpoint or the drafter cannot be written.
        """
        settings, pace = self.settings, _Pace()
        end = settings.steps if until is None else min(until, settings.steps)
        saved_at = time.monotonic()
        with _Interruption() as interruption:
            while self.step < end:
                self._advance(pace, end)
                checked = self.step % settings.check_every == 0 or self.step == end
                late = time.monotonic() - saved_at >= settings.save_seconds
                if checked or late or interruption.pending:
                    self._save()
                    saved_at = time.monotonic()
                interruption.act()
                if checked:
                    with interruption.let_through():
                        self._evaluate()
        return self._evaluate() if self._found is None else self._found

    def _advance(self, pace: _Pace, end: int) -> None:
        """One step, timed and told."""
        settings, began = self.settings, time.perf_counter()
        loss = self._learn()
        seconds = time.perf_counter() - began
        self.step, self.seconds = self.step + 1, self.seconds + seconds
        pace.add(self._tokens, seconds)
        logged = self.step % settings.log_every == 0
        if not logged and self._on_step is None:
            return  # to read the loss is to wait for a GPU
        progress = Progress(
            step=self.step,
            num_steps=end,
            loss=float(loss),
            tokens_per_second=pace.tokens_per_second,
            seconds_left=(end - self.step) * pace.seconds_per_step,
            found=self._found or {},
        )
        if logged:
            _log(
                step=self.step,
                seconds=self.seconds,
                loss=progress.loss,
                tokens_per_second=progress.tokens_per_second,
                seconds_left=progress.seconds_left,
            )
        if self._on_step is not None:
            self._on_step(progress)

    def _learn(self) -> Tensor:
        """One step; returns its loss."""
        settings, recipe = self.settings, self.recipe
        progress = self.step / settings.steps
        for group, entry in zip(self._groups, self._optimizer.param_groups, strict=True):
            entry["lr"] = settings.rate * self._schedule(progress) * group.scale(progress)
        with seeded(settings.seed, self.step + 1):
            batch = recipe.batch(self.step)
            self._tokens = getattr(batch, "num_tokens", 0)
            with self._precision():
                loss = recipe.loss(batch)
            loss.backward()
        weights = [weight for group in self._groups for weight in group.parameters]
        torch.nn.utils.clip_grad_norm_(weights, settings.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _schedule(self, progress: float) -> float:
        """The learning rate as a share of its peak."""
        settings = self.settings
        rising = (progress + 1 / settings.steps) / settings.warm_up if settings.warm_up else 1.0
        return min(1.0, rising, (1.0 - progress) / (1.0 - settings.decay_from))

    def _precision(self) -> torch.autocast:
        device = next(self.recipe.module.parameters()).device.type
        wanted = self.settings.dtype == "bfloat16"
        return torch.autocast(device, dtype=torch.bfloat16, enabled=wanted)

    def _evaluate(self) -> dict[str, float]:
        drafter = self.directory / DRAFTER
        try:
            self.recipe.save(drafter)
        except SafetensorError as error:
            raise OSError(f"cannot write the drafter in {drafter}: {error}") from error
        self._found = {}
        if self._check is not None:
            self.recipe.module.eval()
            self._found = self._check(drafter)
            self.recipe.module.train()
            _log(step=self.step, **self._found)
        return self._found

    @property
    def _checkpoint(self) -> Path:
        return self.directory / CHECKPOINT

    def _save(self) -> None:
        """Replace the checkpoint at once, so that an interrupted save leaves the older one."""
        draft = self._checkpoint.with_suffix(".tmp")
        state = {
            "module": self.recipe.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "settings": self.settings.model_dump(mode="json"),
            "step": self.step,
            "seconds": self.seconds,
        }
        try:
            with draft.open("wb") as stream:
                torch.save(state, stream)
        except (OSError, RuntimeError) as error:
            draft.unlink(missing_ok=True)
            reason: BaseException = error
            while reason.__context__ is not None:  # torch's writer hides what the disk said
                reason = reason.__context__
            raise OSError(f"cannot write {self._checkpoint}: {_first_line(reason)}") from error
        replace_file(draft, self._checkpoint)

    def _load(self) -> None:
        device = next(self.recipe.module.parameters()).device
        state = load_checkpoint(self.directory, self.settings, device)
        if state is None:
            return
        try:
            self.recipe.module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]
        except (KeyError, RuntimeError, ValueError) as error:
            raise _broken(self._checkpoint, error) from error
        logger.info("going on from step %d", self.step)


def load_checkpoint(
    directory: Path, settings: TrainingSettings, device: torch.device | str = "cpu"
) -> dict[str, Any] | None:
    """What a run in ``directory`` has left to go on from; None: nothing.

    Raises:
        ParameterError: it was made with other settings.
        UsageError: it cannot be read.
    """
    path = directory / CHECKPOINT
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location=device)
        written = dict(state["settings"])
    except Exception as error:  # torch and pickle raise anything
        raise _broken(path, error) from error
    mine = settings.model_dump(mode="json")
    for name in sorted((mine.keys() | written.keys()) - _FREE):
        if mine.get(name) != written.get(name):
            raise ParameterError(
                f"the run in {directory} has another {name}",
                f"{written.get(name)!r}, not {mine.get(name)!r}",
                "Go on with the same settings, or give another directory",
            )
    return state


def _broken(path: Path, error: BaseException) -> UsageError:
    return UsageError(
        f"cannot go on from {path}",
        f"it is broken ({_first_line(error)})",
        "Remove it to begin anew, or give another directory",
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


class _Pace:
    """Tokens and seconds of the steps since a run began or went on."""

    def __init__(self) -> None:
        self._steps, self._tokens, self._seconds = 0, 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step more."""
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        self._seconds += seconds

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def seconds_per_step(self) -> float:
        return self._seconds / self._steps if self._steps else 0.0


class _Interruption:
    """SIGINT and SIGTERM, held back until :meth:`act`; a second one is not.

    Outside of the main thread, which alone may handle signals, nothing is held back; nor is a
    signal that the process ignores.
    """

    def __init__(self) -> None:
        self.pending: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def act(self) -> None:
        """Do what the signal that came would have done."""
        if self.pending is not None:
            number, self.pending = self.pending, None
            logger.info("saved; the same command goes on from here")
            with self.let_through():
                signal.raise_signal(number)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """While it is open, nothing is held back."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending is not None:
            self.__exit__()
            signal.raise_signal(number)
        self.pending = signal.Signals(number)


@contextmanager
def seeded(seed: int, step: int = 0) -> Iterator[None]:
    """Torch's random numbers are those of seed and step inside, and as before behind it.

    Step 0 is for initial weights; the loop's steps count from 1.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=list(devices)):
        digest = blake2b(f"{seed}:{step}".encode(), digest_size=4).digest()
        torch.manual_seed(int.from_bytes(digest, "little"))  # a CPU looks at 32 bits only
        yield


def _log(**fields: float) -> None:
    logger.info("%s", json.dumps({name: round(value, 4) for name, value in fields.items()}))
