"""The libraries of the extra ``onnx``, imported when a model needs them."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any

from ...errors import DeviceUnavailable
from . import capi

CPU = "CPUExecutionProvider"

_MUCH = 8 << 20
_INSTALL = "install them with pip install 'nnburst[onnx]'"


@cache
def require_extra() -> None:
    """Raise `DeviceUnavailable` if ``onnx`` or ``onnxruntime`` is not installed. Imports neither."""
    missing = [name for name in ("onnxruntime", "onnx") if find_spec(name) is None]
    if missing:
        raise DeviceUnavailable(f"the device nnburst-onnxruntime needs {' and '.join(missing)}; {_INSTALL}")


def give_memory_back(nbytes: int) -> None:
    """Return the allocator's free memory to the system, if `nbytes`, the size of a freed object, is large."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Only glibc has it.
    if nbytes >= _MUCH and trim is not None:
        trim(0)


@cache
def onnxruntime(providers: tuple[str, ...] = ()) -> Any:
    """Return the module that makes sessions: `capi` if it loads and `providers` is empty, else `python_module`."""
    require_extra()
    return capi if not providers and capi.load() else python_module()


def check_providers(text: str) -> tuple[str, ...]:
    """Return the full names of the providers in ``A+B``; empty for the CPU alone.

    Raises:
        DeviceUnavailable: See `require_extra`, or the installed ONNX Runtime lacks a provider.
    """
    require_extra()
    offered = python_module().get_available_providers()
    by_name = {each.lower(): name for name in offered for each in (name, name.removesuffix("ExecutionProvider"))}
    asked = text.split("+")
    if unknown := [name for name in asked if name.lower() not in by_name]:
        raise DeviceUnavailable(
            f"providers={text}: this package of ONNX Runtime has no {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(offered)}. Other packages have others, onnxruntime-gpu for example"
        )
    found = tuple(dict.fromkeys(by_name[name.lower()] for name in asked))
    return () if found == (CPU,) else found


@cache
def python_module() -> Any:
    module = import_module("onnxruntime")
    if module.InferenceSession.__module__.startswith("nnburst."):
        raise DeviceUnavailable("nnburst.compat.onnxruntime stands for ONNX Runtime in this process: uninstall() it")
    module.set_default_logger_severity(3)  # Warnings are normal.
    return module


@cache
def onnx() -> Any:
    require_extra()
    import_module("onnx.external_data_helper")
    return import_module("onnx")


@cache
def messages() -> Any:
    """Import only ONNX's protobuf classes, since the import of the whole package takes much longer."""
    require_extra()
    name, package = "onnx.onnx_ml_pb2", find_spec("onnx")
    spec = PathFinder.find_spec(name, package.submodule_search_locations) if package else None
    if name in sys.modules or spec is None or spec.loader is None:  # A frozen program has no files.
        return onnx()
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return sys.modules.setdefault(name, module)  # Another thread may have been faster.
