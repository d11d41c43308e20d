"""Members of a made-up job that watch each other by the real logic, on a made-up clock."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from ..elastic.rendezvous.heartbeats import Heartbeats, prepare
from ..elastic.rendezvous.liveness import Beat
from ..elastic.rendezvous.store import Timeouts


class CountedStore(dist.Store):
    """Store in the memory of this process that counts requests.

    calls  number of requests; several keys of one request count once
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """Set the value of `key`."""
        self.calls += 1
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Value of `key`, which must be there."""
        self.calls += 1
        return self._values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values of `keys`, which must be there."""
        self.calls += 1
        return [self._values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` are there."""
        self.calls += 1
        return all(key in self._values for key in keys)

    def append(self, key: str, value: str) -> None:
        """Append to the value of `key`."""
        self.calls += 1
        self._values[key] = self._values.get(key, b"") + value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` if its value is `expected`, "" for none; returns the value after that."""
        self.calls += 1
        if self._values.get(key, b"").decode() == expected:
            self._values[key] = desired.encode()
        return self._values.get(key, expected.encode())


class MemoryTable:
    """Beats of the processes of one made-up host, which share `beats`, as one of them has them."""

    def __init__(self, host: str, beats: dict[int, Beat]) -> None:
        self.host, self._beats = host, beats
        self._rank, self._number = -1, 0

    def enter(self, rank: int, number: int) -> None:
        """Be process `number` of `rank`, whose beats follow."""
        self._rank, self._number = rank, number

    def beat(self, count: int) -> None:
        """Write beat number `count` of this process."""
        self._beats[self._rank] = Beat(self._number, count)

    def read(self) -> dict[int, Beat]:
        """Latest beat of each process by rank."""
        return dict(self._beats)

    def close(self) -> None:
        """Close the table."""


class SimulatedMembers:
    """Ranks on `hosts` hosts with `per_host` each, ranks of a host in succession.

    now_s    time of the clock
    calls    requests to the store by rank
    """

    def __init__(self, hosts: int, per_host: int, timeouts: Timeouts, *, seed: int = 0) -> None:
        self.now_s, self.timeouts = 0.0, timeouts
        self.store = CountedStore()
        self.calls = Counter[int]()
        self.ranks = range(hosts * per_host)
        prepare(self.store)
        self._random = random.Random(seed)
        self._beats: list[dict[int, Beat]] = [{} for _ in range(hosts)]
        self._per_host = per_host
        self._stopped = set[int]()
        self._missed = set[int]()
        self._poll_s = timeouts.poll.total_seconds()
        self.members = {rank: self._member(rank) for rank in self.ranks}
        self._wakes = [(self._random.uniform(0.0, self._poll_s), rank) for rank in self.ranks]
        heapq.heapify(self._wakes)
        for rank in self.ranks:
            self.enter(rank)

    def _member(self, rank: int) -> Heartbeats:
        host = rank // self._per_host
        table = MemoryTable(f"host{host}", self._beats[host])
        return Heartbeats(rank, self.timeouts, open_table=lambda _: table, clock=lambda: self.now_s)

    def enter(self, rank: int) -> None:
        """Start a new process of `rank` as a member, on its host."""
        self.members[rank] = self._member(rank)
        self.members[rank].enter(self.store)
        self._stopped.discard(rank)

    def stop(self, ranks: Collection[int]) -> None:
        """Suspend the processes of `ranks`, or kill them where no kernel tells that."""
        self._stopped.update(ranks)

    def kill(self, ranks: Collection[int]) -> None:
        """Kill the processes of `ranks`, which the kernel tells the others of their hosts."""
        self.stop(ranks)
        for rank in ranks:
            beats = self._beats[rank // self._per_host]
            beats[rank] = replace(beats[rank], has_ended=True)

    def resume(self, ranks: Collection[int]) -> None:
        """Continue suspended processes: what was due meanwhile is done at once, and once."""
        self._stopped.difference_update(ranks)
        for rank in sorted(self._missed.intersection(ranks)):
            self._missed.discard(rank)
            heapq.heappush(self._wakes, (self.now_s, rank))

    def run_until(self, end_s: float) -> None:
        """Let all processes that are not stopped beat and look until the clock is at `end_s`."""
        while self._wakes and self._wakes[0][0] < end_s:
            self.now_s, rank = heapq.heappop(self._wakes)
            if rank in self._stopped:
                self._missed.add(rank)
                continue
            member, before = self.members[rank], self.store.calls
            member.beat()
            if member.due_s() <= 0.0:
                member.watch(self.store)
            self.calls[rank] += self.store.calls - before
            pause_s = min(self._poll_s, max(member.due_s(), 0.0))
            late_s = self._random.uniform(0.0, 0.1 * self._poll_s)
            heapq.heappush(self._wakes, (self.now_s + pause_s + late_s, rank))
        self.now_s = end_s

    def lost(self, rank: int, waited_s: float = 0.0) -> set[int]:
        """Ranks that `rank` takes for lost, `waited_s` seconds into a wait for all."""
        member, before = self.members[rank], self.store.calls
        found = member.silent(self.store, self.ranks, waited_s, len(self.ranks))
        self.calls[rank] += self.store.calls - before
        return set(found)


def short_timeouts(heartbeat_s: float = 2.0) -> Timeouts:
    """Time-outs whose silence lasts `heartbeat_s`, with beats in the same ratio as usual."""
    return Timeouts(
        heartbeat=timedelta(seconds=heartbeat_s),
        connect=timedelta(seconds=6 * heartbeat_s),
        poll=timedelta(seconds=heartbeat_s / 50),
    )
