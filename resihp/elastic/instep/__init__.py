"""Recovery inside a step: what is kept after a loss, who redoes the rest, and exact sums."""
