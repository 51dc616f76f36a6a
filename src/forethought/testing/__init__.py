"""Test suites for extensions of this package: run ``check_drafter`` on a drafter of your own."""

from forethought.testing.drafter import check_drafter

__all__ = ["check_drafter"]
