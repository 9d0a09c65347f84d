"""Warnings of clients. `logging` is imported with the first warning, because most clients never have one."""

from __future__ import annotations


def warn(logger: str, text: str, *args: object) -> None:
    """Log a warning with the logger of that name, as `logging.Logger.warning` does."""
    import logging

    logging.getLogger(logger).warning(text, *args, stacklevel=2)
