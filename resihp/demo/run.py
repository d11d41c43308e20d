"""Run the demo: sidecar, training job, scripted faults and reference run, as one record."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from resihp.client import Client
from resihp.contracts import ServiceError, Status, from_json
from resihp.testing.local_ranks import LocalRanks
from service import Sidecar

from .descriptions import paced
from .findings import check
from .live.display import LiveDisplay
from .record import DemoRecord, LayoutChangeRecord, SlowdownRecord, StepRecord, VerdictRecord
from .training.pacing import LoadTable
from .training.settings import DemoSettings
from .training.worker import STORE, run_rank, run_reference

_STALLED_S = 300.0
_REFERENCE_S = 600.0
_MARK = ".resihp-demo"
_OWN_NAMES = (
    "sidecar", "logs", "reference.jsonl", "calibration-loads.f64", "loads.f64", "report.html",
    "trace.parquet",
)  # fmt: skip


class DemoError(RuntimeError):
    """The demo could not begin, or did not reach its end; carries the output of the ranks."""


def play(settings: DemoSettings, folder: Path, display: LiveDisplay) -> DemoRecord:
    """Run the demo; its report data and logs are left in `folder`. Raises `DemoError`."""
    start = time.monotonic()
    _clear(folder, settings.layout.ranks)
    run = _Run(settings, folder, display)
    display.phase("Starting the sidecar on an embedded Redis")
    with Sidecar(folder / "sidecar") as sidecar:
        display.links(sidecar.url, f"{sidecar.url}/docs", folder / "report.html")
        display.phase("Measuring this machine")
        with LocalRanks(STORE, folder / "logs") as ranks:
            ranks.start(settings.layout.ranks, run_rank, settings, sidecar.url, folder)
            run.follow(ranks, Client(sidecar.url))
    display.phase("Training the undisturbed reference")
    reference = _reference(settings, folder, display)
    return run.record(reference, time.monotonic() - start)


def _clear(folder: Path, ranks: Iterable[int]) -> None:
    """Remove what an earlier demo has left in `folder`, which has a mark if that is so. Raises
    `DemoError` where something of the same name is of another origin."""
    names = [
        *_OWN_NAMES,
        *(f"{kind}-{rank}.jsonl" for kind in ("events", "records") for rank in ranks),
    ]
    present = [path for path in (folder / name for name in names) if path.exists()]
    mark = folder / _MARK
    if present and not mark.exists():
        raise DemoError(f"{present[0]} is not of an earlier demo: choose another folder")
    for path in present:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    mark.touch()


def _reference(settings: DemoSettings, folder: Path, display: LiveDisplay) -> tuple[float, ...]:
    """Loss of each step of the undisturbed run."""
    path, losses = folder / "reference.jsonl", list[float]()
    tail, deadline = _Tail(path), time.monotonic() + _REFERENCE_S
    with LocalRanks(STORE, folder / "logs" / "reference") as ranks:
        ranks.start([0], run_reference, settings, path)
        is_alive = True
        while is_alive and time.monotonic() < deadline:
            is_alive = bool(ranks.poll(0.25))
            losses += [event["loss"] for event in tail.read()]
            display.reference(len(losses), settings.steps)
        if len(losses) < settings.steps:
            raise DemoError(f"the reference did not end\n{ranks.logs()}")
    return tuple(losses)


class _Run:
    """The running job, followed through its ranks' events and the sidecar's verdicts."""

    def __init__(self, settings: DemoSettings, folder: Path, display: LiveDisplay) -> None:
        self._settings, self._display, self._folder = settings, display, folder
        self._tails = {
            rank: _Tail(folder / f"events-{rank}.jsonl") for rank in settings.layout.ranks
        }
        self._flops_per_ms: float | None = None
        self._steps: dict[int, StepRecord] = {}
        self._switches: dict[int, LayoutChangeRecord] = {}
        self._verdicts: list[VerdictRecord] = []
        self._health: dict[tuple[int, int], SlowdownRecord] = {}
        self._latest: dict[int, Status] = {}
        self._dead: set[int] = set()

    def follow(self, ranks: LocalRanks, client: Client) -> None:
        """Follow until all ranks have ended. Raises `DemoError` if they stop making steps."""
        progress = (time.monotonic(), 0)
        while True:
            alive = ranks.poll(0.25)
            self._read_events()
            self._read_verdicts(client)
            self._see_deaths(ranks)
            if not alive:
                break
            if len(self._steps) > progress[1]:
                progress = (time.monotonic(), len(self._steps))
            if time.monotonic() > progress[0] + _STALLED_S:
                raise DemoError(f"the job made no step in {_STALLED_S:.0f} s\n{ranks.logs()}")
        if max(self._steps, default=-1) < self._settings.steps - 1:
            raise DemoError(f"the job ended early\n{ranks.logs()}")

    def record(self, reference: tuple[float, ...], seconds: float) -> DemoRecord:
        """The record of the run, checked."""
        settings = self._settings
        slow, dead = settings.slow_rank, settings.dead_rank
        switches = tuple(self._switches[version] for version in sorted(self._switches))
        died = next((change.step for change in switches if dead in change.lost), settings.dead_at)
        versions = f"Python {platform.python_version()}, torch {version('torch')}"
        record = DemoRecord(
            machine=f"{os.cpu_count()} cores, {platform.machine()}, {versions}",
            quotas=settings.job().quotas,
            trained=_trained(settings),
            seconds=seconds,
            layout=settings.layout,
            script={
                "slow_rank": -1 if slow is None else slow,
                "slow_factor": settings.slow_factor,
                "slow_at": settings.slow_at,
                "dead_rank": -1 if dead is None else dead,
                "dead_at": died,
            },
            steps=tuple(self._steps[step] for step in sorted(self._steps)),
            reference=reference,
            switches=switches,
            verdicts=tuple(self._verdicts),
            health=tuple(self._health[key] for key in sorted(self._health)),
            checks=(),
            emulated=_emulated(settings),
            flops_per_ms=self._flops_per_ms,
            wanted_flops_per_ms=settings.flops_per_ms,
        )
        return check(record)

    def _read_events(self) -> None:
        for tail in self._tails.values():
            for event in tail.read():
                if "plan" in event:
                    self._see_switch(from_json(LayoutChangeRecord, event))
                else:
                    self._see_step(from_json(StepRecord, event))

    def _see_step(self, seen: StepRecord) -> None:
        if seen.step in self._steps:
            return
        settings, before = self._settings, self._steps.get(seen.step - 1)
        if not self._steps and settings.flops_per_ms is not None:
            table = LoadTable.calibration(self._folder, settings.layout)
            self._flops_per_ms = table.calibrated(settings.flops_per_ms)
            self._display.phase(f"Training, {paced(self._flops_per_ms, settings.flops_per_ms)}")
        if before is not None and before.pace != seen.pace and self._flops_per_ms:
            pace = self._flops_per_ms * seen.pace
            self._display.pace(seen.step, pace)
        self._steps[seen.step] = seen
        self._display.step(seen)
        if settings.slow_rank is not None and seen.step + 1 == settings.slow_at:
            self._display.fault(
                f"rank {settings.slow_rank} now runs at 1/{settings.slow_factor:g} of its speed"
            )

    def _see_switch(self, seen: LayoutChangeRecord) -> None:
        """Merge the reports of all ranks: the longest pause, the sum of the bytes."""
        known = self._switches.get(seen.plan.version)
        self._switches[seen.plan.version] = LayoutChangeRecord(
            step=seen.step,
            pause_ms=max(seen.pause_ms, known.pause_ms if known else 0.0),
            received_bytes=seen.received_bytes + (known.received_bytes if known else 0),
            lost=seen.lost,
            plan=seen.plan,
        )
        if known is None:
            self._display.switch(seen)

    def _read_verdicts(self, client: Client) -> None:
        try:
            verdicts = client.verdicts(self._settings.job().name)
        except ServiceError:
            return
        step = max(self._steps, default=0)
        seen = []
        for verdict in verdicts:
            before = self._latest.get(verdict.rank, Status.HEALTHY)
            self._latest[verdict.rank] = verdict.status
            if verdict.status is not before:
                self._verdicts.append(VerdictRecord(at_step=step, verdict=verdict))
                self._display.verdict(self._verdicts[-1])
            seen.append(
                SlowdownRecord(
                    step=step, rank=verdict.rank, slowdown=verdict.slowdown, status=verdict.status
                )
            )
        self._health.update({(item.step, item.rank): item for item in seen})
        self._display.health(seen)

    def _see_deaths(self, ranks: LocalRanks) -> None:
        for rank, code in ranks.exit_codes.items():
            if code != 0 and rank not in self._dead:
                self._dead.add(rank)
                self._display.dead(rank)


class _Tail:
    """Reader of the lines added to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._offset += len(line)
                yield json.loads(line)


def _trained(settings: DemoSettings) -> str:
    shape = settings.shape
    params = shape.layers * shape.layer_params + 2 * shape.embedding_params
    return (
        f"Llama of {params / 1e6:.1f} million parameters on Python sources, "
        f"{settings.microbatches} microbatches of {settings.tokens} bytes a step"
    )


def _emulated(settings: DemoSettings) -> tuple[str, ...]:
    real = (
        "The model, the text, the gradients, the processes and the network between them are real."
    )
    if settings.flops_per_ms is None:
        return (real, "Nothing was emulated: devices ran as fast as they could.")
    return (
        real,
        "The speed of devices was emulated: all ranks share the cores of this machine, so each "
        "rank computed for real and was then held until its device would have been done.",
        f"Times of passes are by the clock of that device, and scatter by {settings.scatter:.0%}; "
        "times of steps are real.",
        "The slow device was one whose speed was divided by the factor given.",
        "The dead rank was killed for real, by SIGKILL in the middle of a step.",
    )
