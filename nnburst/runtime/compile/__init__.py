"""Compilation of models, and the cache files of compilations."""
