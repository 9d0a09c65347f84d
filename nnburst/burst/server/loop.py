"""The loop of a thread that serves bursts."""

from __future__ import annotations

import atexit
import errno
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..._core._nnburst import lib
from ...errors import NNBurstError
from ...memory.managed import free_closed_buffers
from ...model.running import failure_of

if TYPE_CHECKING:
    from ..._core._nnburst import CData
    from ..kernel import Kernel
    from .group import ListenerGroup
    from .server import ServerEnd

_log = logging.getLogger("nnburst.burst")
_RESTART = -errno.ERESTART


def serve(
    following: Callable[[CData], int], source: CData, plans: list[Kernel], burst_of: Callable[[int], ServerEnd]
) -> int:
    """Run requests until C returns an id that belongs to no plan, and return that id.

    Args:
        following: C function that answers the previous request and returns the id of the next request's plan.
        source: Argument of `following`.
        plans: Plans by id.
        burst_of: Function that takes the id of a plan and returns the plan's burst.
    """
    new, ended = lib.NNB_PLAN_NEW, lib.NNB_BURST_ENDED
    while True:
        try:
            # This is the hot loop: one C call per execution sends the last answer and takes the next request.
            while 0 <= (plan := following(source)) < new:
                result = plans[plan]()
                if result is not None:
                    burst_of(plan).answer(result)
            if 0 < plan < ended:
                burst_of(plan & (new - 1)).run_request(plan)
            elif plan == _RESTART:
                free_closed_buffers()
            else:
                return plan
        except NNBurstError as error:
            _log.info("an execution failed: %s", error)
            burst_of(plan & (new - 1)).answer(failure_of(error))
        except BaseException as error:  # SystemExit is answered, too: no client may wait for an ended thread
            _log.exception("an execution failed")
            burst_of(plan & (new - 1)).answer(failure_of(error))


SERVING: weakref.WeakValueDictionary[int, ServerEnd | ListenerGroup] = weakref.WeakValueDictionary()
"""Objects whose threads run `serve`, by `id`."""


def _close_all() -> None:
    """Close all listeners at interpreter exit, because no thread may be inside C while the interpreter ends."""
    for reference in SERVING.valuerefs():  # this is a copy, because other threads may add listeners
        if (each := reference()) is not None:
            each.detach_client()
            each.close()


atexit.register(_close_all)
