"""Verdicts on a job's ranks, read in the background for the log of a trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from resihp.client import Client
from resihp.contracts import Advice, ServiceError, Status, Verdict
from resihp.formatting import plural, ratio

_INTERVAL_S = 5.0
_SEVERITY = (
    Status.HEALTHY,
    Status.INCONCLUSIVE,
    Status.SUSPECT,
    Status.FAIL_SLOW,
    Status.FAIL_STOP,
)
_ADVISED = (Status.FAIL_SLOW, Status.FAIL_STOP)


class VerdictReader:
    """Reads the verdicts on a job every few seconds, in a thread of its own.

    is_due      returns whether the sidecar may know of this training yet; what it knows before is
                of an earlier one
    on_failure  takes an unexpected error; no answer from the sidecar is none
    latest      verdicts of the last reading; () if there were none or it failed
    advice      on them; None if there was none
    """

    def __init__(
        self,
        source: Client,
        job: str,
        *,
        is_due: Callable[[], bool],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.latest: Sequence[Verdict] = ()
        self.advice: Advice | None = None
        self._source, self._job = source, job
        self._is_due, self._on_failure = is_due, on_failure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resihp-verdicts", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Read once more and end, in at most `timeout_s`."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._read()
        self._read()

    def _read(self) -> None:
        verdicts, advice = self._read_both() if self._is_due() else ((), None)
        self.latest, self.advice = verdicts, advice

    def _read_both(self) -> tuple[Sequence[Verdict], Advice | None]:
        verdicts: Sequence[Verdict] = ()
        try:
            verdicts = self._source.verdicts(self._job)
            if any(verdict.status in _ADVISED for verdict in verdicts):
                return verdicts, self._source.advice(self._job)
        except ServiceError:  # a sidecar without the latter still has the former
            pass
        except Exception as error:  # noqa: BLE001 the boundary: training goes on
            self._on_failure(error)
        return verdicts, None


def largest_slowdown(verdicts: Sequence[Verdict]) -> float:
    """Return the slowdown of the slowest rank.

    >>> largest_slowdown([Verdict(rank=0, status=Status.HEALTHY)])
    1.0
    """
    return max(verdict.slowdown for verdict in verdicts)


def summary(verdicts: Sequence[Verdict], advice: Advice | None = None) -> str:
    """Return the most severe verdict in a few words, and the advice.

    >>> slow = Verdict(rank=5, status=Status.FAIL_SLOW, slowdown=1.52, since_step=118)
    >>> fine = Verdict(rank=0, status=Status.HEALTHY)
    >>> summary([fine, slow]), summary([fine])
    ('rank 5 fail_slow 1.52x since step 118', 'healthy')
    >>> summary([slow], Advice(ranks=(5,), step_ms=152.0, without_ms=None, replaced_ms=100.0))
    'rank 5 fail_slow 1.52x since step 118; replace rank 5: steps 1.52x faster'
    """
    worst = max(verdicts, key=lambda one: (_SEVERITY.index(one.status), one.slowdown, -one.rank))
    same = [verdict for verdict in verdicts if verdict.status is worst.status]
    if worst.status is Status.HEALTHY or (
        worst.status is Status.INCONCLUSIVE and len(same) == len(verdicts)
    ):
        return worst.status.value
    parts = [f"rank {worst.rank} {worst.status.value}"]
    if worst.status in (Status.SUSPECT, Status.FAIL_SLOW):
        parts.append(ratio(worst.slowdown))
    if worst.since_step is not None:
        parts.append(f"since step {worst.since_step}")
    others = f", {plural(len(same) - 1, 'other rank')} too" if len(same) > 1 else ""
    told = f"; {advice.summary}" if advice is not None else ""
    return " ".join(parts) + others + told
