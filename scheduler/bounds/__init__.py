"""Lower bounds of pipelines, none of which any order of passes within a schedule's limits beats."""

from .in_flight import in_flight_bound, relaxed_factors
from .whole_layers import StageCosts, heterogeneous_layers, whole_layers

__all__ = [
    "StageCosts",
    "heterogeneous_layers",
    "in_flight_bound",
    "relaxed_factors",
    "whole_layers",
]
