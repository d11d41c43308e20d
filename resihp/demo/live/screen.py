"""The live screen: the state of the running job, `ViewModel`, as rich renderables."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from resihp.contracts import Plan, Stage, Status
from resihp.formatting import duration, ratio

from ..descriptions import STATUS_WORDS, grid_of, layer_range
from ..findings import WARM_UP_STEPS
from ..record import StepRecord

STYLES: Mapping[Status, str] = {
    Status.HEALTHY: "bold #f4fbf7 on #2f7d5d",
    Status.SUSPECT: "bold #1e1600 on #d9a514",
    Status.FAIL_SLOW: "bold #fff6f0 on #c4502e",
    Status.FAIL_STOP: "#b8b8b8 on #55343a",
    Status.INCONCLUSIVE: "bold #f4f8fc on #4f74a3",
}
# A shape in addition to the colour, for readers and terminals without colours.
SIGNS: Mapping[Status, str] = {
    Status.HEALTHY: "",
    Status.SUSPECT: "?",
    Status.FAIL_SLOW: "▲",
    Status.FAIL_STOP: "✕",
    Status.INCONCLUSIVE: "~",
}
_KINDS = {
    "phase": ("dim", "·"),
    "fault": ("bold magenta", "fault"),
    "verdict": ("bold yellow", "verdict"),
    "plan": ("bold cyan", "plan"),
    "why": ("cyan", ""),
    "lost": ("bold red", "lost"),
}
_BARS = "▁▂▃▄▅▆▇█"
_ROWS_BESIDE_LOG = 15
_MOST_ROWS, _LEAST_ROWS = 10, 3
SLOW_FROM = 1.15
RECENT = 5


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the log. `kind` is one of phase, fault, verdict, plan, lost."""

    seconds: float
    step: int | None
    kind: str
    text: str


@dataclass(kw_only=True)
class Device:
    """Status and slowdown of one rank."""

    status: Status = Status.HEALTHY
    slowdown: float = 1.0


@dataclass(kw_only=True)
class ViewModel:
    """The job so far, of the live display."""

    plan: Plan
    steps: int
    plan_step: int = 0
    phase: str = ""
    links: dict[str, str] = field(default_factory=dict)
    seen: list[StepRecord] = field(default_factory=list)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=64))
    devices: dict[int, Device] = field(default_factory=lambda: defaultdict(Device))
    reference: tuple[int, int] | None = None
    first_fault: int | None = None

    def __post_init__(self) -> None:
        for rank in self.plan.layout.ranks:
            self.devices[rank] = Device()

    @property
    def next_step(self) -> int:
        """The step that the job is in."""
        return self.seen[-1].step + 1 if self.seen else 0

    def healthy_ms(self) -> float | None:
        """Median step time between the warm-up and the first fault."""
        times = [
            seen.paced_ms
            for seen in self.seen
            if seen.step >= WARM_UP_STEPS
            and (self.first_fault is None or seen.step < self.first_fault)
        ]
        return median(times) if times else None

    def recent_ms(self) -> float | None:
        """Median of the last few step times under the present plan, its first step left out."""
        times = [seen.paced_ms for seen in self.seen if seen.step > self.plan_step]
        times = times or [seen.paced_ms for seen in self.seen[-1:]]
        return median(times[-RECENT:]) if times else None


class Screen:
    """Render `view` at the time of drawing, under the lock of its writers."""

    def __init__(
        self, view: ViewModel, seconds: Callable[[], float], lock: threading.RLock
    ) -> None:
        self._view, self._seconds, self._lock = view, seconds, lock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Padding]:
        width = min(options.max_width, 110) - 2
        with self._lock:
            view = self._view
            rows = console.height - _ROWS_BESIDE_LOG - 2 * view.plan.layout.dp
            parts: list[RenderableType] = [
                _head(view, self._seconds(), width),
                *_links(view.links, width),
                Text(" "),
                _progress(view, width),
                Text(" "),
                _figures(view, width),
                Text(" "),
                _layout_title(view),
                _layout(view, width),
                Text("─" * width, "dim"),
                _log(view.events, max(_LEAST_ROWS, min(_MOST_ROWS, rows)), width),
            ]
        for part in parts:
            yield Padding(part, (0, 1), expand=False)


