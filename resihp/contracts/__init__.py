"""Data types shared by hooks, service, detector, scheduler and runtime. No I/O."""

from ._json import from_json, to_json
from .advice import Advice
from .errors import (
    CheckpointDamagedError,
    CheckpointError,
    ContractError,
    FencedOutError,
    InfeasibleError,
    JobStoppedError,
    JoinRefusedError,
    MiscountError,
    PeerLostError,
    PreemptedError,
    ResiHPError,
    ServiceError,
    StateLostError,
    TraceError,
)
from .faults import FaultRate, Protection
from .heartbeat import Heartbeat, TrainingPosition
from .job import Action, Job, LayerCost, Links, Memory, ModelShape, RankAmount, even_quotas
from .layout import Layout, Place, Replica, Schedule, Stage
from .plan import Plan
from .sensors import SensorSample
from .telemetry import COLUMNS, Op, TelemetryBatch
from .verdict import Cause, Diagnosis, LinkVerdict, Status, Verdict

__all__ = [
    "COLUMNS",
    "Action",
    "Advice",
    "Cause",
    "CheckpointDamagedError",
    "CheckpointError",
    "ContractError",
    "Diagnosis",
    "FaultRate",
    "FencedOutError",
    "Heartbeat",
    "InfeasibleError",
    "Job",
    "JobStoppedError",
    "JoinRefusedError",
    "LayerCost",
    "Layout",
    "LinkVerdict",
    "Links",
    "Memory",
    "MiscountError",
    "ModelShape",
    "Op",
    "PeerLostError",
    "Place",
    "Plan",
    "PreemptedError",
    "Protection",
    "RankAmount",
    "Replica",
    "ResiHPError",
    "Schedule",
    "SensorSample",
    "ServiceError",
    "Stage",
    "StateLostError",
    "Status",
    "TelemetryBatch",
    "TraceError",
    "TrainingPosition",
    "Verdict",
    "even_quotas",
    "from_json",
    "to_json",
]
