"""One training loop for every drafter: seeded, resumable, evaluated while it runs.

A recipe brings the module, the batch of each step and its loss; the loop brings AdamW, the
schedule, checkpoints and logs. Batches are functions of the step, and so is every random number
drawn in it: a run that was interrupted ends with the weights of one that was not. Knows nothing
about drafters or targets.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from forethought.errors import ParameterError
from forethought.strict_model import StrictModel

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"
DRAFTER = "drafter"
"""Where in the run's directory the trained drafter is written, at every check and at the end."""
MODEL = "model"
"""Where beside it a recipe that adapts the target writes the adapted one."""
_FREE = frozenset({"check_every", "log_every"})
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
    """Steps between checkpoints, each of which is evaluated."""
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
        """What is learned from in a step, counted from 0: a function of nothing else."""

    def loss(self, batch: Any) -> Tensor:
        """A float32 scalar to lower."""

    def save(self, directory: Path) -> None:
        """Write the drafter as it is used, and beside it, as ``MODEL``, the target if it adapts."""


class Trainer:
    """Runs a recipe.

    Args:
        recipe: made under ``seeded``, so that its initial weights are the seed's.
        settings: the loop's part is looked at; all of it is kept with the checkpoint.
        directory: for checkpoint and drafter. Where a checkpoint lies there, the run goes on.
        check: called with the directory of the drafter at every checkpoint.

    Raises:
        ParameterError: the checkpoint was made with other settings.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: TrainingSettings,
        directory: Path,
        check: Check | None = None,
    ) -> None:
        self.recipe, self.settings, self.directory = recipe, settings, directory
        self._check = check
        self._groups = recipe.groups()
        self._optimizer = torch.optim.AdamW(
            [{"params": list(group.parameters)} for group in self._groups],
            lr=settings.rate,
            betas=(0.9, 0.98),
            weight_decay=settings.weight_decay,
        )
        self.step, self.seconds = 0, 0.0
        directory.mkdir(parents=True, exist_ok=True)
        if self._checkpoint.exists():
            self._load()

    def run(self, until: int | None = None) -> dict[str, float]:
        """Train to the end, or until so many steps are done.

        Returns:
            What the last check measured; nothing without one.
        """
        settings, found = self.settings, dict[str, float]()
        end = settings.steps if until is None else min(until, settings.steps)
        while self.step < end:
            began = time.perf_counter()
            loss = self._learn()
            self.step, self.seconds = self.step + 1, self.seconds + time.perf_counter() - began
            if self.step % settings.log_every == 0:
                _log(step=self.step, seconds=self.seconds, loss=float(loss))
            if self.step % settings.check_every == 0 or self.step == end:
                self._save()
                found = self._evaluate()
        return found or self._evaluate()

    def _learn(self) -> Tensor:
        """One step; returns its loss."""
        settings, recipe = self.settings, self.recipe
        progress = self.step / settings.steps
        for group, entry in zip(self._groups, self._optimizer.param_groups, strict=True):
            entry["lr"] = settings.rate * self._schedule(progress) * group.scale(progress)
        with seeded(settings.seed, self.step + 1):
            batch = recipe.batch(self.step)
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
        self.recipe.save(self.directory / DRAFTER)
        if self._check is None:
            return {}
        self.recipe.module.eval()
        found = self._check(self.directory / DRAFTER)
        self.recipe.module.train()
        _log(step=self.step, **found)
        return found

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
        torch.save(state, draft)
        os.replace(draft, self._checkpoint)

    def _load(self) -> None:
        device = next(self.recipe.module.parameters()).device
        state = torch.load(self._checkpoint, weights_only=True, map_location=device)
        mine = self.settings.model_dump(mode="json")
        names = sorted((mine.keys() | state["settings"].keys()) - _FREE)
        for name in names:
            if mine.get(name) != state["settings"].get(name):
                raise ParameterError(
                    f"the run in {self.directory} has another {name}",
                    f"{state['settings'].get(name)!r}, not {mine.get(name)!r}",
                    "Go on with the same settings, or give another directory",
                )
        self.recipe.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        logger.info("going on from step %d", self.step)


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
