"""What people give to commands: whole numbers, and files that are written at the end.

Files are looked at before a command begins, so that no work is lost over a name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Return the number that a text is, None if it is none or has more digits than anything here is counted with."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def why_not(path: Path) -> str:
    """Say what keeps a file from being written; empty if nothing does."""
    parent = path.parent
    try:
        if path.is_dir():
            return "it is a directory"
        if not parent.is_dir():
            return f"{parent} is not a directory" if parent.exists() else f"there is no directory {parent}"
        if path.exists():
            return "" if os.access(path, os.W_OK) else "it is read-only"
        return "" if os.access(parent, os.W_OK | os.X_OK) else f"nothing may be written in {parent}"
    except (OSError, ValueError) as error:  # names that no file can have
        return getattr(error, "strerror", None) or str(error)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in whatever the system says against writing it.

    Raises:
        click.ClickException: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror or error}") from error


def checked(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Callback of options that are such files.

    Raises:
        click.BadParameter: It could not be written.
    """
    why = path and why_not(path)
    if why:
        raise click.BadParameter(f"{path} cannot be written: {why}", ctx, parameter)
    return path
