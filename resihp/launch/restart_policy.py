"""Decision after a failure: restart the ranks, or end the job. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from signal import SIGABRT

ATTEMPTS_WITHOUT_PROGRESS = 3
SHORT_ATTEMPT_S = 600.0
"""An attempt that ran for longer is taken for progress where no step is known."""
_NO_LATER = 1.5
_START_S = 30.0
_DEVICE_WORDS = re.compile(
    r"\b(?:cuda error|uncorrectable ecc|nccl error|ncclsystemerror|ncclinternalerror"
    r"|cudnn_status_execution_failed|nvrm: xid|xid[ :=]+\d{1,3})\b",
    re.IGNORECASE,
)
"""Errors of CUDA, NCCL and cuDNN, and the driver's Xid, whose codes have three digits at most."""
_SCRIPT_WORDS = (
    "cuda error: device-side assert",
    "cuda error: out of memory",
    "cuda error: misaligned address",
    "cuda error: invalid argument",
    "cuda error: invalid configuration",
    "cuda error: no kernel image",
    ", invalid usage",
    ", invalid argument",
    "ncclinvalidusage",
    "ncclinvalidargument",
    "'out of memory'",
)
"""Errors of CUDA and NCCL that a script makes on any device, as an index beyond the end of a table
does, or two ranks on one device."""
_UNSURE_WORDS = re.compile(
    r"unhandled ?cuda ?error|illegal memory access|illegal instruction|unspecified launch failure"
    r"|\bxid(?: \([^)]*\))?[ :=]+(?:13|31)\b",
    re.IGNORECASE,
)
"""Errors of a broken device that a kernel of the script can make as well."""
_BROKEN_MEMORY = "uncorrectable ecc"
_PEER_SOCKET_WORDS = ("connection refused", "connection closed by remote peer")
"""Details of a system error of NCCL that say that another rank ended first."""
_LOST_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "ncclremoteerror",
    "remote process exited",
)
_OWN_PIPE = "BrokenPipeError:"
"""Python's, of a script whose output nobody reads; torch raises others."""
_EXCEPTION = re.compile(r"(?!nccl)[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b.*")
_RANK_MARK = re.compile(r"^\[rank\d+\]: ?")
"""torch sets it before each line of a traceback, once there are process groups."""
_NCCL = "NCCL error in"
_BEHIND_NCCL = re.compile(
    r"\s*$|\s+File \"|Traceback|Exception raised from|frame #|\[[IWEF]\d|terminate called"
)
"""What follows the details of an error of NCCL."""


@dataclass(frozen=True)
class Failure:
    """Failure that ended an attempt; what fails after it is its consequence.

    attempt  number of the attempt, from 0
    status   exit status, or minus the signal that killed the process
    message  `error_line` of its stderr
    step     last step whose state is kept, -1 if there is none, or none that the launcher knows of
    node     index of a node that was lost with its launcher; None: a rank failed
    lasted_s seconds for which the ranks of the attempt had run
    """

    attempt: int
    rank: int
    status: int
    message: str = ""
    step: int = -1
    node: int | None = None
    lasted_s: float = 0.0

    @property
    def is_of_device(self) -> bool:
        """True if the words of the error are those of a broken accelerator or network card.

        `is_unsure` if a kernel of the script makes such errors as well.
        """
        is_device = self._has_raised and _DEVICE_WORDS.search(self.message) is not None
        return is_device and not self._says(_SCRIPT_WORDS) and not self.is_of_lost_peer

    @property
    def is_unsure(self) -> bool:
        """True if the error may be the script's: a device that makes it again is broken."""
        is_broken = _BROKEN_MEMORY in self.message.lower()
        return not is_broken and _UNSURE_WORDS.search(self.message) is not None

    @property
    def is_of_lost_peer(self) -> bool:
        """True if the words of the error say that another rank ended first."""
        if self.message.startswith(_OWN_PIPE):
            return False
        is_nccl = _NCCL in self.message
        return self._says(_LOST_PEER_WORDS) or (is_nccl and self._says(_PEER_SOCKET_WORDS))

    @property
    def is_of_script(self) -> bool:
        """True if the script ended by itself, and not by a signal, its device or another rank."""
        return self._has_raised and not self.is_of_device and not self.is_of_lost_peer

    @property
    def _has_raised(self) -> bool:
        """True if an exception ended the rank; after an error of CUDA torch's destructors abort."""
        is_abort = self.status == -SIGABRT and _EXCEPTION.fullmatch(self.message) is not None
        return self.status > 0 or is_abort

    def _says(self, words: Sequence[str]) -> bool:
        message = self.message.lower()
        return self._has_raised and any(word in message for word in words)

    def __str__(self) -> str:
        if self.node is not None:
            return f"node {self.node} was lost"
        how = f"killed by signal {-self.status}" if self.status < 0 else f"status {self.status}"
        if self.status < 0 and self._has_raised:
            how += f" after {self.message}"
        return f"rank {self.rank} failed ({how})"


