"""Watch of a job's members: requests to the store, and the delay until a loss is known.

    python -m benchmarks.liveness [--ranks 256,4096,16384] [--json PATH]

The logic is that of the product, over a store in the memory of this process that counts requests,
and on a made-up clock: neither the store's own time nor a network is in the delays. Eight ranks
share a host; the time-out is 5 s. Of a process that is suspended nothing is heard any more; of one
that is killed the kernel tells the others of its host. `flat` is the usual way, and how it was in
earlier versions: each member beats in the store, and a rank that waits asks for every peer. Of it
one waiting rank looks; the requests of all are that number times the ranks. Its delay begins with
the wait, which the loss causes at once.

The last rows are real: requests of this process to one store that the same ranks would share.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

from resihp.elastic.rendezvous.heartbeats import REQUESTS_PER_S
from resihp.elastic.rendezvous.store import Timeouts, connect, host_store
from resihp.testing.simulated_members import CountedStore, SimulatedMembers

from ._report import machine, print_table, write_json

_PER_HOST = 8
_TIMEOUTS = Timeouts()
_TIMEOUT_S = _TIMEOUTS.heartbeat.total_seconds()
_POLL_S = _TIMEOUTS.poll.total_seconds()
_WARM_S, _STEADY_S, _STEP_S = 3.0, 5.0, 0.05
_SEEDS = 3
_MOST_REPEATED = 1024  # ranks of jobs whose losses are repeated with other seeds
_FLAT_READS = 10
_COLUMNS = ("ranks", "a look: flat", "two levels", "a host's watcher", "the job's watcher",
            "all ranks, requests/s: flat", "two levels")  # fmt: skip
_LOOK = ("ranks", "flat ms", "two levels ms", "ratio")
_DELAYS = ("ranks", "lost", "flat s", "suspended s", "of the time-out", "killed s")


class _FlatReader:
    """Reads the heartbeats of all peers, three requests for each."""

    def __init__(self, store: CountedStore) -> None:
        self._store, self._seen = store, dict[int, tuple[int, int]]()

    def silent(self, ranks: Collection[int]) -> set[int]:
        """Ranks that have not beaten for ten reads."""
        silent = set[int]()
        for rank in ranks:
            key = f"heartbeat/{rank}"
            beat = int(self._store.get(key)) if self._store.check([key]) else 0
            last, reads = self._seen.get(rank, (-1, 0))
            reads = reads + 1 if beat == last else 0
            self._seen[rank] = (beat, reads)
            if reads >= _FLAT_READS or self._store.check([f"dead/{rank}"]):
                silent.add(rank)
        return silent


def _flat(ranks: int) -> tuple[int, float]:
    """Requests of one look at all peers, and seconds from a loss until it is known.

    The rank that waits begins to look a second into the wait, which the loss causes.
    """
    store = CountedStore()
    reader, lost = _FlatReader(store), ranks - 1
    interval_s, now_s, looks, calls = _TIMEOUT_S / _FLAT_READS, 1.0, 0, 0
    store.set(f"heartbeat/{lost}", "10")
    while True:
        for rank in range(ranks - 1):
            store.set(f"heartbeat/{rank}", str(10 + looks))
        before = store.calls
        found = reader.silent(range(1, ranks))
        calls, looks = calls or store.calls - before, looks + 1
        if found:
            return calls, now_s
        now_s += interval_s + _POLL_S / 4  # a wait looks between two slices of 50 ms


def _losses(ranks: int) -> dict[str, Callable[[SimulatedMembers], set[int]]]:
    last = ranks - _PER_HOST
    return {
        "a rank": lambda job: {last + 3},
        "a host's watcher": lambda job: {last},
        "the job's watcher": lambda job: {_watcher(job)},
        "a host": lambda job: set(range(last, ranks)),
        "the job's watcher's host": lambda job: _host_of(_watcher(job)),
        "a tenth of the hosts and the job's watcher": lambda job: {_watcher(job)}.union(
            *(_host_of(first) for first in range(0, ranks, 10 * _PER_HOST))
        ),
    }


def _host_of(rank: int) -> set[int]:
    first = rank - rank % _PER_HOST
    return set(range(first, first + _PER_HOST))


def _watcher(job: SimulatedMembers) -> int:
    """Rank of the job's watcher: the one with the most requests of late."""
    before = dict(job.calls)
    job.run_until(job.now_s + 1.0)
    return max(job.ranks, key=lambda rank: job.calls[rank] - before.get(rank, 0))


def _delay_s(job: SimulatedMembers, lost: set[int], *, are_killed: bool) -> float:
    """Seconds until a rank that is not lost knows exactly the `lost` ones."""
    start_s, observer = job.now_s, max(set(job.ranks) - lost)
    (job.kill if are_killed else job.stop)(lost)
    while job.lost(observer) != lost:
        job.run_until(job.now_s + _STEP_S)
    return job.now_s - start_s


