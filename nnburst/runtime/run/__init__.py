"""Running requests: bursts, permits, rings, event loops, recovery."""
