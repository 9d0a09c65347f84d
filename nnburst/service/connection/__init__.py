"""A connection: its owner thread, calls in both directions, the peer's death."""
