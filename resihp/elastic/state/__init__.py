"""State of one rank: runtime state, phases, and the events that callbacks receive."""
