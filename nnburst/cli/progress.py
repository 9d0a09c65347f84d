"""How far a command is, on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], total: int, words: str, *, draws_between: bool = False) -> Iterable[T]:
    """Yield items and show how many there have been.

    Args:
        draws_between: Draw between two items only, so that no thread disturbs what is measured.
    """
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    quiet = not console.is_terminal
    return track(items, words, total, not draws_between, console=console, transient=True, disable=quiet)
