"""Compilation caching that a service can trust although the client owns the files; no public names."""
