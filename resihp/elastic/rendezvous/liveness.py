"""Liveness of the processes of a job, decided on two levels: the host and the job. Pure.

1. Every member counts up a beat in a table that the processes of its host share, and holds a lock
   there by which the kernel tells that it has ended.
2. `LOOKS` times per time-out every member looks at this table. The first rank of the host whose
   beat moves is the host's watcher. It writes a `LivenessSummary` of the host to the store.
3. One of the hosts' watchers is the job's watcher. It reads the summaries of all hosts and writes
   one of the job. Once that has not changed for `TAKEOVER_LOOKS`, the watchers of the hosts claim
   it by compare-and-set. The one that succeeds continues the counts of its predecessor.
4. A rank that waits reads the summary of the job and the history of processes.

Time is counted in looks instead of seconds: while a watcher was suspended, the others may have been
suspended too. A process counts as silent at the earliest one time-out after its last beat.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Generic, TypeVar

LOOKS = 20
"""Looks at an unchanged beat after which a process counts as silent."""
TAKEOVER_LOOKS = 4
"""Looks at an unchanged beat, or summary, after which its watcher is replaced."""
HOST_LOOKS = LOOKS + 2
"""Looks at the unchanged summary of a host after which all of its processes count as silent. It was
written up to a look before they were suspended, if they were. Where the watcher is killed while all
others of its host are suspended, they count as silent up to `TAKEOVER_LOOKS` too early."""

Key = TypeVar("Key", bound=Hashable)
Processes = Mapping[int, int]
"""Processes by rank; the number tells successive processes of a rank apart: that of the invitation
with which the process became a member, 0 for those at the start."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Latest beat of a process.

    number     tells successive processes of a rank apart, as in `Processes`
    count      of its beats
    has_ended  it will not beat again; False if that is not known
    """

    number: int
    count: int
    has_ended: bool = False


class SilenceCounter(Generic[Key]):
    """Counts the looks at values that do not change.

    >>> counter = SilenceCounter[str]()
    >>> [counter.look("a", beat) for beat in (1, 1, 2, 2, 2)]
    [0, 1, 0, 1, 2]
    """

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[object, int]] = {}

    def look(self, key: Key, value: object) -> int:
        """Note the `value` of `key`; returns how many looks in succession found no new one."""
        before, looks = self._seen.get(key, (None, 0))
        looks = looks + 1 if value == before else 0
        self._seen[key] = value, looks
        return looks

    def carry(self, key: Key, value: object, looks: int) -> None:
        """Continue a count of another process."""
        self._seen[key] = value, looks

    def counts(self) -> dict[Key, tuple[object, int]]:
        """Return the last value of each key, and the looks that found no new one."""
        return dict(self._seen)


@dataclass(frozen=True)
class LivenessSummary:
    """Processes of a host, or of all hosts.

    count    of the summaries of `writer`
    writer   watcher that wrote it: a rank of the host, or a host; "" before the first one
    present  all processes that have become members
    silent   those of them that have not beaten for the time-out
    """

    count: int = 0
    writer: str = ""
    present: Processes = field(default_factory=dict)
    silent: Processes = field(default_factory=dict)

    def encode(self) -> str:
        """Text form, short where ranks follow one another.

        >>> LivenessSummary(4, "2", {0: 0, 1: 0, 2: 0, 7: 1}, {7: 1}).encode()
        '4|2|0-2,7#1|7#1'
        """
        present, silent = format_processes(self.present), format_processes(self.silent)
        return f"{self.count}|{self.writer}|{present}|{silent}"

    @classmethod
    def decode(cls, raw: bytes) -> LivenessSummary:
        """Read the text form."""
        count, writer, present, silent = raw.decode().split("|")
        return cls(int(count), writer, parse_processes(present), parse_processes(silent))


def format_processes(processes: Processes) -> str:
    """Text form of processes: ranges of ranks, each with the number of its processes if not 0."""
    runs: list[list[int]] = []
    for rank in sorted(processes):
        number = processes[rank]
        if runs and runs[-1][1] == rank - 1 and runs[-1][2] == number:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank, number])
    return ",".join(
        (f"{first}-{last}" if last > first else f"{first}") + (f"#{number}" if number else "")
        for first, last, number in runs
    )


@lru_cache(maxsize=1 << 14)
def parse_processes(text: str) -> Processes:
    """Read the text form of `format_processes`.

    >>> parse_processes("0-2,7#1")
    {0: 0, 1: 0, 2: 0, 7: 1}
    """
    processes: dict[int, int] = {}
    for run in text.split(",") if text else ():
        ranks, _, number = run.partition("#")
        first, _, last = ranks.partition("-")
        for rank in range(int(first), int(last or first) + 1):
            processes[rank] = int(number or 0)
    return processes


class ProcessHistory:
    """Ends of processes and invitations to ranks, in the order of the store.

    An invitation to a rank makes a new process of it a member: what is known of earlier ones,
    their silence included, no longer counts. Several members may write the same one, late too.

    invitations  number of the newest one to each rank
    """

    def __init__(self, raw: bytes = b"") -> None:
        self.ends, self.invitations = Counter[int](), Counter[int]()
        dead = set[int]()
        for entry in filter(None, raw.decode().split(",")):
            rank, number = map(int, entry[1:].split(":"))
            if entry[0] == "e":
                self.ends[rank] += 1
                dead.add(rank)
            elif number > self.invitations[rank]:
                self.invitations[rank] = number
                dead.discard(rank)
        self.dead = frozenset(dead)

    @staticmethod
    def end(rank: int) -> str:
        """Entry for the end of the process of `rank`."""
        return f"e{rank}:0,"

    @staticmethod
    def invitation(rank: int, number: int) -> str:
        """Entry for invitation `number`, which answers that announcement of `rank`."""
        return f"i{rank}:{number},"


class LivenessView:
    """The state of the members as a waiting rank knows it from `summary` and `history`.

    lost  ranks whose process has ended or is silent
    """

    def __init__(self, summary: LivenessSummary, history: ProcessHistory) -> None:
        self._summary, self._history = summary, history
        self.lost = history.dead | frozenset(self._current(summary.silent))

    def lost_among(self, ranks: Iterable[int], *, is_overdue: bool) -> list[int]:
        """Return the lost ones of `ranks`; if `is_overdue`, those that never started too."""
        lost = self.lost.intersection(ranks) if self.lost else frozenset[int]()
        if is_overdue:
            lost |= {rank for rank in ranks if rank not in self._started}
        return sorted(lost)

    @cached_property
    def _started(self) -> frozenset[int]:
        return frozenset(self._current(self._summary.present))

    def _current(self, processes: Processes) -> Iterable[int]:
        invitations = self._history.invitations
        if not invitations:
            return processes
        return (rank for rank, number in processes.items() if number >= invitations[rank])


class HostWatcher:
    """Watch of one host by one of its ranks.

    rank   this rank
    ended  ranks of this host whose process has ended, as of the last look
    """

    def __init__(self, rank: int) -> None:
        self.ended = frozenset[int]()
        self._rank, self._count = rank, 0
        self._counter = SilenceCounter[int]()

    def look(self, beats: Mapping[int, Beat]) -> LivenessSummary | None:
        """Summary to write if this rank is the host's watcher, else None.

        beats  of the processes of this host by rank, this rank's among them
        """
        looks = {rank: self._counter.look(rank, beats[rank]) for rank in sorted(beats)}
        self.ended = frozenset(rank for rank, beat in beats.items() if beat.has_ended)
        looks |= dict.fromkeys(self.ended, LOOKS)
        first = next((rank for rank, missed in looks.items() if missed < TAKEOVER_LOOKS), None)
        if first != self._rank:
            return None
        self._count += 1
        present = {rank: beat.number for rank, beat in beats.items()}
        silent = {rank: present[rank] for rank, missed in looks.items() if missed >= LOOKS}
        return LivenessSummary(self._count, str(self._rank), present, silent)


class JobWatcher:
    """Watch of all hosts by the watcher of one of them.

    host  this watcher's host
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._current: bytes | None = None  # the job's summary, while this one writes it
        self._summaries = SilenceCounter[str]()  # of the job
        self._hosts = SilenceCounter[str]()
        self._stale = 0

    @property
    def is_active(self) -> bool:
        """True while this is the job's watcher."""
        return self._current is not None

    @property
    def current(self) -> bytes:
        """The summary that this watcher has written last."""
        assert self._current is not None
        return self._current

    def claim(self, raw: bytes) -> LivenessSummary | None:
        """Summary with which to replace the job's summary `raw` now, or None while that changes.

        To be called once a look while not active.
        """
        self._stale = self._summaries.look("job", raw)
        before = LivenessSummary.decode(raw)
        if before.writer and self._stale < TAKEOVER_LOOKS:
            return None
        return replace(before, count=before.count + 1, writer=self.host)

    def written(self, summary: LivenessSummary, found: bytes) -> None:
        """Note the job's summary after the attempt to write `summary`: `found`.

        Another one shows that another watcher has taken over.
        """
        self._current = found if found == summary.encode().encode() else None

    def take_over(self, counts: bytes) -> None:
        """Continue the `counts` of the predecessor.

        The looks since are added, less the one that follows at once.
        """
        for host, (summary, looks) in json.loads(counts or b"{}").items():
            self._hosts.carry(host, summary, looks + max(self._stale - 1, 0))

    def counts(self) -> str:
        """Counts for a successor."""
        return json.dumps(self._hosts.counts(), separators=(",", ":"))

    def look(self, hosts: Mapping[str, bytes]) -> LivenessSummary:
        """Summary of the job, to be written, from the summaries of all hosts."""
        present, silent = dict[int, int](), dict[int, int]()
        for host, raw in hosts.items():
            summary = LivenessSummary.decode(raw)
            looks = self._hosts.look(host, f"{summary.count}|{summary.writer}")
            is_host_silent = looks >= HOST_LOOKS
            for rank, number in summary.present.items():
                known = present.get(rank, -1)
                is_silent = is_host_silent or rank in summary.silent
                if number < known or (number == known and (is_silent or rank not in silent)):
                    continue
                present[rank] = number
                silent.pop(rank, None)
                if is_silent:
                    silent[rank] = number
        count = LivenessSummary.decode(self.current).count + 1
        return LivenessSummary(count, self.host, present, silent)
