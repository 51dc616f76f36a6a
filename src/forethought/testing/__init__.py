"""Test suites for extensions of this package.

``check_drafter`` for a drafter, ``check_method`` for an inference-time method of one's own.
"""

from forethought.testing.drafter import check_drafter
from forethought.testing.method import check_method

__all__ = ["check_drafter", "check_method"]
