"""What a checkpoint is on disk: archives, the file of a rank, its index, torch's metadata."""
