"""Records on their way in: messages to whole steps, and the last steps for the diagnosis."""
