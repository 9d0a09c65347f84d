"""Warnings of clients. `logging` is imported with the first warning, because most clients never warn."""

from __future__ import annotations


def warn(logger: str, text: str, *args: object) -> None:
    """Log a warning with the named logger."""
    import logging

    logging.getLogger(logger).warning(text, *args, stacklevel=2)
