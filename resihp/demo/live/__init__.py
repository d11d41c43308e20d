"""The demo while it runs: its state, the screen that shows it, plain lines where there is none."""
