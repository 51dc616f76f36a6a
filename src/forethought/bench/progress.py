"""A progress bar on standard error: runs that were timed."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from forethought.bench.variant import Variant
from forethought.errors import DependencyError


class ProgressBar:
    """Call it after each run.

    Args:
        total: runs there will be.

    Raises:
        DependencyError: tqdm is not installed.
    """

    def __init__(self, total: int) -> None:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise DependencyError.missing("tqdm", "the progress bar", "eval") from error
        self._bar: Any = tqdm(total=total, desc="warming up", unit="run", dynamic_ncols=True)

    def __call__(self, variant: Variant, batch: int) -> None:
        """Move on by one."""
        self._bar.set_description(f"batch {batch}, {variant.label}", refresh=False)
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
