"""Sensors of a process and its host, read from Linux's /proc and /sys.

Every quantity is optional: where the kernel does not offer it, its sensor is left out. The files
are those of `proc(5)`, `cgroups(7)` (versions 1 and 2) and the kernel's `Documentation/accounting/
psi.rst` and `sched-stats.rst`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ._sensor import Quantity, Sensor


@dataclass(frozen=True)
class _Mount:
    """A mounted tree of cgroups; `root` is the cgroup that its top shows."""

    root: PurePosixPath
    point: Path
    is_version_2: bool
    controllers: frozenset[str]


class Cgroups:
    """Cgroups of this process. It may be moved at any time, so they are looked up anew."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._membership = proc / "self" / "cgroup"
        self._mounts = list(_mounts(proc / "self" / "mountinfo"))
        self._known, self._folders = "", dict[str, list[Path]]()

    def folders(self, controller: str) -> list[Path]:
        """Folders of this process's cgroup and those above it that the mount shows, of one
        controller. The topmost one limits nothing on a host, but is the whole of a container."""
        try:
            text = _text(self._membership)
        except OSError:  # a kernel without them
            return []
        if text != self._known:
            self._known, self._folders = text, {}
        if controller not in self._folders:
            self._folders[controller] = list(self._find(controller))
        return self._folders[controller]

    def _find(self, controller: str) -> Iterator[Path]:
        for line in self._known.splitlines():
            _, names, path = line.split(":", 2)
            for mount in self._mounts:
                version_2 = mount.is_version_2 and not names
                if version_2 or controller in mount.controllers.intersection(names.split(",")):
                    yield from _lineage(mount, PurePosixPath(path))


def _mounts(mountinfo: Path) -> Iterator[_Mount]:
    try:
        lines = _text(mountinfo).splitlines()
    except OSError:
        return
    for line in lines:
        place, _, kind = line.partition(" - ")
        fields, (filesystem, *_, options) = place.split(), kind.split()
        if filesystem in ("cgroup", "cgroup2"):
            yield _Mount(
                PurePosixPath(fields[3]),
                Path(fields[4]),
                filesystem == "cgroup2",
                frozenset(options.split(",")),
            )


def _lineage(mount: _Mount, path: PurePosixPath) -> Iterator[Path]:
    """Folder of a cgroup and those above it. In a container the mount shows a part of the tree."""
    inside = path.relative_to(mount.root) if path.is_relative_to(mount.root) else path
    folder = mount.point / str(inside).lstrip("/")
    if ".." in inside.parts or not folder.is_dir():
        folder = mount.point
    yield folder
    while folder not in (mount.point, folder.parent):
        folder = folder.parent
        yield folder


class _Throttling:
    """Seconds for which the CPU quota of a cgroup held the process back.

    The kernel adds the times of all CPUs. They are limited to the whole length of the periods in
    which the quota was used up, so that the total grows by no more than the time that passed.
    """

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self._seen: dict[Path, tuple[float, float]] = {}
        self._total_s: float | None = None

    def read(self) -> float | None:
        folders, grown_s = self._cgroups.folders("cpu"), 0.0
        seen: dict[Path, tuple[float, float]] = {}
        for folder in folders:
            if not _has_quota(folder):
                continue
            counts = _table(folder / "cpu.stat")
            usec = counts.get("throttled_usec", 1e-3 * counts.get("throttled_time", 0))
            now = 1e-6 * usec, counts["nr_throttled"] * _quota(folder)[1]
            before = self._seen.get(folder, now)
            seen[folder] = now
            grown_s = max(grown_s, min(now[0] - before[0], now[1] - before[1]))
        self._seen = seen
        if folders:
            self._total_s = (self._total_s or 0.0) + grown_s
        return self._total_s


def _quota(folder: Path) -> tuple[float | None, float]:
    """CPUs that a cgroup may use, None for any number, and its period in seconds."""
    try:
        limit, period = _text(folder / "cpu.max").split()
    except OSError:
        period = _text(folder / "cpu.cfs_period_us")
        limit = _text(folder / "cpu.cfs_quota_us").strip()
    cpus = None if limit in ("max", "-1") else int(limit) / int(period)
    return cpus, 1e-6 * int(period)


