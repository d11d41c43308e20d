"""What became of a monitor's records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Of one monitor in one process.

    queued    records that wait to be sent or are on their way
    sent      records that the sidecar took, in `batches` messages
    dropped   records lost: the buffer was full, the sidecar refused them, or a hook failed
    retries   repetitions of messages that the sidecar could not take
    refused   messages that it refused (status 4xx)
    failures  times that a hook failed
    """

    queued: int
    sent: int
    batches: int
    dropped: int
    retries: int
    refused: int
    failures: int
