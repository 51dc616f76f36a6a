"""Tasks that keep a sequence beyond its request, as a named snapshot of tokens and KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forethought.scaffolding.base_task import Task
from forethought.scaffolding.task import GenerationTask


@dataclass(eq=False)
class SaveSessionTask(Task):
    """Save the sequence of a finished generation, tokens and KV, as a named snapshot.

    For workers that hold sequences (``EngineWorker``); ``RestoreSessionTask`` goes on from it, in
    this request or in any later one, of another process too.
    """

    source: GenerationTask | None = None
    """Its prompt and output are saved."""
    suffix: str = ""
    """Text appended to them."""
    name: str = ""


@dataclass(eq=False)
class RestoreSessionTask(Task):
    """Open a named snapshot, to fork tasks from it: ``restore.session.fork(question)``."""

    name: str = ""
    found: bool = field(default=False, init=False)
    """Whether there is a snapshot of this name."""
    text: str | None = field(default=None, init=False)
    """The text of all its tokens, special ones included."""
    request_handle: Any = field(default=None, init=False, repr=False)
    """The worker's handle of its sequence."""

    @property
    def session(self) -> GenerationTask:
        """A task whose prompt is the snapshot, only to be forked."""
        task = GenerationTask(input_str=self.text)
        task.worker_tag, task.request_handle = self.worker_tag, self.request_handle
        return task
