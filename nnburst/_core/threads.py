"""Where threads are started."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import ResourceExhausted


def start(thread: threading.Thread, what: str) -> None:
    """Start a thread.

    Args:
        thread: Which.
        what: Needs it: the subject of the sentence that refuses.

    Raises:
        ResourceExhausted: The system has none.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise ResourceExhausted(f"{what} needs a thread: {error}") from error


def start_daemon(target: Callable[..., object], *args: object, name: str, what: str) -> threading.Thread:
    """Start a thread that does not keep the process alive, as it may be inside a device that never returns.

    Args:
        target: Called there with `args`.
        args: For `target`.
        name: Of the thread.
        what: As for `start`.

    Raises:
        ResourceExhausted: As `start`.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    start(thread, what)
    return thread
