"""Conversion of command-line values: whole numbers, pairs, sizes, users."""

from __future__ import annotations

import math
import pwd
from collections.abc import Sequence
from typing import Any

import click

from ..errors import InvalidArgument

_DIGITS = 18


class Seconds(click.FloatRange):
    """Type of an option for a time. Refuses NaN, which click accepts in every range."""

    name = "number of seconds"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "S"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


def whole_number(text: str) -> int | None:
    """Return the whole number in a text; None for other text or too many digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def parse_pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """Return ``NAME=VALUE`` options as a dictionary.

    Raises:
        InvalidArgument: An argument is not a pair, or a name is given twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in pairs:
            raise InvalidArgument(f"{option} {text!r} is not NAME=VALUE, or its name is given twice")
        pairs[name] = value
    return pairs


def size(nbytes: float) -> str:
    """Return a number of bytes as text with a unit."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.1f}".removesuffix(".0") + f" {units[0]}"


def user_number(user: str, option: str) -> int:
    """Return the id of a user, from a name or a number.

    Raises:
        InvalidArgument: No user has this name or number.
    """
    uid = whole_number(user)
    try:
        if (uid := pwd.getpwnam(user).pw_uid if uid is None else uid) < 1 << 32:
            return uid
    except (KeyError, ValueError):  # a name that contains NUL raises ValueError
        pass
    raise InvalidArgument(f"{option} {user}: this machine has no such user")
