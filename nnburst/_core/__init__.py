"""The C core: cffi's ``ffi`` and ``lib``, and the one place where an errno becomes an exception."""

from __future__ import annotations

from ._errno import check, checked_timeout, deadline_after, header_digest, is_real
from ._fds import FdSet
from ._nnburst import ffi, lib

__all__ = ["FdSet", "check", "checked_timeout", "deadline_after", "ffi", "header_digest", "is_real", "lib"]
