"""File format: tensor archives, the file of a rank, its index, and torch's metadata."""
