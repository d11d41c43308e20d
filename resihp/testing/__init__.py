"""Made-up jobs, traces and faults, and ranks as local processes: for tests, benchmarks and demos."""
