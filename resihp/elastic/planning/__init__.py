"""Sources of plans (sidecar or in-process scheduler) and their publication to all ranks."""
