"""A burst that is served together with others."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ..._core._nnburst import ffi
from ..._core.deadline import Deadline
from ...errors import BadState
from ..interfaces import BurstCallback, BurstExecutorWithCache
from .server_end import ServerEnd

if TYPE_CHECKING:
    from ..._core._nnburst import CData
    from .group import FlowQueue

_log = logging.getLogger("nnburst.burst")


class GroupServer(ServerEnd):
    """A burst that a `ListenerGroup` serves; raises as `ListenerGroup.add`."""

    def __init__(
        self, queue: FlowQueue, callback: BurstCallback, executor: BurstExecutorWithCache, endpoint: CData
    ) -> None:
        super().__init__(callback, executor, endpoint)
        self._group = queue.flow.group
        self._ended = threading.Event()
        try:
            self._group.add(self, queue, endpoint)
        except BaseException:
            ffi.release(endpoint)
            self.close_row()
            raise

    def end(self, number: int) -> None:
        try:
            super().end(number)
        except Exception:  # also of a device of the user's: its thread goes on with the other bursts
            _log.exception("giving back a burst failed")
        finally:
            self._ended.set()

    def hang_up(self) -> None:
        super().hang_up()
        self._group.wake_all()

    def close(self) -> None:
        if self._group.serves_here():
            raise BadState("a burst cannot be closed by a listener thread; close it from another one")
        self.hang_up()
        self._ended.wait(Deadline.after().left())

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()
