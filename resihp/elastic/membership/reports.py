"""Waits for what each survivor of a loss reports, and for nobody who will not report any more."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch.distributed as dist

from .agreement import Report, read_report
from .heartbeats import Heartbeats


def collect_reports(
    store: dist.Store,
    heartbeats: Heartbeats,
    ranks: Collection[int],
    *,
    prefix: str,
    decided: str,
    bound: Collection[Collection[int]] = (),
) -> dict[int, Report]:
    """The reports `prefix/R` of all `ranks` that are alive; the key `decided` ends the wait.

    Of a set of `bound` ranks none can go on without the others: when one of them is lost, the
    others, who may be stuck in an exchange with it, are not waited for either.
    """
    start = next_look = time.monotonic()
    missing, reports = set(ranks), dict[int, Report]()
    while missing and not store.check([decided]):
        lost = set[int]()
        for rank in sorted(missing):
            if store.check([f"{prefix}/{rank}"]):
                reports[rank] = read_report(store.get(f"{prefix}/{rank}"))
                missing.discard(rank)
            elif store.check([f"dead/{rank}"]):
                lost.add(rank)
        if missing and (now := time.monotonic()) >= next_look:
            next_look = now + heartbeats.look_s
            lost |= set(heartbeats.silent(missing, now - start))
        missing -= lost.union(*(them for them in bound if lost & set(them)))
        time.sleep(0.005 if missing else 0.0)
    return reports
