"""Detector of slow devices, by the work in each record. Pure: no socket, file, clock or thread."""

from resihp.contracts import LinkVerdict

from .detector import Detector
from .expectation.predictor import Predictor
from .probes import ProbeKind, ProbeRequest, ProbeResult
from .settings import DetectorSettings
from .verdict_text import VerdictSummary

__all__ = [
    "Detector",
    "DetectorSettings",
    "LinkVerdict",
    "Predictor",
    "ProbeKind",
    "ProbeRequest",
    "ProbeResult",
    "VerdictSummary",
]
