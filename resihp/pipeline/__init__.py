"""Pipeline schedules as data: the order of every stage's passes, and what they take together."""
