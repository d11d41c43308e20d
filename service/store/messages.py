"""What arrives for a job, in order of arrival: telemetry, heartbeats, acks, failures, answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from resihp.contracts import TelemetryBatch
from resihp.contracts.codec import decode


class MessageKind(StrEnum):
    """Content of a message."""

    TELEMETRY = "telemetry"
    HEARTBEAT = "heartbeat"
    ACK = "ack"
    OWN_PLAN = "own_plan"
    FAILURE = "failure"
    JOINER = "joiner"
    PROBE = "probe"


@dataclass(frozen=True)
class JobMessage:
    """One message: `body` is msgpack for telemetry, JSON for all other kinds."""

    id: str
    kind: MessageKind
    body: bytes

    def batch(self) -> TelemetryBatch:
        """The records of a telemetry message."""
        return decode(self.body)

    def document(self) -> dict[str, Any]:
        """The content of any other message."""
        content: dict[str, Any] = json.loads(self.body)
        return content


def message_of(item: tuple[bytes, dict[bytes, bytes]]) -> JobMessage:
    """The entry in an item of a stream."""
    identity, fields = item
    return JobMessage(identity.decode(), MessageKind(fields[b"kind"].decode()), fields[b"body"])


def order(identity: str) -> tuple[int, int]:
    """Stream ids compare as pairs of numbers, not as strings."""
    milliseconds, _, sequence = identity.partition("-")
    return int(milliseconds), int(sequence or 0)