def error_line(stderr: str) -> str:
    """Return the last line that names an exception, else the last one: libraries may warn after it.

    The lines behind an error of NCCL say what it was, and are put behind it.

    >>> error_line("Traceback ...\\n  File ...\\nValueError: no sample\\n[W] a socket was closed")
    'ValueError: no sample'
    >>> error_line("DistBackendError: NCCL error in: a.cpp:1, unhandled system error\\nLast error:")
    'DistBackendError: NCCL error in: a.cpp:1, unhandled system error Last error:'
    """
    lines = [_RANK_MARK.sub("", line) for line in stderr.splitlines()] or ["no message"]
    named = (at for at in reversed(range(len(lines))) if _EXCEPTION.fullmatch(lines[at]))
    first = next(named, len(lines) - 1)
    details = lines[first + 1 :] if _NCCL in lines[first] else []
    return " ".join([lines[first], *takewhile(lambda line: not _BEHIND_NCCL.match(line), details)])


@dataclass(frozen=True)
class Decision:
    """Answer to a failure: a restart or the end, and the reason."""

    restarts: bool
    why: str


def decide(failures: Sequence[Failure], *, max_restarts: int | None = None) -> Decision:
    """Decide after the last of a job's failures, oldest first.

    An error of the script that comes twice in a row at the same step would come again. After
    `ATTEMPTS_WITHOUT_PROGRESS` failures of any kind in a row at the same step, the next attempt is
    not expected to get further.

    A script that keeps its checkpoints elsewhere does not tell its step. An error is the same one
    then if it came no later in its attempt, up to the time of a start, and attempts are without
    progress if they were short and the user has set no limit.

    >>> decide([Failure(0, 2, -9)]).restarts
    True
    >>> bug = Failure(0, 1, 1, "ValueError: no such sample", step=6)
    >>> decide([bug]).restarts, decide([bug, bug]).restarts
    (True, False)
    """
    last = failures[-1]
    if max_restarts is not None and len(failures) > max_restarts:
        return Decision(False, f"{last}, and there have been {max_restarts} restarts")
    before = failures[-2] if len(failures) > 1 else None
    if before is not None and last.is_of_script and _is_repeated(before, last):
        return Decision(False, f"{last} in the same way as before: {last.message}")
    recent = failures[-ATTEMPTS_WITHOUT_PROGRESS:]
    if len(recent) == ATTEMPTS_WITHOUT_PROGRESS and _are_stuck(recent, max_restarts):
        return Decision(False, f"{last}, for the third time without progress")
    return Decision(True, str(last))


def _is_repeated(before: Failure, last: Failure) -> bool:
    """True if two failures are one: of the same step, with the same words."""
    if last.step < 0 and last.lasted_s > _NO_LATER * before.lasted_s + _START_S:
        return False
    return (before.status, before.message, before.step) == (last.status, last.message, last.step)


def _are_stuck(failures: Sequence[Failure], max_restarts: int | None) -> bool:
    """True if the last of these attempts has got no further than the first."""
    if len({failure.step for failure in failures}) > 1:
        return False
    is_known = failures[-1].step >= 0
    is_short = all(failure.lasted_s < SHORT_ATTEMPT_S for failure in failures)
    return is_known or (is_short and max_restarts is None)


def launcher_status(status: int) -> int:
    """Exit status of a launcher whose rank ended with `status`, negative for a signal."""
    return status if status >= 0 else 128 - status
