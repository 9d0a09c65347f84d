"""Running requests: bursts, who may run, pipelines, event loops, recovery."""
