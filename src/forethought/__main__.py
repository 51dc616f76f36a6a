"""``python -m forethought`` is the ``forethought`` command."""

import sys

from forethought.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
