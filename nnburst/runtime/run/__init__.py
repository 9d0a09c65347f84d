"""Running requests: bursts, who may run, rings, event loops, recovery."""
