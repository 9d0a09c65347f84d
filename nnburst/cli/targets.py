"""What people give to commands: whole numbers, users, and files that are written at the end.

Files are looked at before a command begins, so that no work is lost over a name.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ..errors import InvalidArgument

_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Return the number that a text is, None if it is none or has more digits than anything here is counted with."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def size(nbytes: float) -> str:
    """Return a number of bytes for people."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.1f}".removesuffix(".0") + f" {units[0]}"


def user_number(user: str, option: str) -> int:
    """Return the number of a user who is given by name or number.

    Raises:
        InvalidArgument: There is none of the name, or no user has such a number.
    """
    uid = whole_number(user)
    try:
        if (uid := pwd.getpwnam(user).pw_uid if uid is None else uid) < 1 << 32:
            return uid
    except (KeyError, ValueError):  # a name with NUL
        pass
    raise InvalidArgument(f"{option} {user}: this machine has no such user")


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
