"""The C core (cffi's ``ffi`` and ``lib``), deadlines, file descriptors, and exceptions for errnos."""

from __future__ import annotations

import sys

try:
    from ._nnburst import ffi as ffi
    from ._nnburst import lib as lib
except ModuleNotFoundError as error:
    if error.name != f"{__name__}._nnburst":
        raise
    raise ImportError(
        f"the source tree {__file__.rsplit('/', 3)[0]} is not built for this Python: run pip install --editable . "
        "there, or start Python in another directory if nnburst is installed"
    ) from None

# Atomic steps in C rely on the interpreter lock (`_module.h`).
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError("nnburst needs the interpreter lock: set PYTHON_GIL=1 in the environment of this Python")
