"""ReCycle (SOSP'24): peers of a dead stage take over its microbatches, inside the bubbles."""

from __future__ import annotations

from resihp.contracts import Job, Schedule
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay

from ..costs import layer_cost, transfer_ms
from ..simulator import stage_times
from .base import STOPPED, Outcome, Pause, Speeds, speed_of


def recycle(job: Job, speeds: Speeds) -> Outcome:
    """Work of every stage shared evenly by its peers that work, with a split backward.

    A group that lost a rank does no work; one with a straggler works or not, whichever is quicker
    for its stage (ReCycle knows failed workers only). Its decoupled backward fills the bubbles,
    modelled as ZB-H1 over stages that are longer by the work they took over.
    """
    replicas = job.layout.replicas
    if len({len(replica.stages) for replica in replicas}) > 1:
        return Outcome(STOPPED.step_ms, detail="needs replicas of one shape")
    forward, backward = stage_times(job, replicas[0], {})
    longer = []
    for peers in zip(*(replica.stages for replica in replicas), strict=True):
        rates = sorted((speed_of(speeds, stage) for stage in peers), reverse=True)
        working = [(k + 1) * rate for k, rate in enumerate(rates) if rate > 0.0]
        if not working:
            return Outcome(STOPPED.step_ms, detail="no peer of a stage is left")
        longer.append(len(replicas) / max(working))
    quota = -(-job.microbatches // len(replicas))
    orders = [
        stage_order(Schedule.ZERO_BUBBLE, stage=s, stages=len(longer), microbatches=quota)
        for s in range(len(longer))
    ]
    durations = pass_durations(
        orders,
        [[f * k] for f, k in zip(forward, longer, strict=True)],
        [[b * k] for b, k in zip(backward, longer, strict=True)],
    )
    span = replay(orders, durations, p2p=transfer_ms(job)).span
    step_ms = span + layer_cost(job).step_ms
    quotas = (quota,) * len(replicas)
    return Outcome(step_ms, None, quotas, Pause.LIVE, Schedule.ZERO_BUBBLE)
