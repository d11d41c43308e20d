"""Recordings of the PyTorch profiler (Kineto), one file for each rank, as microbatch records.

`read_profile` reads a file into columns, `find_passes` finds its steps and passes, a `PassClock`
tells own time and waiting, `read_rank` makes records of it all, so that only one file at a time is
in memory, and `kineto_trace` puts the ranks together.
"""

from ._trace import kineto_trace

__all__ = ["kineto_trace"]
