"""Runs of requests: bursts, permits, rings, event loops, recovery."""
