"""Lower bounds of pipeline makespans for any order of passes within a schedule's limits."""

from .in_flight import in_flight_bound, relaxed_factors
from .whole_layers import StageCosts, heterogeneous_layers, whole_layers

__all__ = [
    "StageCosts",
    "heterogeneous_layers",
    "in_flight_bound",
    "relaxed_factors",
    "whole_layers",
]
