"""Compilation caching with files that the client owns and the service verifies. No name here is public."""
