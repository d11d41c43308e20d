"""Messages, plans and commits as Redis holds them: stream entries and JSON documents."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from typing import Any

from resihp.contracts import (
    Advice,
    Heartbeat,
    Job,
    LinkVerdict,
    Plan,
    Status,
    TelemetryBatch,
    Verdict,
    from_json,
    to_json,
)
from resihp.contracts.codec import decode

_MOST_NAMED = 64  # ranks that an event names


class MessageKind(StrEnum):
    """Content of a message."""

    TELEMETRY = "telemetry"
    HEARTBEAT = "heartbeat"
    ACK = "ack"
    OWN_PLAN = "own_plan"
    FAILURE = "failure"
    JOINER = "joiner"
    PROBE = "probe"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> MessageKind:
        """The kind of a message of a later version of the service, or of another program."""
        return cls.UNKNOWN


@dataclass(frozen=True)
class JobMessage:
    """An entry of a job's message stream; `body` is msgpack for telemetry, JSON otherwise."""

    id: str
    kind: MessageKind
    body: bytes

    def batch(self) -> TelemetryBatch:
        """The records of a telemetry message."""
        return decode(self.body)

    def document(self) -> dict[str, Any]:
        """The content of a message of any other kind."""
        return loads(self.body)

    def heartbeats(self) -> list[Heartbeat]:
        """The heartbeats in a message of that kind. The API has checked them: they are not checked
        field by field once more."""
        return [Heartbeat.from_checked(document) for document in self.document()["heartbeats"]]


@dataclass
class PendingChanges:
    """Effects of the messages applied since the last commit.

    applied        ids of these messages, in order
    applied_bytes  size of their bodies
    records        microbatch records in them
    events         (kind, document) of each new event of the job
    acks           the event in `events` that counts the acknowledgements of a plan, by version
    steps          summaries of the steps completed
    plans          plans published
    """

    applied: list[str] = field(default_factory=list)
    applied_bytes: int = 0
    records: int = 0
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    acks: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def count_acks(self, version: int, *, ranks: int, of: int, pause_ms: float | None) -> None:
        """Keep one event for all acknowledgements of a plan between two commits.

        It tells that so many `ranks` have answered so far, and the longest pause since the last.
        """
        event = self.acks.get(version)
        if event is None:
            event = self.acks[version] = {"version": version, "pause_ms": pause_ms}
            self.events.append(("acks", event))
        event |= {"ranks": ranks, "of": of}
        if pause_ms is not None:
            event["pause_ms"] = max(pause_ms, event["pause_ms"] or 0.0)

    def counts(self) -> dict[str, int]:
        """Increments of the job's counters."""
        kinds = Counter(kind for kind, _ in self.events)
        return {
            "applied_messages": len(self.applied),
            "applied_records": self.records,
            "plans": len(self.plans),
            "verdicts": kinds["verdict"],
            "errors": kinds["error"],
        }


@dataclass(frozen=True)
class Commit:
    """Everything that one transaction writes.

    state    parts of the saved state that changed, by name
    status   status documents by name, those that changed
    newest   version of the newest plan
    dropped  names of parts that the saved state has no more
    """

    changes: PendingChanges
    state: Mapping[str, bytes]
    status: Mapping[str, Any]
    newest: int
    dropped: Set[str] = frozenset()


VERDICTS = ("healthy", "healthy_as_of", "verdicts")
"""Names of the status documents that the verdicts on all ranks are made of."""


def verdict_texts(
    status: Mapping[str, Any], *, after: int = -1, limit: int | None = None
) -> list[tuple[int, str]]:
    """The verdicts on the ranks of a job above `after`, the first `limit` of them, as (rank, JSON)
    by rank, from its status documents.

    Those on ordinary healthy ranks are stored as two lists, `healthy`, and `healthy_as_of`, which
    they have in common; `verdicts` holds all others.
    """
    found: list[tuple[int, Any]] = [(each["rank"], each) for each in status.get("verdicts", ())]
    alike = ""
    if "healthy" in status:
        common = to_json(Verdict(rank=0, status=Status.HEALTHY, **status["healthy_as_of"]))
        del common["rank"], common["since_step"]
        alike = dumps(common)[1:]
        found += zip(status["healthy"]["ranks"], status["healthy"]["since_step"], strict=True)
    page = sorted((item for item in found if item[0] > after), key=itemgetter(0))[:limit]
    # Of many thousands nearly all are alike: text is several times as fast as documents.
    return [
        (rank, dumps(what) if isinstance(what, dict) else _healthy(rank, what, alike))
        for rank, what in page
    ]


