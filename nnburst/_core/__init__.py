"""The C core: cffi's ``ffi`` and ``lib``; beside them deadlines, how things end, how an errno becomes an exception."""

from __future__ import annotations

import sys

from ._nnburst import ffi, lib

__all__ = ["ffi", "lib"]

# Steps in C that nothing may come between count on the lock (`_module.h`).
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError("nnburst needs the interpreter lock: set PYTHON_GIL=1 in the environment of this Python")
