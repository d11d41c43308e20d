"""From messages to whole steps: late, repeated, partial and out of order records sorted out."""
