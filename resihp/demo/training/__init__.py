"""The training job of the demo: settings, data, pacing, rank processes and the reference run."""
