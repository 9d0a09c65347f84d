"""Cancellation of requests whose answers nobody awaits, and the count of what is kept in memory for them.

What serves requests binds them `under_token`; what takes long asks for the `present_token` while it is bound. Then it
looks at its word now and then, or has itself cancelled. What keeps memory takes it as `WorkingMemory`.
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


class CancelToken:
    """The cancellation token of a client's requests: cancelled once it awaits no answer any more.

    Attributes:
        cancelled: A word in C, not 0 once it is.
        server: End of a burst, where the client can give up the request that is run; NULL: there is none.
        account: Where working memory counts; None: nowhere.
    """

    __slots__ = ("_kernels", "account", "cancelled", "server")

    def __init__(self, server: CData = ffi.NULL, account: Account | None = None) -> None:
        self.cancelled: CData = ffi.new("uint32_t *")
        self.server = server
        self.account = account
        self._kernels: dict[int, weakref.ref[Kernel]] = {}  # each use of it is one step of the interpreter

    def add(self, kernel: Kernel) -> None:
        """Have a kernel cancelled with the token, if it knows how to; see `Kernel`."""
        if getattr(kernel, "cancel", None) is None:
            return
        kernels, number = self._kernels, next(_NUMBERS)
        kernels[number] = weakref.ref(kernel, lambda _: kernels.pop(number, None))
        if self.cancelled[0]:
            self._cancel_kernels()

    def cancel(self) -> None:
        """Nothing is awaited any more. Any thread; takes no lock."""
        lib.nnb_word_raise(self.cancelled)
        self._cancel_kernels()

    def _cancel_kernels(self) -> None:
        for reference in list(self._kernels.values()):
            kernel = reference()
            if kernel is not None:
                kernel.cancel()  # type: ignore[attr-defined]


class _Present(threading.local):
    token: CancelToken | None = None


_PRESENT = _Present()


@contextlib.contextmanager
def under_token(token: CancelToken | None) -> Iterator[None]:
    """What this thread does in the with block may be cancelled so; None: not at all."""
    before, _PRESENT.token = _PRESENT.token, token
    try:
        yield
    finally:
        _PRESENT.token = before


def present_token() -> CancelToken | None:
    """Return the token that this thread works under; None if there is none."""
    return _PRESENT.token


class WorkingMemory:
    """What a bound request, and its runs, keep in memory beside the memory of the request: counted for its client.

    Made while a request is bound, and kept with the arrays that it counts: what is not given back counts until this
    object is garbage. One thread at a time.
    """

    __slots__ = ("_account", "_charged", "_releases", "_taken")

    def __init__(self) -> None:
        token = present_token()
        self._account = None if token is None else token.account
        self._taken = self._charged = 0
        self._releases: list[Callable[[], None]] = []

    def take(self, nbytes: int) -> None:
        """Count so many bytes more before they are allocated; `ResourceExhausted` beyond the client's quota."""
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
