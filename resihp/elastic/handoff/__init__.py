"""The next world: built and filled in the background, taken on before an update."""
