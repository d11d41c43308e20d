"""Lower bounds of pipelines, none of which any order of passes within a schedule's limits beats."""

from .fractional import chain_factors
from .in_flight import in_flight_bound
from .whole_layers import Stages, whole_layer_bound

__all__ = ["Stages", "chain_factors", "in_flight_bound", "whole_layer_bound"]
