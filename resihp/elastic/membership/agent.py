"""Talks to the plan source off the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..events import Switch
from .plans import PlanSource
from .rendezvous import Rendezvous


class PlanAgent:
    """On the first rank alive, publishes each new plan once the one before is taken on.

    present     epoch and plan version of the rank
    is_settled  False while the layout is changing; a plan that was made before is then stale
    """

    def __init__(
        self,
        plans: PlanSource,
        rendezvous: Rendezvous,
        present: Callable[[], tuple[int, int]],
        is_settled: Callable[[], bool],
    ) -> None:
        self._plans, self._rendezvous = plans, rendezvous
        self._present, self._is_settled = present, is_settled
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resihp-agent", daemon=True)

    def start(self) -> None:
        """Begin to ask for plans."""
        self._thread.start()

    def close(self) -> None:
        """Stop; a question that is under way is abandoned."""
        self._over.set()

    def acknowledge(self, switch: Switch) -> None:
        """Tell the source that a plan holds, without waiting for it."""
        threading.Thread(
            target=self._plans.applied,
            args=(switch.plan, self._rendezvous.rank, switch.step, switch.pause_ms),
            name="resihp-acknowledge",
            daemon=True,
        ).start()

    def _run(self) -> None:
        published = (-1, -1)
        while not self._over.is_set():
            epoch, version = self._present()
            turn = (self._rendezvous.recovery, epoch)
            is_first = self._rendezvous.rank == self._rendezvous.alive[0]
            if not is_first or turn == published or not self._is_settled():
                self._over.wait(0.1)
                continue
            plan = self._plans.wait(version, 2.0)
            still = turn == (self._rendezvous.recovery, self._present()[0]) and self._is_settled()
            if plan is not None and still and not self._over.is_set():
                self._rendezvous.publish(epoch + 1, plan)
                published = turn
