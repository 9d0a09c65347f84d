"""The client of a burst."""
