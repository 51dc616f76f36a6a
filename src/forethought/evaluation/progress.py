"""A progress bar on standard error: problems solved, and how many of them rightly."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from forethought.errors import DependencyError
from forethought.evaluation.runner import Attempt


class ProgressBar:
    """One bar over all methods. Call it with each ``Attempt``.

    Args:
        total: attempts there will be.

    Raises:
        DependencyError: tqdm is not installed.
    """

    def __init__(self, total: int) -> None:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise DependencyError.missing("tqdm", "the progress bar", "eval") from error
        self._bar: Any = tqdm(total=total, desc="warming up", unit="problem", dynamic_ncols=True)
        self._label, self._right, self._seen = "", 0, 0

    def begin(self, label: str) -> None:
        """The next method is loaded, warmed up and at work on its first problem."""
        self._label, self._right, self._seen = label, 0, 0
        self._bar.set_postfix_str("", refresh=False)
        self._bar.set_description(f"{label}, warming up")

    def __call__(self, attempt: Attempt) -> None:
        """Move on by one."""
        if not self._seen:
            self._bar.set_description(self._label, refresh=False)
        self._right, self._seen = self._right + attempt.correct, self._seen + 1
        self._bar.set_postfix_str(f"{self._right}/{self._seen} right", refresh=False)
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
