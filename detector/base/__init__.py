"""What all of the detector stands on: array types, places of ranks, robust statistics, state."""
