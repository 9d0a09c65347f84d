"""Cancellation of requests whose clients no longer wait, and the accounts that limit the working memory of runs.

A server binds requests in a block ``with use_cancel_flag(flag)``. A kernel that may run for long takes the
`present_cancel_flag` when the server binds its request.
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
"""Function that charges bytes of working memory, and returns a function that releases them.

The first function raises `ResourceExhausted` beyond the quota. Any thread may call both functions.
"""

_LEAST_CHARGE = 1 << 16
"""Minimum bytes to charge at a time."""


class CancelFlag:
    """The cancellation flag of a client's requests, raised once the client no longer waits for answers.

    Attributes:
        cancelled: A word in C, nonzero once the flag is raised.
        server: The burst's server end in C, which shows whether the client has abandoned the running request.
            NULL if there is no open burst.
        account: Account that working memory is charged to; None for no account.
    """

    __slots__ = ("_kernels", "account", "cancelled", "server")

    def __init__(self, server: CData = ffi.NULL, account: Account | None = None) -> None:
        self.cancelled: CData = ffi.new("uint32_t *")
        self.server = server
        self.account = account
        self._kernels: dict[int, weakref.ref[Kernel]] = {}  # each use is one atomic step of the interpreter

    def add(self, kernel: Kernel) -> None:
        """Register a kernel. If it has a method `cancel` (see `Kernel`), raising the flag calls that method."""
        if getattr(kernel, "cancel", None) is None:
            return
        kernels, number = self._kernels, next(_NUMBERS)
        kernels[number] = weakref.ref(kernel, lambda _: kernels.pop(number, None))
        if self.cancelled[0]:
            self._cancel_kernels()

    def cancel(self) -> None:
        """Raise the flag and cancel its kernels. Any thread may call this method, which takes no lock."""
        lib.nnb_word_raise(self.cancelled)
        self._cancel_kernels()

    def _cancel_kernels(self) -> None:
        for reference in list(self._kernels.values()):
            kernel = reference()
            if kernel is not None:
                kernel.cancel()  # type: ignore[attr-defined]


class _Present(threading.local):
    flag: CancelFlag | None = None


_PRESENT = _Present()


@contextlib.contextmanager
def use_cancel_flag(flag: CancelFlag | None) -> Iterator[None]:
    """Make a flag (or None) the present flag of this thread in the ``with`` block."""
    before, _PRESENT.flag = _PRESENT.flag, flag
    try:
        yield
    finally:
        _PRESENT.flag = before


def present_cancel_flag() -> CancelFlag | None:
    """Return the flag that `use_cancel_flag` has set in this thread, or None."""
    return _PRESENT.flag


class WorkingMemory:
    """Working memory of a bound request and its runs, which is charged to the request's client.

    Create this object while the server binds the request, when it is known which client's account to charge.
    Bytes count until `give_back`, or until this object is dropped. Only one thread at a time may use it.
    """

    __slots__ = ("_account", "_charged", "_releases", "_taken")

    def __init__(self) -> None:
        flag = present_cancel_flag()
        self._account = None if flag is None else flag.account
        self._taken = self._charged = 0
        self._releases: list[Callable[[], None]] = []

    def take(self, nbytes: int) -> None:
        """Count bytes before they are allocated. Raises `ResourceExhausted` beyond the client's quota."""
        missing = self._taken + nbytes - self._charged
        if missing > 0 and self._account is not None:
            charge = max(missing, _LEAST_CHARGE)
            self._releases.append(self._account(charge))
            self._charged += charge
        self._taken += nbytes

    def give_back(self, nbytes: int) -> None:
        """Mark counted bytes as free, to be reused by the next `take`."""
        self._taken -= nbytes

    @contextlib.contextmanager
    def release_after_run(self) -> Iterator[None]:
        """Stop counting, at the end of a ``with`` block, the bytes that were counted in the block."""
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
