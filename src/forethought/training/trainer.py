"""The training loop of every recipe: seeded, resumable, with an evaluation at regular intervals.

A :class:`TrainingRecipe` has the module, the batch of each step and its loss; the :class:`Trainer`
has the optimizers, the learning rate's schedule, checkpoints and logs. Batches are functions of the
step, and so is every random number drawn in it: a run that was interrupted ends with the weights of
one that was not::

    step:  batch(step) -> loss -> backward -> clip -> optimizers     random numbers: (seed, step)
    every check_every steps:  checkpoint -> save drafter -> check(drafter directory)
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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import pydantic
import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor, nn

from forethought.config.base import StrictModel
from forethought.errors import ModelError, ParameterError, UsageError
from forethought.model.device import has_fast_matmul
from forethought.model_dir import find_model_dir
from forethought.saved_file import replace_file

if TYPE_CHECKING:
    from forethought.training.teacher import Teacher

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"
DRAFTER = "drafter"
"""Subdirectory of the trained drafter, written before every evaluation and at the end."""
MODEL = "model"
"""Subdirectory of the adapted target, where the recipe adapts it."""
_FREE = frozenset({"check_every", "log_every", "save_seconds"})
"""Settings that may differ when a run is resumed."""
Check = Callable[[Path], dict[str, float]]
"""Evaluates the drafter in a directory: name -> value."""


class TrainingSettings(StrictModel):
    """Settings of the loop, which all recipes share; each recipe adds its own fields."""

    adapts: ClassVar[bool] = False
    """Whether the target is trained as well, and written beside the drafter."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    steps: int = Field(default=1000, ge=1)
    rate: float = Field(default=1e-3, gt=0.0)
    """Peak learning rate."""
    warm_up: float = Field(default=0.02, ge=0.0, le=1.0)
    """Share of the steps in which the learning rate rises linearly from 0."""
    decay_from: float = Field(default=0.3, ge=0.0, lt=1.0)
    """Share of the steps after which the learning rate falls linearly to 0."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    clip: float = Field(default=1.0, gt=0.0)
    """Maximum norm of the gradient."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of a batch, padding included."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the matrix products (autocast); weights and optimizer states stay in float32.
    ``auto``: bf16 for a target in bf16, where the device multiplies that fast."""
    check_every: int = Field(default=500, ge=1)
    """Steps between evaluations, before each of which a checkpoint is written."""
    save_seconds: float = Field(default=60.0, gt=0.0)
    """Maximum seconds between checkpoints."""
    log_every: int = Field(default=50, ge=1)

    def check_target(self, teacher: Teacher) -> None:
        """Raises ModelError for a target that can have no such drafter. Any can, unless a recipe
        says otherwise.
        """


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share an optimizer and a schedule."""

    parameters: Sequence[nn.Parameter]
    scale: Callable[[float], float] = lambda progress: 1.0
    """Progress of the run, 0 to 1 -> factor on the learning rate."""
    muon: bool = False
    """Use Muon (Jordan et al., 2024) in place of AdamW; for matrices only."""
    weight_decay: float | None = None
    """None: that of the settings."""


