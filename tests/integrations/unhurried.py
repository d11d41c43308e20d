"""Run a script whose monitors have time to send their last records, however busy the machine is.

`unhurried.py SCRIPT ARGUMENT...`
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from resihp.hooks import Monitor, _sender, monitor
from resihp.integrations import _observer

PATIENCE_S = 300.0


def main() -> None:
    """Run the script as the interpreter would."""
    _observer._END_TIMEOUT_S = monitor._CLOSE_TIMEOUT_S = _sender._EXIT_TIMEOUT_S = PATIENCE_S
    Monitor.close.__defaults__ = (PATIENCE_S,)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
