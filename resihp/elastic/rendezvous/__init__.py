"""Rendezvous of ranks: store, heartbeats, consensus after a failure, joiners."""
