"""From residuals to statuses: sequential tests, other explanations, and the state machine."""
