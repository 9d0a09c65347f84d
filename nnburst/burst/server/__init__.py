"""The server of a burst."""
