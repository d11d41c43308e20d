"""Live resharding: build of the next generation and transfer of state while training continues."""
