"""Timelines as Chrome trace JSON, which ui.perfetto.dev opens."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ._analysis import Analysis
from .timeline import Spans, TraceTimeline

_MOST_EVENTS = 200_000  # what a browser still opens with ease
_IDEAL = 1_000_000  # added to the process ids of the ideal timeline


def write_perfetto(analysis: Analysis, path: str | Path) -> None:
    """Writes the actual and the ideal timeline as Chrome trace JSON (gzipped for `*.gz`).

    As many steps, from the first on, as a browser opens with ease. Each is shown from the moment
    at which it was recorded to start; the ideal step starts at the same moment.
    """
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"job": analysis.trace.job.name, "trace": str(analysis.trace.path.name)},
        "traceEvents": list(_events(analysis)),
    }
    path = Path(path)
    text = json.dumps(document, separators=(",", ":"))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), compresslevel=5, mtime=0))
    else:
        path.write_text(text, encoding="utf-8")


def _events(analysis: Analysis) -> Iterator[dict[str, Any]]:
    timeline = TraceTimeline(analysis)
    origin_s, count = 0.0, 0
    seen: set[tuple[int, int]] = set()
    for step in timeline.steps:
        pair = (timeline.actual(step), timeline.ideal(step))
        count += sum(spans.start_s.size for spans in pair)
        if count > _MOST_EVENTS and seen:
            break
        for spans, offset in zip(pair, (0, _IDEAL), strict=True):
            yield from _complete_events(spans, step, offset, origin_s)
            seen |= set(zip((spans.replica + offset).tolist(), spans.stage.tolist(), strict=True))
        origin_s += float((pair[0].start_s + pair[0].duration_s).max(initial=0.0))
    yield from _names(seen)


def _complete_events(
    spans: Spans, step: int, offset: int, origin_s: float
) -> Iterator[dict[str, Any]]:
    columns = (spans.name, spans.replica, spans.stage, spans.microbatch, spans.transfer)
    times = (np.round((spans.start_s + origin_s) * 1e6, 1), np.round(spans.duration_s * 1e6, 1))
    rows = zip(*(column.tolist() for column in (*columns, *times)), strict=True)
    for name, replica, stage, microbatch, transfer, start_us, duration_us in rows:
        arguments = {"step": step}
        if microbatch >= 0:
            arguments["microbatch"] = microbatch
        yield {
            "name": spans.names[name],
            "cat": "communication" if transfer else "compute",
            "ph": "X",
            "pid": replica + offset,
            "tid": 2 * stage + transfer,
            "ts": start_us,
            "dur": duration_us,
            "args": arguments,
        }


def _names(tracks: set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for pid in sorted({pid for pid, _ in tracks}):
        what = f"ideal, replica {pid - _IDEAL}" if pid >= _IDEAL else f"actual, replica {pid}"
        yield _meta("process_name", pid, 0, name=what)
        yield _meta("process_sort_index", pid, 0, sort_index=2 * (pid % _IDEAL) + pid // _IDEAL)
    for pid, stage in sorted(tracks):
        for transfer, what in enumerate(("compute", "communication")):
            tid = 2 * stage + transfer
            yield _meta("thread_name", pid, tid, name=f"stage {stage} {what}")
            yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def _meta(event: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"name": event, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
