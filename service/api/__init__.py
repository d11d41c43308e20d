"""HTTP routes, problem documents, limits and metrics."""