def _healthy(rank: int, since: int, rest: str) -> str:
    return f'{{"rank":{rank},"since_step":{"null" if since < 0 else since},{rest}'


def in_short(report: dict[str, Any]) -> dict[str, Any]:
    """A report on ranks as an event tells it: the first of them, and how many `more` there are.

    >>> in_short({"ranks": list(range(66)), "step": 7}) == {
    ...     "ranks": list(range(64)), "step": 7, "more": 2}
    True
    """
    ranks = report["ranks"]
    more = {"more": len(ranks) - _MOST_NAMED} if len(ranks) > _MOST_NAMED else {}
    return {**report, "ranks": ranks[:_MOST_NAMED], **more}


def link_in_short(link: LinkVerdict) -> dict[str, Any]:
    """A verdict on a link or group as an event tells it, with the first ranks of the group."""
    left = len(link.group) - _MOST_NAMED
    more = {"more": left} if left > 0 else {}
    return {**to_json(link), "group": list(link.group[:_MOST_NAMED]), **more}


def planning_in_short(report: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a planning as an event tells it: of the ranks and nodes in its advice the
    first, and how many `more` ranks there are."""
    advice = report.get("advice")
    if advice is None:
        return report
    named = {
        field: advice[field][:_MOST_NAMED] for field in ("ranks", "stopped", "others", "nodes")
    }
    left = sum(len(advice[field]) - len(named[field]) for field in ("ranks", "others"))
    more = {"more": left} if left > 0 else {}
    return {**report, "advice": {**advice, **named, **more}}


def message_of(item: tuple[bytes, dict[bytes, bytes]]) -> JobMessage:
    """The message in a stream item (id, fields)."""
    identity, fields = item
    kind = MessageKind(fields.get(b"kind", b"").decode(errors="replace"))
    return JobMessage(identity.decode(), kind, fields.get(b"body", b""))


def stream_order(identity: str) -> tuple[int, int]:
    """Sort key of a stream id (milliseconds, sequence): ids do not sort as strings."""
    milliseconds, _, sequence = identity.partition("-")
    return int(milliseconds), int(sequence or 0)


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as stored and answered: its fields and the gap to its bound."""
    return {**to_json(plan), "gap": plan.gap}


def plan_from_json(document: dict[str, Any], path: str = "") -> Plan:
    """The plan in a document of `plan_json`, at a path in a larger one. Raises `ContractError`."""
    return from_json(Plan, {name: v for name, v in document.items() if name != "gap"}, path)


def advice_json(advice: Advice) -> dict[str, Any]:
    """Advice as answered: its fields, gains as fractions, and summary."""
    gains = {"gain": advice.gain, "replaced_gain": advice.replaced_gain}
    return {**to_json(advice), **gains, "summary": advice.summary}


def predictor_key(job: Job) -> str:
    """Key of the jobs that share a predictor: equal model, device type and recomputation."""
    kind = to_json(job.model) if job.model is not None else None, job.device, job.recompute
    return hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:32]


def joined(**members: str | bytes | None) -> bytes:
    """The JSON object with these members, which are JSON already; None becomes null.

    >>> joined(job=dumps("j"), plan=b'{"version":0}', rollout=None)
    b'{"job":"j","plan":{"version":0},"rollout":null}'
    """
    texts = ((name, b"null" if text is None else text) for name, text in members.items())
    parts = (
        b'"%s":%s' % (name.encode(), text.encode() if isinstance(text, str) else text)
        for name, text in texts
    )
    return b"{%s}" % b",".join(parts)


def dumps(document: Any) -> str:
    """Compact JSON with sorted keys, so that equal documents are equal strings."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True, allow_nan=False)


def loads(document: bytes) -> dict[str, Any]:
    """The JSON object in `document`."""
    content: dict[str, Any] = json.loads(document)
    return content
