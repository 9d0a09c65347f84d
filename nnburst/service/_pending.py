"""A call that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import NNBurstError
from ._packets import FdBundle
from ._protocol import Call, Message

__all__ = ["PendingCall"]


class PendingCall:
    """A call that waits for its reply."""

    __slots__ = ("call", "done", "error", "fds", "on_late", "reply")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.done = threading.Event()
        self.reply: Message | None = None
        self.fds = FdBundle()
        self.error: NNBurstError | None = None
        self.on_late: Callable[[Message], None] | None = None
