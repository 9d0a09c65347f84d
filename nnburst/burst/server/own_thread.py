"""A burst with a listener thread of its own."""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING

from ..._core._nnburst import ffi, lib
from ..._core.deadline import Deadline
from ..._core.threads import start
from ...errors import BadState, ResourceExhausted
from ..interfaces import BurstCallback, BurstExecutorWithCache
from .loop import serve
from .server_end import ServerEnd

if TYPE_CHECKING:
    from ..._core._nnburst import CData


class OwnThreadServer(ServerEnd):
    """Serves one burst from a thread of its own.

    Raises:
        ResourceExhausted: The system has no thread for it.
    """

    def __init__(self, callback: BurstCallback, executor: BurstExecutorWithCache, endpoint: CData) -> None:
        super().__init__(callback, executor, endpoint)
        self.take_places([], 0)
        self._thread = threading.Thread(target=self._run, name="nnburst-listener", daemon=True)
        _SERVERS.add(self)
        try:
            start(self._thread, "a burst")
        except ResourceExhausted:
            _SERVERS.discard(self)
            ffi.release(endpoint)
            self.close_row()
            raise

    def _run(self) -> None:
        ending = 0
        try:
            ending = serve(lib.nnb_server_next, self._endpoint, self._plans, lambda plan: self)
        finally:
            _SERVERS.discard(self)
            self.end(ending)

    def hang_up(self) -> None:
        endpoint = self._endpoint
        if endpoint:
            lib.nnb_server_hang_up(endpoint)

    def close(self) -> None:
        if threading.current_thread() is self._thread:
            raise BadState("a burst cannot be closed by its own listener thread; close it from another one")
        self.hang_up()
        self._thread.join(Deadline.after().left())

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()


_SERVERS: set[OwnThreadServer] = set()


def _close_all() -> None:
    """At interpreter exit: a listener must not be inside C while the interpreter is taken down."""
    for server in tuple(_SERVERS):
        server.leave()
        server.close()


atexit.register(_close_all)
