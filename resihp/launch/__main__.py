"""`python -m resihp.launch`: `resihp run` without the command line's dependencies."""

from __future__ import annotations

import sys

from .init_process import run_below_init

if __name__ == "__main__":
    run_below_init()
    from .supervisor import main

    sys.exit(main())
