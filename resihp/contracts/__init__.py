"""Contracts: what hooks, service, detector, scheduler and runtime say to each other. No I/O."""

from ._json import from_json, to_json
from .errors import (
    CheckpointDamagedError,
    CheckpointError,
    ContractError,
    InfeasibleError,
    ResiHPError,
    ServiceError,
    StateLostError,
    TraceError,
)
from .faults import FaultRate, Protection
from .job import Job, LayerCost, Links, Memory, ModelShape, even_quotas
from .layout import Layout, Place, Replica, Stage
from .plan import Plan
from .schedule import Schedule
from .telemetry import COLUMNS, Op, TelemetryBatch
from .verdict import Cause, Diagnosis, Status, Verdict

__all__ = [
    "COLUMNS",
    "Cause",
    "CheckpointDamagedError",
    "CheckpointError",
    "ContractError",
    "Diagnosis",
    "FaultRate",
    "InfeasibleError",
    "Job",
    "LayerCost",
    "Layout",
    "Links",
    "Memory",
    "ModelShape",
    "Op",
    "Place",
    "Plan",
    "Protection",
    "Replica",
    "ResiHPError",
    "Schedule",
    "ServiceError",
    "Stage",
    "StateLostError",
    "Status",
    "TelemetryBatch",
    "TraceError",
    "Verdict",
    "even_quotas",
    "from_json",
    "to_json",
]
