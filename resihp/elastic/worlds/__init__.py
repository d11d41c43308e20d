"""Process groups whose waits can be abandoned, and the set of them that a layout needs."""