def build_optimizers(
    groups: Sequence[ParameterGroup], rate: float, weight_decay: float
) -> list[tuple[torch.optim.Optimizer, list[ParameterGroup]]]:
    """AdamW and Muon, where groups ask for them, each with its groups in their order.

    Muon's updates are scaled to the size of AdamW's, so ``rate`` is the peak for both.
    ``weight_decay`` is for groups that have none of their own.
    """

    def entries(chosen: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
        return [
            {
                "params": list(group.parameters),
                "weight_decay": weight_decay if group.weight_decay is None else group.weight_decay,
            }
            for group in chosen
        ]

    with_adam = [group for group in groups if not group.muon]
    with_muon = [group for group in groups if group.muon]
    optimizers: list[tuple[torch.optim.Optimizer, list[ParameterGroup]]] = []
    if with_adam:
        adam = torch.optim.AdamW(entries(with_adam), lr=rate, betas=(0.9, 0.98))
        optimizers.append((adam, with_adam))
    if with_muon:
        muon = torch.optim.Muon(
            entries(with_muon), lr=rate, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append((muon, with_muon))
    return optimizers


class TrainingRecipe(Protocol):
    """A module to train, its batches and its loss.

    Its ``target_dtype``, where it has that attribute, is the data type of the target's weights.
    """

    @property
    def module(self) -> nn.Module:
        """The module that checkpoints hold, in float32."""

    def groups(self) -> list[ParameterGroup]:
        """The parameters that are trained."""

    def batch(self, step: int) -> Any:
        """The batch of a step, counted from 0; it depends on the seed and the step alone.

        Its ``num_tokens``, where it has that attribute, are counted for the tokens per second.
        """

    def loss(self, batch: Any) -> Tensor:
        """The loss, a float32 scalar."""

    def save(self, directory: Path) -> None:
        """Write the drafter; a recipe that adapts the target writes that as ``MODEL`` beside it."""


class DrafterSettings(TrainingSettings):
    """The loop's settings, and what a drafter begins with."""

    start: Path | None = None
    """Directory, Hub id or embedded name of a drafter of the same kind and sizes, whose weights the
    run begins with; None: new weights."""

    @pydantic.field_validator("start")
    @classmethod
    def _directory(cls, value: Path | None) -> Path | None:
        return None if value is None else find_model_dir(value)


def begin_with(module: nn.Module, state: Mapping[str, Tensor], directory: Path) -> None:
    """Give a module the weights ``state``; raises ModelError if they do not fit it."""
    if why := _misfit(module.state_dict(), state):
        raise ModelError(
            f"training cannot begin with the weights in {directory}",
            why,
            "Give its sizes as settings, or a drafter of the same kind and sizes",
        )
    module.load_state_dict(dict(state))


def _misfit(wanted: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> str:
    """What is different between the weights of a module and others; empty: nothing is."""
    differences = []
    for what, names in (
        ("lacks", wanted.keys() - there.keys()),
        ("has, and the settings leave out,", there.keys() - wanted.keys()),
    ):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            differences.append(f"it {what} {min(names)}{others}")
    for name in sorted(wanted.keys() & there.keys()):
        mine, its = list(wanted[name].shape), list(there[name].shape)
        if mine != its:
            differences.append(f"its {name} is {its}, and by the settings {mine}")
            break
    return "; ".join(differences)


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a run after a step."""

    step: int
    """Number of steps done."""
    num_steps: int
    loss: float
    """Loss of the last step."""
    tokens_per_second: float
    """Since the run was started or resumed; 0 where batches have no ``num_tokens``."""
    seconds_left: float
    """Estimate, at the mean time of a step since the run was started or resumed."""
    results: Mapping[str, float]
    """Results of the last evaluation; empty before the first one."""


class Trainer:
    """Trains the module of a recipe.

    While it runs, SIGINT and SIGTERM are deferred to the end of the step: a checkpoint is written
    and the signal is raised again. A second signal takes effect at once.

    Args:
        recipe: built under :func:`seeded`, so that its initial weights depend on the seed.
        settings: the loop's fields are used; all fields are stored in the checkpoint.
        directory: of checkpoint and drafter. If it has a checkpoint, the run is resumed.
        check: evaluation of a drafter's directory, called every ``check_every`` steps.
        on_step: called after each step, such as to move a progress bar.
        output: subdirectory in which the recipe saves what it has trained.

    Raises:
        ParameterError: the checkpoint was made with other settings.
        UsageError: the checkpoint cannot be read.
    """

    def __init__(
        self,
        recipe: TrainingRecipe,
        settings: TrainingSettings,
        directory: Path,
        check: Check | None = None,
        on_step: Callable[[Progress], None] | None = None,
        output: str = DRAFTER,
    ) -> None:
        self.recipe, self.settings, self.directory = recipe, settings, directory
        self._output = directory / output
        self._check, self._on_step = check, on_step
        self._results: dict[str, float] | None = None
        self._num_tokens = 0  # of the current batch
        self._optimizers = build_optimizers(recipe.groups(), settings.rate, settings.weight_decay)
        self.step, self.seconds = 0, 0.0
        directory.mkdir(parents=True, exist_ok=True)
        self._load()

    def run(self, until: int | None = None) -> dict[str, float]:
        """Train to the end, or up to step ``until``; returns the results of the last evaluation,
        empty without ``check``.

        Raises:
            KeyboardInterrupt: on SIGINT, after a checkpoint was written.
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
        return self._evaluate() if self._results is None else self._results

    def _advance(self, pace: _Pace, end: int) -> None:
        """One step, with its timing, log line and callback."""
        settings, began = self.settings, time.perf_counter()
        loss = self._learn()
        seconds = time.perf_counter() - began
        self.step, self.seconds = self.step + 1, self.seconds + seconds
        pace.add(self._num_tokens, seconds)
        logged = self.step % settings.log_every == 0
        if not logged and self._on_step is None:
            return  # to read the loss is to wait for a GPU
        progress = Progress(
            step=self.step,
            num_steps=end,
            loss=float(loss),
            tokens_per_second=pace.tokens_per_second,
            seconds_left=(end - self.step) * pace.seconds_per_step,
            results=self._results or {},
        )
        if logged:
            log_fields(
                logger,
                step=self.step,
                seconds=self.seconds,
                loss=progress.loss,
                tokens_per_second=progress.tokens_per_second,
                seconds_left=progress.seconds_left,
            )
        if self._on_step is not None:
            self._on_step(progress)

    def _learn(self) -> Tensor:
        settings, recipe = self.settings, self.recipe
        progress = self.step / settings.steps
        for optimizer, groups in self._optimizers:
            for group, entry in zip(groups, optimizer.param_groups, strict=True):
                entry["lr"] = settings.rate * self._schedule(progress) * group.scale(progress)
        with seeded(settings.seed, self.step + 1):
            batch = recipe.batch(self.step)
            self._num_tokens = getattr(batch, "num_tokens", 0)
            with self._precision():
                loss = recipe.loss(batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, settings.clip)
        for optimizer, _ in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    @property
    def _parameters(self) -> list[nn.Parameter]:
        groups = (group for _, groups in self._optimizers for group in groups)
        return [parameter for group in groups for parameter in group.parameters]

    def _schedule(self, progress: float) -> float:
        """The learning rate as a share of its peak."""
        settings = self.settings
        rising = (progress + 1 / settings.steps) / settings.warm_up if settings.warm_up else 1.0
        return min(1.0, rising, (1.0 - progress) / (1.0 - settings.decay_from))

    def _precision(self) -> torch.autocast:
        device, is_bfloat16 = next(self.recipe.module.parameters()).device, False
        if self.settings.dtype == "auto":
            target_dtype = getattr(self.recipe, "target_dtype", torch.float32)
            if target_dtype == torch.bfloat16:
                is_bfloat16 = has_fast_matmul(torch.bfloat16, device)
        else:
            is_bfloat16 = self.settings.dtype == "bfloat16"
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bfloat16)

    def _evaluate(self) -> dict[str, float]:
        try:
            self.recipe.save(self._output)
        except SafetensorError as error:
            raise OSError(f"cannot write the weights in {self._output}: {error}") from error
        self._results = {}
        if self._check is not None:
            self.recipe.module.eval()
            self._results = self._check(self._output)
            self.recipe.module.train()
            log_fields(logger, step=self.step, **self._results)
        return self._results

    @property
    def _checkpoint(self) -> Path:
        return self.directory / CHECKPOINT

    def _save(self) -> None:
        """Replace the checkpoint atomically: an interrupted save leaves the older one."""
        draft = self._checkpoint.with_suffix(".tmp")
        state = {
            "module": self.recipe.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
            "kind": type(self.settings).__name__,
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
            for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.seconds = state["step"], state["seconds"]
        except (KeyError, RuntimeError, ValueError) as error:
            raise _broken(self._checkpoint, error) from error
        logger.info("resumed at step %d", self.step)


def load_checkpoint(
    directory: Path, settings: TrainingSettings, device: torch.device | str = "cpu"
) -> dict[str, Any] | None:
    """The checkpoint of a run in ``directory``; None: there is none.

    Raises ParameterError if it was made with other settings, UsageError if it cannot be read.
    """
    path = directory / CHECKPOINT
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location=device)
        written = dict(state["settings"])
    except Exception as error:  # torch and pickle raise anything
        raise _broken(path, error) from error
    kind = type(settings).__name__
    if state.get("kind", kind) != kind:
        raise ParameterError(
            f"cannot go on with the run in {directory}",
            f"it trains another kind of drafter: its settings are {state['kind']}, and not {kind}",
            "Give another directory",
        )
    mine = settings.model_dump(mode="json")
    for name in sorted((mine.keys() | written.keys()) - _FREE):
        if mine.get(name) != written.get(name):
            raise ParameterError(
                f"cannot go on with the run in {directory}",
                f"its {name} was {written.get(name)!r}, and now {mine.get(name)!r} is given",
                "Give the same settings, or another directory (--start begins with its weights)",
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
    """Tokens and seconds of the steps since a run was started or resumed."""

    def __init__(self) -> None:
        self._steps, self._num_tokens, self._seconds = 0, 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._steps, self._num_tokens = self._steps + 1, self._num_tokens + tokens
        self._seconds += seconds

    @property
    def tokens_per_second(self) -> float:
        return self._num_tokens / self._seconds if self._seconds else 0.0

    @property
    def seconds_per_step(self) -> float:
        return self._seconds / self._steps if self._steps else 0.0


class _Interruption:
    """Defers SIGINT and SIGTERM until :meth:`act`; a second signal is not deferred.

    Nothing is deferred outside of the main thread, which alone may set signal handlers, and no
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
        if self.pending is not None:
            number, self.pending = self.pending, None
            logger.info("saved; the same command goes on from here")
            with self.let_through():
                signal.raise_signal(number)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Inside, signals are not deferred."""
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
    """Inside, torch's random state is a function of (seed, step); it is restored afterwards. Step 0
    is for initial weights; the steps of the loop count from 1.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=list(devices)):
        digest = blake2b(f"{seed}:{step}".encode(), digest_size=4).digest()
        torch.manual_seed(int.from_bytes(digest, "little"))  # on a CPU torch uses 32 bits only
        yield


def log_fields(logger: logging.Logger, **fields: float) -> None:
    """Log numbers as one JSON object, rounded to 4 places."""
    logger.info("%s", json.dumps({name: round(value, 4) for name, value in fields.items()}))