def _head(view: ViewModel, seconds: float, width: int) -> Table:
    table = Table.grid(expand=False)
    table.add_column(width=width - 8)
    table.add_column(width=8, justify="right")
    title = Text.assemble(
        ("ResiHP", "bold"), (f"  {len(view.devices)} ranks, {grid_of(view.plan.layout)}   ", "dim")
    )
    title.append(view.phase, "italic")
    minutes, rest = divmod(int(seconds), 60)
    table.add_row(title, Text(f"{minutes}:{rest:02d}", "bold"))
    return table


def _links(links: Mapping[str, str], width: int) -> list[Text]:
    """One line where it fits, else one line a link: an address that is cut off is of no use."""
    lines = []
    for name, target in links.items():
        url = target if "://" in target else Path(target).absolute().as_uri()
        line = Text.assemble((f"{name} ", "dim"), (target, f"cyan link {url}"))
        lines.append(line)
    whole = Text("   ").join(lines)
    return [whole] if lines and whole.cell_len <= width else lines


def _progress(view: ViewModel, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=9, style="dim")
    table.add_column(width=width - 22)
    table.add_column(width=11, justify="right")
    done = len(view.seen)
    table.add_row("training", _bar(done, view.steps, "#3a9d74"), f"{done}/{view.steps}")
    if view.reference is not None:
        step, steps = view.reference
        table.add_row("reference", _bar(step, steps, "#6f8fb8"), f"{step}/{steps}")
    return table


def _bar(done: int, total: int, colour: str) -> ProgressBar:
    return ProgressBar(
        total=max(total, 1), completed=done, complete_style=colour, finished_style=colour
    )


def _figures(view: ViewModel, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=9, style="dim")
    table.add_column(width=8, justify="right", style="bold")
    table.add_column(width=26)
    table.add_column(width=max(width - 49, 8))
    shown = max(width - 49, 8)
    recent, healthy = view.recent_ms(), view.healthy_ms()
    times = [seen.paced_ms for seen in view.seen]
    table.add_row(
        "step time",
        duration(recent),
        _against(recent, healthy),
        _spark(times[-shown:], times, alarm=None if healthy is None else SLOW_FROM * healthy),
    )
    losses = [seen.loss for seen in view.seen]
    loss = f"{losses[-1]:.4f}" if losses else "–"
    fell = Text(f"from {losses[0]:.2f} at the start" if losses else "", "dim")
    table.add_row("loss", loss, fell, _spark(losses[-shown:], losses))
    return table


def _against(recent: float | None, healthy: float | None) -> Text:
    if recent is None or healthy is None:
        return Text("warming up", "dim")
    style = "bold #e0703f" if recent / healthy >= SLOW_FROM else "#58b58d"
    return Text.assemble((ratio(recent / healthy), style), (f" healthy {duration(healthy)}", "dim"))


def _spark(values: Sequence[float], scale: Sequence[float], alarm: float | None = None) -> Text:
    text = Text(no_wrap=True)
    if not scale:
        return text
    # The first steps and the recovery from a loss exceed the rest by far: they are clipped.
    ordered = sorted(scale)
    low, high = ordered[0], ordered[int(0.95 * (len(ordered) - 1))]
    for value in values:
        level = (value - low) / (high - low) if high > low else 0.0
        bar = _BARS[max(0, min(len(_BARS) - 1, int(level * len(_BARS))))]
        text.append(bar, "#e0703f" if alarm is not None and value >= alarm else "#58a58d")
    return text


