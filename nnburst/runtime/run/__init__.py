"""How sessions run requests: bursts, permits to run, event loops, recovery."""
