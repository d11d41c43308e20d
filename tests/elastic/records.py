"""What the ranks of a job in tests write down while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """All that a rank noted so far, without a line of which only a part can be seen yet."""
    path = folder / f"events-{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def switches(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank noted at each change of layout."""
    return [event for event in events(folder, rank) if "version" in event]
