"""`python -m resihp.launch`: `resihp run` without the command line's dependencies."""

from __future__ import annotations

import sys

from .supervisor import main

if __name__ == "__main__":
    sys.exit(main())
