"""`resihp run`: the launcher. It survives lost ranks, and restarts a job from warm processes.

The options and the environment of a rank are, but for a few, those of torchrun.
"""
