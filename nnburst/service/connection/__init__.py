"""A connection between client and service: its owner thread, calls in both directions, the peer's death."""
