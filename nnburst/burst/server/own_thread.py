"""A burst with a listener thread of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..._core._nnburst import ffi, lib
from ..._core.deadline import Deadline
from ..._core.threads import start
from ...errors import BadState, ResourceExhausted
from ..interfaces import BurstCallback, BurstExecutorWithCache
from .loop import SERVING, serve
from .server_end import ServerEnd

if TYPE_CHECKING:
    from ..._core._nnburst import CData


class OwnThreadServer(ServerEnd):
    """Serves one burst from a thread of its own."""

    def __init__(self, callback: BurstCallback, executor: BurstExecutorWithCache, endpoint: CData) -> None:
        super().__init__(callback, executor, endpoint)
        self.take_places([], 0)
        self._thread = threading.Thread(target=self._run, name="nnburst-listener", daemon=True)
        try:
            start(self._thread, "a burst")
        except (BadState, ResourceExhausted):
            ffi.release(endpoint)
            self.close_row()
            raise
        SERVING[id(self)] = self

    def _run(self) -> None:
        ending = 0
        try:
            ending = serve(lib.nnb_server_next, self._endpoint, self._plans, lambda plan: self)
        finally:
            self.end(ending)

    def close(self) -> None:
        if threading.current_thread() is self._thread:
            raise BadState("a burst cannot be closed by its own listener thread; close it from another one")
        self.hang_up()
        self._thread.join(Deadline.after().left())

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()
