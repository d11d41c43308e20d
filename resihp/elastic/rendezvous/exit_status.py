"""Exit statuses of a rank's process for errors that are no defect of the training script.

An unhandled exception of this kind ends the process with one line on stderr in place of a traceback
and with a status that a supervisor can tell from a failure of the script (1). The numbers are those
of sysexits.h.
"""

from __future__ import annotations

import sys
from types import TracebackType

from resihp.contracts import (
    FencedOutError,
    JobStoppedError,
    JoinRefusedError,
    PreemptedError,
    ResiHPError,
    StateLostError,
)

JOB_STOPPED = 69  # EX_UNAVAILABLE
FENCED_OUT = 75  # EX_TEMPFAIL: the process may be started again as a joiner
JOIN_REFUSED = 78  # EX_CONFIG
PREEMPTED = 143  # as after SIGTERM

_STATUS: dict[type[ResiHPError], int] = {
    JobStoppedError: JOB_STOPPED,
    StateLostError: JOB_STOPPED,
    FencedOutError: FENCED_OUT,
    JoinRefusedError: JOIN_REFUSED,
    PreemptedError: PREEMPTED,
}


def install(rank: int) -> None:
    """End this process as described above; other exceptions keep the hook that is there."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        status = next((code for cls, code in _STATUS.items() if isinstance(error, cls)), None)
        if status is None:
            previous(kind, error, trace)
            return
        sys.stderr.write(f"rank {rank}: {kind.__name__}: {error}\n")
        raise SystemExit(status)

    sys.excepthook = hook
