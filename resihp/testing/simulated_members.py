"""Members of a made-up job that watch each other by the real logic, on a made-up clock."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from ..elastic.rendezvous.heartbeats import Heartbeats, prepare
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


@dataclass
class MemoryTable:
    """Beats of the processes of one made-up host."""

    host: str
    beats: dict[int, tuple[int, int]] = field(default_factory=dict)

    def beat(self, rank: int, number: int, beat: int) -> None:
        """Write beat number `beat` of process `number` of `rank`."""
        self.beats[rank] = (number, beat)

    def read(self) -> dict[int, tuple[int, int]]:
        """(number, beat) of each process by rank."""
        return dict(self.beats)

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
        self._tables = [MemoryTable(f"host{index}") for index in range(hosts)]
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
        table = self._tables[rank // self._per_host]
        return Heartbeats(rank, self.timeouts, open_table=lambda _: table, clock=lambda: self.now_s)

    def enter(self, rank: int) -> None:
        """Start a new process of `rank` as a member, on its host."""
        self.members[rank] = self._member(rank)
        self.members[rank].enter(self.store)
        self._stopped.discard(rank)

    def stop(self, ranks: Collection[int]) -> None:
        """Kill, or suspend, the processes of `ranks`."""
        self._stopped.update(ranks)

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
