"""Who awaits the answer of a request: once nobody does, what runs for long ends; what is kept for it is counted.

What serves requests binds them as `called_by` one; what takes long asks for the `present_caller` while it
is bound. Then it looks at its word now and then, or has itself cancelled. What keeps memory takes it as
`WorkingMemory`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .._core._nnburst import ffi, lib

if TYPE_CHECKING:
    from .._core._nnburst import CData
    from .kernel import Kernel

_NUMBERS = itertools.count()


Account = Callable[[int], Callable[[], None]]
"""Counts so many bytes of working memory for somebody and returns what gives them back; `ResourceExhausted` if they
are too many. Any thread may call both."""

_LEAST_CHARGE = 1 << 16
"""Bytes that are counted at a time at least."""


class Caller:
    """One that may go.

    Attributes:
        gone: A word in C, not 0 once it has gone.
        server: Its end of a burst, where it can give up the request that is run; NULL: there is none.
        account: Where working memory counts; None: nowhere.
    """

    __slots__ = ("_kernels", "account", "gone", "server")

    def __init__(self, server: CData = ffi.NULL, account: Account | None = None) -> None:
        self.gone: CData = ffi.new("uint32_t *")
        self.server = server
        self.account = account
        self._kernels: dict[int, weakref.ref[Kernel]] = {}  # each use of it is one step of the interpreter

    def awaits(self, kernel: Kernel) -> None:
        """Have a kernel cancelled once nothing is awaited any more, if it knows how to; see `Kernel`."""
        if getattr(kernel, "cancel", None) is None:
            return
        kernels, number = self._kernels, next(_NUMBERS)
        kernels[number] = weakref.ref(kernel, lambda _: kernels.pop(number, None))
        if self.gone[0]:
            self._cancel()

    def leave(self) -> None:
        """Nothing is awaited any more. Any thread; takes no lock."""
        lib.nnb_word_raise(self.gone)
        self._cancel()

    def _cancel(self) -> None:
        for reference in list(self._kernels.values()):
            kernel = reference()
            if kernel is not None:
                kernel.cancel()  # type: ignore[attr-defined]


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


class WorkingMemory:
    """What a bound request, and its runs, keep in memory beside the memory of the request: counted for its caller.

    Made while a request is bound, and kept with the arrays that it counts: what is not given back counts until this
    object is garbage. One thread at a time.
    """

    __slots__ = ("_account", "_charged", "_releases", "_taken")

    def __init__(self) -> None:
        caller = present_caller()
        self._account = None if caller is None else caller.account
        self._taken = self._charged = 0
        self._releases: list[Callable[[], None]] = []

    def take(self, nbytes: int) -> None:
        """Count so many bytes more; before they are allocated.

        Raises:
            ResourceExhausted: The caller's quota of `working_bytes` is used up.
        """
        missing = self._taken + nbytes - self._charged
        if missing > 0 and self._account is not None:
            charge = max(missing, _LEAST_CHARGE)
            self._releases.append(self._account(charge))
            self._charged += charge
        self._taken += nbytes

    def give_back(self, nbytes: int) -> None:
        """So many bytes are free; what is taken next does not count on top of them."""
        self._taken -= nbytes

    @contextlib.contextmanager
    def for_a_run(self) -> Iterator[None]:
        """What is taken in the with block is free at its end."""
        taken, charged, n = self._taken, self._charged, len(self._releases)
        try:
            yield
        finally:
            self._taken, self._charged = taken, charged
            self._release(n)

    def _release(self, first: int) -> None:
        while len(self._releases) > first:
            self._releases.pop()()

    def __del__(self) -> None:
        self._release(0)
