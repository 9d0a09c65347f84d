"""Who awaits the answer of a request: once nobody does, what runs for long ends.

What serves requests binds them as `called_by` one; what takes long asks for the `present_caller` while it
is bound, and looks at its word now and then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._core._nnburst import ffi, lib

if TYPE_CHECKING:
    from .._core._nnburst import CData


class Caller:
    """One that may go.

    Attributes:
        gone: A word in C, not 0 once it has gone.
        server: Its end of a burst, where it can give up the request that is run; NULL: there is none.
    """

    __slots__ = ("gone", "server")

    def __init__(self, server: CData = ffi.NULL) -> None:
        self.gone: CData = ffi.new("uint32_t *")
        self.server = server

    def leave(self) -> None:
        """Nothing is awaited any more. Any thread; takes no lock."""
        lib.nnb_word_raise(self.gone)


class _Present(threading.local):
    caller: Caller | None = None


_PRESENT = _Present()


@contextlib.contextmanager
def called_by(caller: Caller | None) -> Iterator[None]:
    """What this thread does in the with block is done for a caller; None: for one that cannot go."""
    before, _PRESENT.caller = _PRESENT.caller, caller
    try:
        yield
    finally:
        _PRESENT.caller = before


def present_caller() -> Caller | None:
    """Return the caller that this thread works for; None if it cannot go."""
    return _PRESENT.caller
