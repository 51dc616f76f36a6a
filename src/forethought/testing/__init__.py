"""Suites that anybody can run on what they have written for this package."""

from forethought.testing.drafter import check_drafter

__all__ = ["check_drafter"]
