"""Synthetic jobs, traces and faults, and ranks as local processes: for tests and benchmarks."""
