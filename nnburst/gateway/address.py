"""Addresses of Unix sockets."""

from __future__ import annotations


def unix_path(address: str) -> str | None:
    """Return the path of ``unix:PATH``; None for another address."""
    return address.removeprefix("unix:") if address.startswith("unix:") else None
