"""Exceptions for negative errnos, and checks of simple arguments."""

from __future__ import annotations

import enum
import errno
import numbers
import operator
import os
import resource
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import numpy as np

from ..errors import (
    BadState,
    DeadObject,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    ResourceExhausted,
)

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=enum.IntEnum)

_ERRORS: dict[int, type[NNBurstError]] = {
    errno.EBADF: InvalidArgument,
    errno.EINVAL: InvalidArgument,
    errno.EMSGSIZE: InvalidArgument,
    errno.EOVERFLOW: InvalidArgument,
    errno.EPERM: InvalidArgument,
    errno.EROFS: InvalidArgument,
    errno.EBUSY: BadState,
    errno.ECHILD: BadState,
    errno.ESHUTDOWN: BadState,
    errno.EPIPE: DeadObject,
    errno.ETIMEDOUT: MissedDeadline,
    errno.EMFILE: ResourceExhausted,
    errno.ENFILE: ResourceExhausted,
    errno.ENOBUFS: ResourceExhausted,
    errno.ENOMEM: ResourceExhausted,
    errno.ENOSPC: ResourceExhausted,
}

_MEANINGS: dict[int, str] = {
    errno.EBADMSG: "the shared counters or packets are corrupt",
    errno.EBUSY: "another call is in progress",
    errno.ECHILD: "inherited by a forked child; create a new one there",
    errno.EMSGSIZE: "more than the capacity",
    errno.EOVERFLOW: "beyond the end of the memory object",
    errno.EPERM: "the memory object can be truncated; seal it",
    errno.EPIPE: "the peer has ended or hung up",
    errno.EROFS: "the handle is read-only",
    errno.ESHUTDOWN: "already closed",
    errno.ETIMEDOUT: "the deadline has passed",
}

this_process = SimpleNamespace(name="this process", refusals="", refused=PermissionError)
"""`name` is the name of this process in errors that peers read. `refusals` is a hint about the sandbox. `refusal`
returns the hint if an exception, or one of its causes, has a type in `refused`.
"""


def refusal(error: BaseException) -> str:
    """Return a hint if this process's sandbox may have caused an exception, else an empty string."""
    cause: BaseException | None = error
    for _ in range(8):  # `raise error from error` makes a circle, so the loop has a limit.
        if this_process.refusals and isinstance(cause, this_process.refused):
            return f": {this_process.refusals}"
        cause = cause and (cause.__cause__ or cause.__context__)
    return ""


def meaning(number: int) -> str:
    """Return the meaning of an errno. If a limit of this process was reached, the text names the process."""
    if number == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"{this_process.name} (pid {os.getpid()}) has as many open files as it may, {limit:,}; close sessions and "
            "memories, or raise RLIMIT_NOFILE where it is started: `ulimit -n`, LimitNOFILE= of a systemd unit, "
            "the limit nofile of a container"
        )
    if number == errno.ETOOMANYREFS:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"programs of user {os.getuid()} have sent descriptors that were not received, more than RLIMIT_NOFILE of "
            f"{this_process.name} (pid {os.getpid()}) allows, {limit:,}: end what does not receive, or raise it"
        )
    if number == errno.ENFILE:
        return "this machine has as many open files as it may; raise the sysctl fs.file-max"
    return _MEANINGS.get(number) or os.strerror(number)


def check(rc: int, what: str = "", special: Mapping[int, NNBurstError] | None = None) -> int:
    """Raise the exception for a negative errno; return any other number unchanged.

    Args:
        rc: Return value of a function of the C core.
        what: Beginning of the error message, for example ``"cannot use the buffer"``.
        special: Exceptions for errnos with a special meaning in this call.

    Raises:
        NNBurstError: `rc` is negative. The errno decides the class; the default is `GeneralFailure`.
    """
    if rc >= 0:
        return rc
    if special and -rc in special:
        raise special[-rc]
    reason, name = meaning(-rc), errno.errorcode.get(-rc, str(-rc))
    raise _ERRORS.get(-rc, GeneralFailure)(f"{what}: {reason} [{name}]" if what else f"{reason} [{name}]")


def system(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a system call of `os` or `socket`.

    Raises:
        ResourceExhausted: A limit is reached.
        GeneralFailure: The system refuses the call.
    """
    try:
        return call(*args, **kwargs)
    except OSError as error:
        raise as_error(call, error) from error


def as_error(call: Callable[..., object], error: OSError) -> NNBurstError:
    """Return the exception that this module's `system` raises for an `OSError`."""
    number = error.errno or 0
    kind = ResourceExhausted if _ERRORS.get(number) is ResourceExhausted else GeneralFailure
    name = errno.errorcode.get(number, str(number))
    why = meaning(number) if kind is ResourceExhausted else os.strerror(number)
    blocked = "; a sandbox must allow it" if number in (errno.EPERM, errno.ENOSYS, errno.EACCES) else ""
    return kind(f"the system call {call.__name__} failed: {why} [{name}]{blocked}")


def is_real(value: object) -> bool:
    return isinstance(value, numbers.Real)


def as_int(value: object, what: str, unit: str = "") -> int:
    """Return a whole number of Python or NumPy as an int. Raises `InvalidArgument` for any other value."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f"{what} is {value!r}; give a whole number{unit}") from None


def flag(value: object, what: str) -> bool:
    """Return a bool, NumPy bool or int as a bool. Raises `InvalidArgument` for anything else."""
    if not isinstance(value, int | np.bool_):
        raise InvalidArgument(f"{what} is True or False, not {type(value).__name__}")
    return bool(value)


def member(kind: type[E], value: object, what: str) -> E:
    """Return a member of an enumeration. `value` is the member, its number, or its name in upper or lower case."""
    try:
        return kind[value.upper()] if isinstance(value, str) else kind(value)  # type: ignore[arg-type]
    except (KeyError, ValueError):
        choices = ", ".join(repr(each.name.lower()) for each in kind)
        raise InvalidArgument(f"{what}={value!r}; choose one of {choices}") from None


def one_of(value: T, what: str, words: Collection[object]) -> T:
    """Return `value` if `words` contains it. Otherwise raise `InvalidArgument`, which lists the words."""
    if not isinstance(value, str | tuple) or value not in words:
        *others, last = map(repr, words)
        raise InvalidArgument(f"{what}={value!r}; choose {', '.join(others)} or {last}")
    return value
