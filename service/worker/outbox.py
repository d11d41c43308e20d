"""What a session has to say since its state was saved last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from resihp.contracts import Plan


@dataclass
class Outbox:
    """What is to be committed with the next saved state."""

    applied: list[str] = field(default_factory=list)
    applied_bytes: int = 0
    records: int = 0
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
