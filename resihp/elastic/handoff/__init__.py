"""The next world: built and filled in the background, taken on between two steps."""
