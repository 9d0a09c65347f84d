"""Compiling a model, with the cache files of its compilation."""
