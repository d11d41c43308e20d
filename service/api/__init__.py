"""The HTTP side: routes, problem documents, limits, metrics."""
