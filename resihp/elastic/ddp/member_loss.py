"""End of a process whose replica has lost another member, wherever in the user's code it is.

Collectives and transfers inside a replica are torch's. If a member dies, those of its mates
fail; if it is only stopped, they block until the time-out of their group. The other replicas go on
in either case, and the mates must end as processes that the job does without.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from resihp.contracts import FencedOutError, ResiHPError

from ..rendezvous import exit_status, keys
from ..rendezvous.consensus import past_decision
from ..rendezvous.membership import Rendezvous
from .step import ReplicaCoordinates

_SILENCES = 1.5
"""Time-outs of heartbeats within which a silence is known for sure: two levels notice it."""


class MemberLossWatch:
    """Ends this process with `exit_status.FENCED_OUT` once its replica has lost another member.

    - An unhandled error of torch that such a loss explains becomes a `FencedOutError`: the hook for
      unhandled errors waits `Timeouts.heartbeat` and a half for a death or a silence of a member.
      By then the rendezvous is closed: its generator of steps has ended with the error.
    - A process that is blocked when the other replicas have decided to go on without it is ended
      `Timeouts.heartbeat` later, if it has not noticed by then.
    """

    def __init__(self, rendezvous: Rendezvous, coordinates: ReplicaCoordinates) -> None:
        self._rendezvous, self._coordinates = rendezvous, coordinates
        self._mates = set(coordinates.ranks(coordinates.replica)) - {coordinates.rank}
        self._timeout_s = rendezvous.timeouts.heartbeat.total_seconds()
        self._closed = threading.Event()

    def start(self) -> None:
        """Watch from now on."""
        if not self._mates:
            return
        threading.Thread(target=self._watch, name="resihp-member-loss", daemon=True).start()
        previous = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if isinstance(error, RuntimeError) and not isinstance(error, ResiHPError):
                reason = self._await_loss()
                if reason is not None:
                    kind, error = FencedOutError, FencedOutError(reason)
            previous(kind, error, trace)

        sys.excepthook = hook

    def close(self) -> None:
        """End no blocked process any more: it has left the steps."""
        self._closed.set()

    def _await_loss(self) -> str | None:
        """Wait for the loss of a member; None if there is none before long."""
        rendezvous, start = self._rendezvous, time.monotonic()
        waited_s = 0.0
        with suppress(dist.DistError):  # the store is gone with the job
            while waited_s < _SILENCES * self._timeout_s:
                lost = rendezvous.lost(self._mates, waited_s)
                if lost or self.is_fenced_out():
                    said = f"rank {min(lost)}" if lost else "a member"
                    return f"replica {self._coordinates.replica} has lost {said}"
                time.sleep(rendezvous.pause_s)
                waited_s = time.monotonic() - start
        return None

    def _watch(self) -> None:
        try:
            while not self._closed.wait(self._timeout_s / 4):
                if self._rendezvous.is_broken and self.is_fenced_out():
                    break
        except dist.DistError:
            return
        if not self._closed.wait(self._timeout_s):
            sys.stderr.write(
                f"rank {self._coordinates.rank}: {FencedOutError.__name__}: it is blocked, and the "
                f"other replicas go on without replica {self._coordinates.replica}\n"
            )
            sys.stderr.flush()
            os._exit(exit_status.FENCED_OUT)  # the blocked thread takes no exception

    def is_fenced_out(self) -> bool:
        """Return True if the present recovery has ended without this rank.

        A joiner that waits for its invitation has no part in any yet.
        """
        rendezvous = self._rendezvous
        if rendezvous.rank not in rendezvous.alive:
            return False
        recovery = rendezvous.recovery  # set before `alive`: by now it is that of the invitation
        stores, key = rendezvous.stores, keys.decision(recovery)
        if not stores.ask(lambda: stores.store.check([key]), False):
            return False
        return rendezvous.rank not in past_decision(rendezvous, recovery).survivors