def _requests(ranks: int) -> dict[str, Any]:
    """Requests in the steady state, all ranks alive."""
    job = SimulatedMembers(ranks // _PER_HOST, _PER_HOST, _TIMEOUTS)
    job.run_until(_WARM_S)
    watcher = _watcher(job)
    job.calls.clear()
    job.run_until(job.now_s + _STEADY_S)
    looks = _STEADY_S / job.members[0].interval_s
    of_watchers = {rank: job.calls[rank] / looks for rank in job.ranks if job.calls[rank]}
    others = [calls for rank, calls in of_watchers.items() if rank != watcher]
    watched = sum(job.calls.values()) / _STEADY_S
    job.calls.clear()
    assert not job.lost(1)
    waiting_s = max(job.members[1].interval_s, ranks / REQUESTS_PER_S)
    flat, _ = _flat(ranks)
    return {
        "ranks": ranks,
        "flat": flat,
        "look": job.calls[1],
        "host_watcher": statistics.median(others) if others else 0.0,
        "job_watcher": of_watchers[watcher],
        "flat_per_s": ranks * (flat / (_TIMEOUT_S / _FLAT_READS) + 1 / _POLL_S),
        "per_s": watched + ranks / waiting_s,
    }


def _delays(ranks: int, seeds: int) -> list[dict[str, Any]]:
    rows, seeds = [], 1 if ranks > _MOST_REPEATED else seeds
    for lost, choose in _losses(ranks).items():
        delays: dict[bool, list[float]] = {}
        for are_killed in (False, True):
            for seed in range(seeds):
                job = SimulatedMembers(ranks // _PER_HOST, _PER_HOST, _TIMEOUTS, seed=seed)
                job.run_until(_WARM_S + seed * 0.13)
                delay_s = _delay_s(job, choose(job), are_killed=are_killed)
                delays.setdefault(are_killed, []).append(delay_s)
        _, flat_s = _flat(min(ranks, 64))  # the same for any number of ranks
        rows.append({"ranks": ranks, "lost": lost, "flat_s": flat_s, "delays_s": delays[False],
                     "of_timeout": max(delays[False]) / _TIMEOUT_S,
                     "killed_s": delays[True]})  # fmt: skip
    return rows


def _real(ranks: int, seconds: float = 1.0) -> dict[str, Any]:
    """Time of one look at a real store on this machine: flat, and as it is now."""
    server = host_store("127.0.0.1", 0, timedelta(seconds=30))
    store = connect("127.0.0.1", server.port, "bench", _TIMEOUTS)
    for rank in range(ranks):
        store.set(f"heartbeat/{rank}", "1")
    for key in ("job", "history"):
        store.set(key, f"1|host|0-{ranks - 1}|")
    peers = _FlatReader(store)  # type: ignore[arg-type]
    flat_ms = _median_ms(lambda: peers.silent(range(1, ranks)), seconds)
    now_ms = _median_ms(lambda: store.multi_get(["job", "history"]), seconds)
    return {"ranks": ranks, "flat_ms": flat_ms, "ms": now_ms}


def _median_ms(look: Callable[[], object], seconds: float) -> float:
    times, end = list[float](), time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        look()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="256,4096,16384")
    parser.add_argument("--seeds", type=int, default=_SEEDS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sizes = [int(size) for size in given.ranks.split(",")]
    requests = [_requests(ranks) for ranks in sizes]
    print_table("Requests to the store, all ranks alive and waiting", _COLUMNS, [
        (f"{r['ranks']:,}", f"{r['flat']:,}", f"{r['look']}", f"{r['host_watcher']:.1f}",
         f"{r['job_watcher']:.1f}", f"{r['flat_per_s']:,.0f}", f"{r['per_s']:,.0f}")
        for r in requests
    ])  # fmt: skip
    delays = [row for ranks in sizes for row in _delays(ranks, given.seeds)]
    print_table("Delay until a loss is known that no launcher reports", _DELAYS, [
        (f"{r['ranks']:,}", r["lost"], f"{r['flat_s']:.1f}",
         f"{min(r['delays_s']):.1f} to {max(r['delays_s']):.1f}", f"{r['of_timeout']:.2f}x",
         f"{min(r['killed_s']):.2f} to {max(r['killed_s']):.2f}")
        for r in delays
    ])  # fmt: skip
    real = [_real(ranks) for ranks in sizes]
    print_table("A look at a real store on this machine", _LOOK, [
        (f"{r['ranks']:,}", f"{r['flat_ms']:,.1f}", f"{r['ms']:.3f}",
         f"{r['flat_ms'] / r['ms']:,.0f}x") for r in real
    ])  # fmt: skip
    print(machine())
    if given.json is not None:
        write_json(given.json, {"requests": requests, "delays": delays, "real": real})


if __name__ == "__main__":
    main()
