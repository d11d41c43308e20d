"""Measurements, each beside its peer: `python -m benchmarks.NAME [--json PATH]`."""
