"""Slow links: transfers between two stages, and collectives within a group, one of them slowed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks._detector_cases import job_of, text_lengths
from detector import Detector
from resihp.contracts import Job, Op, Status, TelemetryBatch
from resihp.testing.scenarios import Fault, SlowGroup, collectives, steps_of

Link = tuple[int, int]


@dataclass
class LinkTally:
    """delays of the named links (None: never), wrong links, devices named slow."""

    delays: list[int | None]
    wrong_links: int = 0
    wrong_devices: int = 0


def transfers(job: Job, step: int, slow: Link | None, factor: float, seed: int) -> TelemetryBatch:
    """What every stage receives in a step, one record a microbatch; 5% noise, some of 50%."""
    rng = np.random.default_rng((seed, step))
    pairs = [
        (after.ranks[0], before.ranks[0], microbatch)
        for dp, replica in enumerate(job.layout.replicas)
        for before, after in zip(replica.stages, replica.stages[1:], strict=False)
        for microbatch in range(job.quotas[dp])
    ]
    rank, peer, microbatch = (np.array(column) for column in zip(*pairs, strict=True))
    times = 2.0 * rng.lognormal(0.0, 0.05, rank.size)
    times *= np.where(rng.random(rank.size) < 0.02, 1.5, 1.0)
    if slow is not None:
        times *= np.where((rank == slow[0]) & (peer == slow[1]), factor, 1.0)
    return TelemetryBatch(
        rank=rank,
        peer=peer,
        step=np.full(rank.size, step),
        microbatch=microbatch,
        op=np.full(rank.size, int(Op.P2P)),
        compute_ms=times,
    )


def link_trials(factor: float, trials: int) -> LinkTally:
    """One link of a DP8 x PP4 job is slowed from a random step on."""
    job, lengths = job_of(8, 4, 1), text_lengths()
    tally = LinkTally([])
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        replica = job.layout.replicas[int(rng.integers(8))]
        at, onset = int(rng.integers(1, 4)), int(rng.integers(10, 20))
        slow = (replica.stages[at].ranks[0], replica.stages[at - 1].ranks[0])
        detector, delay = Detector(job), None
        wrong: set[Link] = set()
        for batch in steps_of(job, lengths, steps=30, seed=seed):
            step = int(batch.step[0])
            sent = transfers(job, step, slow if step >= onset else None, factor, seed)
            changed = detector.update(TelemetryBatch.concat([batch, sent]))
            tally.wrong_devices += sum(v.status is Status.FAIL_SLOW for v in changed)
            found = {(link.rank, link.peer) for link in detector.links()}
            wrong |= found - {slow} if step >= onset else found
            if slow in found and delay is None and step >= onset:
                delay = step - onset + 1
        tally.delays.append(delay)
        tally.wrong_links += len(wrong)
    return tally


def group_trials(factor: float, trials: int, *, device: bool = False) -> LinkTally:
    """A link within one tensor-parallel group of a DP4 x PP2 x TP2 job is slowed from a random step
    on; with `device`, one of its devices instead, which must be told from a link."""
    job, lengths = job_of(4, 2, 2), text_lengths()
    tally = LinkTally([])
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        onset = int(rng.integers(10, 20))
        stage = job.layout.replicas[int(rng.integers(4))].stages[int(rng.integers(2))]
        slow = SlowGroup(ranks=stage.ranks, factor=1.0 if device else factor, from_step=onset)
        bad = stage.ranks[int(rng.integers(2))]
        faults = [Fault(rank=bad, factor=factor, from_step=onset)] if device else []
        detector, delay = Detector(job), None
        wrong: set[tuple[int, ...]] = set()
        for batch in steps_of(job, lengths, steps=30, seed=seed, faults=faults, coupled=True):
            step = int(batch.step[0])
            sent = collectives(job, batch, seed=seed, slow=slow)
            changed = detector.update(TelemetryBatch.concat([batch, sent]))
            named = {v.rank for v in changed if v.status is Status.FAIL_SLOW}
            tally.wrong_devices += len(named - ({bad} if device else set()))
            found = {link.group for link in detector.links()}
            right = (bad in named) if device else (stage.ranks in found)
            wrong |= found - (set() if device or step < onset else {stage.ranks})
            if right and delay is None and step >= onset:
                delay = step - onset + 1
        tally.delays.append(delay)
        tally.wrong_links += len(wrong)
    return tally
