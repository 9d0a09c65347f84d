"""Deadlines and timeouts."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping
from typing import ClassVar, ParamSpec, TypeVar

from msgspec import Struct

from ..errors import InvalidArgument
from .errno import is_real

P = ParamSpec("P")
T = TypeVar("T")

OPENING = 60.0
"""Default time limit for opening a session or service, in seconds."""
_FOREVER_NS = 1 << 62


class Deadline(Struct, frozen=True):
    """The time by which a call has to end.

    The method `call` runs a function. Deadlines that the function creates with `after` are not later than this one.

    Attributes:
        at_ns: Nanoseconds of CLOCK_MONOTONIC; 0 means no deadline.
    """

    at_ns: int
    never: ClassVar[Deadline]

    @classmethod
    def after(cls, seconds: float | None = None) -> Deadline:
        """Return the deadline `seconds` from now. Inside the method `call` of an earlier deadline, return that one.

        None means no limit.
        """
        limit, ambient = limit_ns(seconds), _ambient.get()
        return cls(time.monotonic_ns() + limit if seconds else limit).earlier(ambient) if limit else ambient

    def earlier(self, other: Deadline) -> Deadline:
        return other if not self.at_ns or 0 < other.at_ns < self.at_ns else self

    def left(self) -> float | None:
        """Return the seconds left: 0 if the deadline has passed, None without a deadline."""
        return max(0, self.at_ns - time.monotonic_ns()) / 1e9 if self.at_ns else None

    def postpone(self, since_ns: int) -> Deadline:
        """Return this deadline, postponed by the time that has passed since `since_ns` (CLOCK_MONOTONIC)."""
        return Deadline(self.at_ns + time.monotonic_ns() - since_ns) if self.at_ns else self

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function. All its waits end by this deadline, or by an earlier deadline of an enclosing `call`."""
        ambient = _ambient.get()
        deadline = self.earlier(ambient)
        if deadline == ambient:
            return function(*args, **kwargs)

        def limited() -> T:
            _ambient.set(deadline)
            return function(*args, **kwargs)

        return contextvars.copy_context().run(limited)  # Only the copy of the context changes.


Deadline.never = Deadline(0)
_ambient: contextvars.ContextVar[Deadline] = contextvars.ContextVar("nnburst_deadline", default=Deadline.never)


def check_timeout(seconds: float | None) -> float | None:
    """Return a timeout as a float. None means no limit; 0 means no waiting.

    Raises:
        InvalidArgument: `seconds` is not a number, or is negative.
    """
    if seconds is None or (is_real(seconds) and seconds >= 0):  # NaN is refused.
        return None if seconds is None else float(seconds)
    if isinstance(seconds, Mapping) or hasattr(seconds, "__array__"):
        raise InvalidArgument(
            f"timeout is a {type(seconds).__name__}; arrays are given to session.run(None, inputs), or written into "
            "execution.inputs"
        )
    raise InvalidArgument(
        f"timeout={seconds!r}: give seconds, 0 for what is ready now, or None to wait without a limit"
    )


def limit_ns(timeout: float | None) -> int:
    """Return a timeout in nanoseconds. None becomes 0, which means no limit, so 0 seconds become 1 ns."""
    seconds = check_timeout(timeout)
    return 0 if seconds is None or seconds * 1e9 >= _FOREVER_NS else max(int(seconds * 1e9), 1)
