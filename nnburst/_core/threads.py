"""Where threads are started."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from ..errors import BadState, ResourceExhausted

_PATCHED = (
    ("threading", "get_ident"),
    ("queue", "SimpleQueue"),
    ("select", "select"),
    ("os", "fork"),
    ("subprocess", "Popen"),
)
"""What gevent and eventlet replace, one function of each module."""


def start(thread: threading.Thread, what: str) -> None:
    """Start a thread; `what` is the subject of the sentence in which an error says what needs it.

    Raises:
        BadState: It would be a greenlet, which stands still while another thread waits in C.
        ResourceExhausted: The system has no thread for it.
    """
    for module, name in _PATCHED:
        found = getattr(sys.modules.get(module), name, None)
        library = getattr(found, "__module__", "").partition(".")[0]
        if library in ("gevent", "eventlet"):
            raise BadState(
                f"{what} needs a thread, and {library} has patched {module}: use workers with threads "
                f"(gunicorn -k gthread), or have it patch sockets alone (docs/faq.md)"
            )
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise ResourceExhausted(f"{what} needs a thread: {error}") from error


def start_daemon(target: Callable[..., object], *args: object, name: str, what: str) -> threading.Thread:
    """Start a thread that does not keep the process alive, as it may be inside a device that never returns."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    start(thread, what)
    return thread
