"""The libraries of the extra ``onnx``, imported when a model needs them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from ...errors import DeviceUnavailable
from . import capi

_MUCH = 8 << 20
_INSTALL = "install them with pip install 'nnburst[onnx]'"


def require_extra() -> None:
    """Look whether the libraries are installed, without importing them.

    Raises:
        DeviceUnavailable: One is missing; the message names the extra.
    """
    missing = [name for name in ("onnxruntime", "onnx") if find_spec(name) is None]
    if missing:
        raise DeviceUnavailable(f"the device nnburst-onnxruntime needs {' and '.join(missing)}; {_INSTALL}")


@cache
def _trim() -> Callable[[int], int] | None:
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    return None if function is None else cast("Callable[[int], int]", function)


def give_memory_back(nbytes: int) -> None:
    """Return what the allocator holds to the system, after something of that size was taken apart and dropped."""
    trim = _trim()
    if nbytes >= _MUCH and trim is not None:
        trim(0)


@cache
def onnxruntime() -> Any:
    """Return what makes sessions: `capi`, or the module `onnxruntime` where that is not possible.

    Raises:
        DeviceUnavailable: As `require_extra`.
    """
    require_extra()
    if capi.load():
        return capi
    module = import_module("onnxruntime")
    module.set_default_logger_severity(3)  # its warnings are normal: initialisers it removes, shapes it infers
    return module


@cache
def onnx() -> Any:
    """Return the module `onnx`; raises as `require_extra`."""
    require_extra()
    import_module("onnx.external_data_helper")
    return import_module("onnx")