def _layout_title(view: ViewModel) -> Text:
    text = Text.assemble((f"Plan {view.plan.version}", "bold"))
    text.append(f"  from step {view.plan_step}", "dim")
    if view.plan.step_ms > 0:
        text.append(f", predicted {duration(view.plan.step_ms)} a step", "dim")
    for rank in sorted(set(view.devices) - set(view.plan.layout.ranks)):
        device = view.devices[rank]
        word = STATUS_WORDS[device.status] if device.status is not Status.HEALTHY else "idle"
        text.append("  ").append(f" {rank}{SIGNS[device.status]} ", STYLES[device.status])
        text.append(f" {word}", "dim")
    return text


def _layout(view: ViewModel, width: int) -> Table:
    stages = view.plan.layout.pp
    cell = max(10, min(26, (width - 28) // stages - 2))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=9)
    for _ in range(stages):
        table.add_column(width=cell)
    table.add_column(width=15)
    head = [Text(f"stage {index}", "dim") for index in range(stages)]
    table.add_row("", *head, Text("microbatches", "dim"))
    for index, replica in enumerate(view.plan.layout.replicas):
        blocks = [_ranks(stage, view, cell) for stage in replica.stages]
        layers = [
            Text(f"{layer_range(stage)}, TP {':'.join(map(str, stage.shares))}", "dim")
            for stage in replica.stages
        ]
        space = [Text()] * (stages - len(blocks))
        quota = str(view.plan.quotas[index])
        table.add_row(f"replica {index}", *blocks, *space, Text(quota, "bold"))
        table.add_row("", *layers, *space, "")
    return table


def _ranks(stage: Stage, view: ViewModel, width: int) -> Text:
    """The ranks of one stage side by side, each as wide as its share: `5▲ 1.49x`, `5▲` or `5`."""
    text = Text(no_wrap=True)
    widths = apportion(width - stage.tp + 1, stage.shares, least=3)
    for index, (rank, room) in enumerate(zip(stage.ranks, widths, strict=True)):
        device = view.devices[rank]
        sign = f"{rank}{SIGNS[device.status]}"
        is_slow = device.status in (Status.FAIL_SLOW, Status.SUSPECT)
        full = f"{sign} {ratio(device.slowdown)}" if is_slow else sign
        label = next((label for label in (full, sign) if len(label) <= room), str(rank))
        text.append(" " if index else "")
        text.append(label.center(room), STYLES[device.status])
    return text


def _log(events: Sequence[Event], rows: int, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=5, justify="right", style="dim")
    table.add_column(width=8, style="dim")
    table.add_column(width=7)
    table.add_column(width=width - 24, no_wrap=True, overflow="ellipsis")
    shown = list(events)[-rows:]
    for event in shown:
        style, word = _KINDS[event.kind]
        first = event.kind != "why"
        minutes, rest = divmod(int(event.seconds), 60)
        where = f"step {event.step}" if event.step is not None and first else ""
        text = Text(event.text, "dim" if event.kind in ("phase", "why") else "")
        table.add_row(f"{minutes}:{rest:02d}" if first else "", where, Text(word, style), text)
    for _ in range(rows - len(shown)):
        table.add_row("", "", "", "")
    return table


def apportion(total: int, weights: Sequence[int], *, least: int = 0) -> list[int]:
    """`total` in whole parts proportional to `weights`, none below `least` if that fits.

    >>> apportion(12, (3, 1)), apportion(12, (11, 1), least=3)
    ([9, 3], [9, 3])
    """
    least = min(least, total // len(weights))
    spare, whole = total - least * len(weights), sum(weights)
    excess = [max(0.0, total * weight / whole - least) for weight in weights]
    scale = spare / sum(excess) if sum(excess) else 0.0
    cuts = [round(edge) for edge in accumulate((part * scale for part in excess), initial=0.0)]
    return [least + stop - start for start, stop in pairwise(cuts)]
