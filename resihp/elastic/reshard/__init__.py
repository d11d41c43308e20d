"""Live resharding: build the next generation beside training, transfer state, commit."""
