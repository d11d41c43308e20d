"""In-step failure recovery for a training loop of the user (DDP, FSDP2, HSDP)."""
