"""The C core: cffi's ``ffi`` and ``lib``, where an errno becomes an exception, deadlines, and how things end."""

from __future__ import annotations

from ._nnburst import ffi, lib
from .deadline import Deadline, checked_timeout
from .errno import check, header_digest, is_real, system
from .fds import FdSet, close_fds
from .leaving import LEAVING, Closing, Leaving, ProcessLock, abandon_when_forked
from .one_process import OneProcess

__all__ = [
    "LEAVING",
    "Closing",
    "Deadline",
    "FdSet",
    "Leaving",
    "OneProcess",
    "ProcessLock",
    "abandon_when_forked",
    "check",
    "checked_timeout",
    "close_fds",
    "ffi",
    "header_digest",
    "is_real",
    "lib",
    "system",
]
