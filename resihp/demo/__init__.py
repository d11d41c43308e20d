"""The demo: a real training job here, a slow rank, a dead rank, and what becomes of it."""
