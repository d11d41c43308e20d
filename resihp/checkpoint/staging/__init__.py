"""Lazy copy: from a state, through the host cache, to the levels, during training."""
