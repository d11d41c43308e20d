"""The schedules that the plans of a job may choose from."""

from __future__ import annotations

from resihp.contracts import Job, Schedule

from .memory import Footprint


def plan_schedules(job: Job) -> tuple[Schedule, ...]:
    """What the job permits; where it says nothing its own schedule, and eager 1F1B beside 1F1B.

    Eager 1F1B runs the same passes on the same data and adds up the gradients in the same order;
    it only starts forwards earlier, and so holds more activations. It is a choice where the job
    says how much memory there is and what activations need, so that a plan is known to fit. A split
    backward runs other passes, so that the job has to permit it. Of interleaved stages the
    arrangement is searched under 1F1B, and their chunks made from it (`search.interleaved`).
    """
    if job.schedules:
        return job.schedules
    if job.schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        return (job.schedule,)
    footprint = Footprint.of(job, job.layout.dp)
    if job.schedule is Schedule.INTERLEAVED or not footprint.is_known:
        return (Schedule.ONE_F_ONE_B,)
    return Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B
