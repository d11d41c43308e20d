"""From residuals to statuses: sequential tests, what excuses a rank, and the judge."""
