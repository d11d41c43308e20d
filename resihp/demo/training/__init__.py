"""The job that the demo trains: its settings and text, what a rank runs and records, and the same
training undisturbed."""
