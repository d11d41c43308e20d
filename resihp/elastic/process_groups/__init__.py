"""Abortable process groups, the groups of one layout, and collectives on top of them."""
