"""Lazy copy: from a state to an image of a rank's file in host memory, during training."""
