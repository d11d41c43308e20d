"""Lower bounds of pipelines, none of which any order of passes within a schedule's limits beats."""

from .fractional import chain_factors
from .in_flight import in_flight_bound
from .unlike_stages import unlike_layers
from .whole_layers import Stages, whole_layers

__all__ = ["Stages", "chain_factors", "in_flight_bound", "unlike_layers", "whole_layers"]