def _smallest_quota(cgroups: Cgroups) -> float | None:
    quotas = [_quota(folder)[0] for folder in cgroups.folders("cpu") if _has_quota(folder)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _has_quota(folder: Path) -> bool:
    return (folder / "cpu.max").exists() or (folder / "cpu.cfs_quota_us").exists()


class _Thread:
    """The training thread: its waiting for a CPU, and the CPU that it ran on last."""

    def __init__(self, thread_id: int, proc: Path, sys: Path) -> None:
        self._folder = proc / "self" / "task" / str(thread_id)
        self._cpus = sys / "devices" / "system" / "cpu"
        self._nodes = dict(_nodes(sys / "devices" / "system" / "node"))
        self._home: int | None = None

    def waited_s(self) -> float:
        return 1e-9 * int(_text(self._folder / "schedstat").split()[1])

    def mhz(self) -> float:
        file = self._cpus / f"cpu{self._cpu()}" / "cpufreq" / "scaling_cur_freq"
        return 1e-3 * int(_text(file))

    def is_away(self) -> float | None:
        if len(set(self._nodes.values())) < 2:
            return None
        node = self._nodes.get(self._cpu())
        if self._home is None:
            self._home = node
        return None if node is None else float(node != self._home)

    def _cpu(self) -> int:
        return _stat(self._folder)[36]


def _nodes(folder: Path) -> Iterator[tuple[int, int]]:
    """Each CPU with its NUMA node."""
    for node in folder.glob("node[0-9]*") if folder.is_dir() else ():
        try:
            cpus = _text(node / "cpulist")
        except OSError:
            continue
        for part in filter(None, cpus.strip().split(",")):
            first, _, last = part.partition("-")
            for cpu in range(int(first), int(last or first) + 1):
                yield cpu, int(node.name.removeprefix("node"))


class _Pressure:
    """Seconds for which some task was stalled, of the own cgroup where that is counted, else of the
    host. The total only grows, also where the process is moved to another cgroup."""

    def __init__(self, what: str, cgroups: Cgroups, proc: Path) -> None:
        self._what, self._cgroups, self._host = what, cgroups, proc / "pressure" / what
        self._file: Path | None = None
        self._last_s = self._total_s = 0.0

    def read(self) -> float:
        own = [folder / f"{self._what}.pressure" for folder in self._cgroups.folders(self._what)]
        file = next((each for each in own[:1] if each.exists()), self._host)
        now_s = 1e-6 * int(_text(file).splitlines()[0].rpartition("total=")[2])
        if file == self._file:
            self._total_s += max(now_s - self._last_s, 0.0)
        self._file, self._last_s = file, now_s
        return self._total_s


def _cpus(proc: Path) -> int:
    """CPUs of the host; Python's own count follows PYTHON_CPU_COUNT."""
    try:
        lines = _text(proc / "stat").splitlines()
    except OSError:
        return 1
    return max(1, sum(line.startswith("cpu") for line in lines) - 1)  # without their sum


def _stolen_s(proc: Path, cpus: int) -> float:
    """Seconds of every CPU that the hypervisor took."""
    with (proc / "stat").open() as file:
        ticks = file.readline().split()[8]
    return int(ticks) / (os.sysconf("SC_CLK_TCK") * cpus)


def _text(file: Path) -> str:
    # In half the time of `Path.read_text`. Names in it are of any bytes.
    with open(file, encoding="utf-8", errors="surrogateescape") as stream:
        return stream.read()


def _stat(folder: Path) -> list[int]:
    """Numbers after the name and the state of a process or thread, with a 0 for the state."""
    after_name = _text(folder / "stat").rpartition(")")[2]
    return [0, *map(int, after_name.split()[1:])]


def _table(file: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(file).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2}


def kernel_sensors(
    thread_id: int, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")
) -> list[Sensor]:
    """Sensors of this process, its training thread and its host."""
    cgroups, thread = Cgroups(proc), _Thread(thread_id, proc, sys)
    host_cpus = _cpus(proc)
    time, level = Quantity.TIME, Quantity.LEVEL
    return [
        Sensor("cpu_throttled", time, _Throttling(cgroups).read),
        Sensor("cpu_quota", level, lambda: _smallest_quota(cgroups)),
        Sensor("cpu_steal", time, lambda: _stolen_s(proc, host_cpus)),
        Sensor("cpu_waiting", time, thread.waited_s),
        *(
            Sensor(f"{what}_pressure", time, _Pressure(what, cgroups, proc).read)
            for what in ("cpu", "memory", "io")
        ),
        Sensor("major_faults", Quantity.TOTAL, lambda: _stat(proc / "self")[9]),
        Sensor("cpu_mhz", level, thread.mhz),
        Sensor("numa_away", level, thread.is_away),
    ]
