"""Progress of a command, shown on a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
PATIENCE = 1.0
"""Seconds after which a command shows that it waits."""


def progress(items: Iterable[T], total: int, words: str, *, draws_between: bool = False) -> Iterable[T]:
    """Yield items, and show progress on a terminal.

    Args:
        draws_between: True to draw only between two items, so that drawing disturbs no measurement.
    """
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    quiet = not console.is_terminal
    return track(items, words, total, not draws_between, console=console, transient=True, disable=quiet)


def call_with_notice(words: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function and return the result. During a long call, show a line on a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():  # it is None if it was closed at the start
        return call(*args, **kwargs)
    line = threading.Timer(PATIENCE, print, [f"{words} …"], {"end": "", "file": sys.stderr, "flush": True})
    line.daemon = True
    line.start()
    try:
        return call(*args, **kwargs)
    finally:
        line.cancel()
        line.join()
        print("\r\033[K", end="", file=sys.stderr, flush=True)
