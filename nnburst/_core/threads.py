"""Where threads are started."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import ResourceExhausted


def start(thread: threading.Thread, what: str) -> None:
    """Start a thread; `what` is the subject of the sentence in which `ResourceExhausted` says what needs it."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise ResourceExhausted(f"{what} needs a thread: {error}") from error


def start_daemon(target: Callable[..., object], *args: object, name: str, what: str) -> threading.Thread:
    """Start a thread that does not keep the process alive, as it may be inside a device that never returns."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    start(thread, what)
    return thread
