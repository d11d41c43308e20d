"""What is known of the devices of a job, and whether that calls for another plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from resihp.contracts import InfeasibleError, Job, Plan, Verdict, from_json, to_json
from scheduler.switching_rule import SkiRental

from .fault_horizon import FaultHorizon
from .planning import Planner, Retry, is_news, speeds_of, why_kept


@dataclass(frozen=True)
class NoPlan:
    """Why there is none: `state` is `kept` or `infeasible`, `told` what the API says with it."""

    state: str
    told: dict[str, Any]


class Replanning:
    """Speeds that the last plan was made for, ranks that wait outside, and offers not yet taken."""

    def __init__(self, job: Job, planner: Planner) -> None:
        self.known: dict[int, float] = {}
        self.horizon = FaultHorizon(job)
        self._job = job
        self._planner = planner
        self._joiners: set[int] = set()
        self._rental = SkiRental()
        self._retry = Retry()

    def joined(self, ranks: Iterable[int], *, working: Iterable[int]) -> None:
        """Ranks are ready, whatever was said of those who had their numbers."""
        self._joiners |= set(ranks) - set(working)

    def wait_no_more(self, ranks: Iterable[int]) -> None:
        """These ranks work now, or are gone."""
        self._joiners -= set(ranks)

    def forget_joiners(self) -> None:
        """Who waits is asked anew: a job that has lost ranks cannot take others in before its
        next step, and announces them again then."""
        self.known = {rank: v for rank, v in self.known.items() if rank not in self._joiners}
        self._joiners.clear()

    def refused(self) -> None:
        """The job will not take on the last plan. If it counted on joiners, these may be gone, and
        a plan without them is called for."""
        if self._joiners:
            self.forget_joiners()
            self.known = {}

    def taken_over(self, lost: Iterable[int]) -> None:
        """The job has made a plan by itself, which knows of the lost ranks and of nothing else."""
        lost = {*lost, *(rank for rank, speed in self.known.items() if speed == 0.0)}
        self.known = dict.fromkeys(sorted(lost), 0.0)
        self._rental, self._retry = SkiRental(), Retry()

    def decide(
        self, job: Job, current: Plan, verdicts: Iterable[Verdict], *, step: int, clock_s: float
    ) -> Plan | NoPlan | None:
        """A plan, or why there is none; None where the speeds are those of the last one and no
        attempt is due."""
        speeds = speeds_of(verdicts, self.known, current.layout.ranks)
        speeds |= dict.fromkeys(self._joiners, 1.0)
        if is_news(self.known, speeds):
            self.known, self._retry = speeds, Retry()
        elif clock_s < self._retry.due_s:
            return None
        horizon_steps = self.horizon.steps(clock_s)
        try:
            decision = self._planner.replan(
                job, current, speeds, step=step, rental=self._rental, horizon_steps=horizon_steps
            )
        except InfeasibleError as error:
            self._retry = self._retry.failed(clock_s)
            return NoPlan("infeasible", {"constraint": error.constraint, "detail": error.detail})
        self._retry, self._rental = Retry(), decision.rental
        return decision.plan or NoPlan("kept", {"detail": why_kept(decision)})

    def count_step(self) -> Plan | None:
        """Hold a step under the newest plan against the offer; the offer's plan once it pays."""
        self._rental = self._rental.stepped()
        if self._rental.offer is None or not self._rental.due:
            return None
        offer, self._rental = self._rental.offer, SkiRental()
        return offer.plan

    def save(self) -> dict[str, Any]:
        """For `restore`."""
        return {
            "known": {str(rank): speed for rank, speed in self.known.items()},
            "joiners": sorted(self._joiners),
            "rental": to_json(self._rental),
            "horizon": self.horizon.save(),
        }

    def restore(self, saved: dict[str, Any], *, failed_at_s: float | None) -> None:
        """Be as saved; `failed_at_s` is when planning failed, if it did."""
        self.known = {int(rank): speed for rank, speed in saved["known"].items()}
        self._joiners = set(saved["joiners"])
        self._rental = from_json(SkiRental, saved["rental"])
        self.horizon = FaultHorizon(self._job, **saved["horizon"])
        self._retry = Retry() if failed_at_s is None else Retry().failed(failed_at_s)
