"""Live resize on torch.distributed: change the layout of a running job without stopping it."""
