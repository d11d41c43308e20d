"""Slow links: transfers between two stages, and collectives within a group, one of them slowed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks._detector_cases import job_of, text_lengths
from detector import Detector
from resihp.contracts import Status, TelemetryBatch
from resihp.testing.scenarios import Fault, SlowGroup, SlowLink, collectives, steps_of, transfers


@dataclass
class LinkTally:
    """delays of the named links (None: never), wrong links, devices named slow."""

    delays: list[int | None]
    wrong_links: int = 0
    wrong_devices: int = 0


def link_trials(
    factor: float, trials: int, *, device: bool = False, blocking: bool = False
) -> LinkTally:
    """One link of a DP8 x PP4 job is slowed from a random step on; with `device`, a device instead,
    which must be told from a link.

    Both ends stamp the transfers, by clocks that differ by up to 1,000 s; with `blocking` the
    senders wait for their receivers, as Megatron-LM's do.
    """
    job, lengths = job_of(8, 4, 1), text_lengths()
    tally = LinkTally([])
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        replica = job.layout.replicas[int(rng.integers(8))]
        at, onset = int(rng.integers(1, 4)), int(rng.integers(10, 20))
        ends = (replica.stages[at - 1].ranks[0], replica.stages[at].ranks[0])
        slow = SlowLink(ranks=ends, factor=1.0 if device else factor, from_step=onset)
        faults = [Fault(rank=ends[1], factor=factor, from_step=onset)] if device else []
        detector, delay = Detector(job), None
        wrong: set[tuple[int, ...]] = set()
        for batch in steps_of(job, lengths, steps=30, seed=seed, faults=faults):
            step = int(batch.step[0])
            sent = transfers(
                job, batch, seed=seed, slow=slow, blocking=blocking, clock_spread_ms=1e6
            )
            changed = detector.update(TelemetryBatch.concat([batch, sent]))
            named = {v.rank for v in changed if v.status is Status.FAIL_SLOW}
            tally.wrong_devices += len(named - ({ends[1]} if device else set()))
            found = slow_links(detector)
            wrong |= found - (set() if device or step < onset else {ends})
            right = (ends[1] in named) if device else (ends in found)
            if right and delay is None and step >= onset:
                delay = step - onset + 1
        tally.delays.append(delay)
        tally.wrong_links += len(wrong)
    return tally


def slow_links(detector: Detector) -> set[tuple[int, ...]]:
    """Ranks of the links and groups that are named."""
    return {link.ends for link in detector.links() if link.status is Status.FAIL_SLOW}


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
            found = slow_links(detector)
            right = (bad in named) if device else (stage.ranks in found)
            wrong |= found - (set() if device or step < onset else {stage.ranks})
            if right and delay is None and step >= onset:
                delay = step - onset + 1
        tally.delays.append(delay)
        tally.wrong_links += len(wrong)
    return tally
