"""Runs of requests: bursts, permits, event loops, recovery."""
