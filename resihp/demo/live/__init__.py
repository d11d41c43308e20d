"""Live display of the demo: a screen on a terminal, plain lines elsewhere."""
