"""Tells slow devices from long sequences. Pure: no socket, file, clock or thread."""

from ._detector import Detector
from .settings import DetectorSettings

__all__ = ["Detector", "DetectorSettings"]
