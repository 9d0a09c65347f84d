"""The client's handler of the calls that a service makes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...burst.interfaces import BurstCallback
from ...errors import ErrorStatus, InvalidArgument
from ..wire import protocol as calls
from ..wire.marshal import pools_to_wire
from ..wire.packets import FdBundle

if TYPE_CHECKING:
    from ..process.workers import Worker


class CallbackRegistry:
    """Handler of the calls that a service makes. It finds the `BurstCallback`s of one connection by their numbers.

    References to callbacks are weak, so that a dropped burst can be freed.
    """

    def __init__(self, on_ending: Callable[[str], None] = lambda reason: None, broker: Worker | None = None) -> None:
        self._end = on_ending
        self._broker = broker
        self._numbers = itertools.count(1)
        self._callbacks: weakref.WeakValueDictionary[int, BurstCallback] = weakref.WeakValueDictionary()

    def add(self, callback: BurstCallback) -> int:
        number = next(self._numbers)
        self._callbacks[number] = callback
        return number

    def on_ending(self, message: calls.EndNotice, fds: FdBundle) -> calls.Done:
        """Store the reason why the service or one burst ends. Errors of later calls or runs contain the reason."""
        if not message.callback:
            if self._broker is not None:
                self._broker.stop_accepting()
            self._end(message.reason)
        elif callback := self._callbacks.get(message.callback):
            callback.report_end(message.reason)
        return calls.Done()

    def on_get_memories(self, message: calls.GetMemories, fds: FdBundle) -> tuple[calls.GetMemoriesReply, FdBundle]:
        """Ask a callback for memories. If the callback fails, return its status without memories."""
        callback = self._callbacks.get(message.callback)
        if callback is None:
            return calls.GetMemoriesReply(status=int(ErrorStatus.INVALID_ARGUMENT)), FdBundle()
        status, memories = callback.get_memories(message.slots)
        if status is not ErrorStatus.NONE:
            sendable = status <= ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT
            return calls.GetMemoriesReply(status=int(status if sendable else ErrorStatus.GENERAL_FAILURE)), FdBundle()
        handles, borrowed = pools_to_wire(memories)
        if len(borrowed) > calls.MAX_FDS:
            raise InvalidArgument(f"{len(borrowed)} descriptors do not fit into one message")
        # The descriptors are duplicated, because the memory may be closed before the reply is sent.
        return calls.GetMemoriesReply(status=0, memories=handles), FdBundle.duplicate(borrowed)

    def on_client_gone(self, message: calls.ClientGone, fds: FdBundle) -> calls.Done:
        if self._broker is None:
            raise calls.Malformed("the service is no worker of this process")
        self._broker.remove_client(message.number, message.reason)
        return calls.Done()
