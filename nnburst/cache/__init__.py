"""Compilation caching with files that the client owns and the service verifies; no public names."""
