"""Signs of life of the ranks of a job, and the position of each training thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self, TypeVar

from ._numbers import make_plain, number, whole_number, whole_numbers
from .sensors import SensorSample
from .telemetry import Op

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainingPosition:
    """Position of a rank's training thread.

    step        present step
    microbatch  microbatch of the innermost open block; -1 where it has none
    op          op of that block; None outside of all blocks
    waiting     the block waits for other ranks
    passes      forward and backward passes finished in this step
    for_s       seconds since the thread got there, by the rank's own monotonic clock
    """

    step: int
    microbatch: int = -1
    op: Op | None = None
    waiting: bool = False
    passes: int = 0
    for_s: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self, whole_number, "step", "passes", least=0)
        make_plain(self, whole_number, "microbatch", least=-1)
        make_plain(self, number, "for_s", least=0.0)

    @property
    def place(self) -> tuple[int, int, Op | None, bool, int]:
        """The position without the time since it."""
        return self.step, self.microbatch, self.op, self.waiting, self.passes


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """One sign of life of the process that holds `ranks`.

    process   identity of the process, new at each start; "" where not known
    sequence  number of this heartbeat of the process; 0 where it does not count
    step      present step, for senders that do not know a position
    position  position of the training thread; None where not known
    sensors   readings of its host and accelerator since the last sample; None where there are none
    left      the process ends on purpose: no heartbeat follows
    error     error that ends the process; "" where it ends without one

    Where the sidecar asked for them, because the rank hangs:
    stack       Python frames of the training thread, the innermost first: "train.py:118 in load"
    collective  what torch's flight recorder says of this process; "" where it says nothing
    """

    ranks: tuple[int, ...]
    process: str = ""
    sequence: int = 0
    step: int | None = None
    position: TrainingPosition | None = None
    sensors: SensorSample | None = None
    left: bool = False
    error: str = ""
    stack: tuple[str, ...] = ()
    collective: str = ""

    def __post_init__(self) -> None:
        make_plain(self, whole_numbers, "ranks", least=0)
        make_plain(self, whole_number, "sequence", least=0)
        make_plain(self, whole_number, "step", optional=True)

    @classmethod
    def from_checked(cls, document: Mapping[str, Any]) -> Self:
        """Make the heartbeat in a JSON object that the sidecar's API has checked: a worker takes
        many thousands in a second, and checks no field once more."""
        made = dict(document)
        made["ranks"] = tuple(made["ranks"])
        made["stack"] = tuple(made.get("stack", ()))
        if (position := made.get("position")) is not None:
            op = position.get("op")
            place = position if op is None else position | {"op": _OPS[op]}
            made["position"] = _unchecked(TrainingPosition, place)
        if (sensors := made.get("sensors")) is not None:
            made["sensors"] = _unchecked(SensorSample, sensors)
        return _unchecked(cls, made)


def _unchecked(kind: type[T], given: Mapping[str, Any]) -> T:
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", {**_DEFAULTS[kind], **given})
    return made


_OPS = {int(op): op for op in Op}
_DEFAULTS: dict[type, dict[str, Any]] = {
    kind: {
        field.name: None if field.default is MISSING else field.default for field in fields(kind)
    }
    for kind in (TrainingPosition, SensorSample, Heartbeat)
}
"""Default by field in the order of the fields; None where it has to be given."""
