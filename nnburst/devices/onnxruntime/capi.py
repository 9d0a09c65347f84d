"""A part of ONNX Runtime's Python interface, made of calls to ONNX Runtime's C API.

The library has a table of functions, whose positions never change. This module makes the calls that happen once for a
session or request. ``csrc/ort.c`` makes the calls of each run.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..._core._nnburst import ffi, lib
from ..._core.errno import check
from ...burst.endpoint import python_result
from ...errors import ErrorStatus, GeneralFailure, MissedDeadline, NNBurstError, ResourceExhausted
from ...model.dimensions import element_count
from ...model.running import ExecutionResult
from ..elements import element_within
from ..encoded import STRING, EncodedMap, EncodedSequence, EncodedTensor, Value, tensor_nbytes
from .levels import GraphOptimizationLevel as GraphOptimizationLevel

_log = logging.getLogger(__name__)

_VERSION = 15
"""First version of the C API that has all functions below."""
_FUNCTIONS = {
    "CreateEnv": (3, "int, const char *, void **"),
    "CreateSessionFromArray": (8, "void *, const char *, size_t, void *, void **"),
    "CreateSessionOptions": (10, "void **"),
    "SetOptimizedModelFilePath": (11, "void *, const char *"),
    "SetSessionLogSeverityLevel": (22, "void *, int"),
    "SetSessionGraphOptimizationLevel": (23, "void *, int"),
    "SetIntraOpNumThreads": (24, "void *, int"),
    "SetInterOpNumThreads": (25, "void *, int"),
    "CreateTensorAsOrtValue": (48, "void *, int64_t *, size_t, int, void **"),
    "CreateTensorWithDataAsOrtValue": (49, "void *, void *, size_t, int64_t *, size_t, int, void **"),
    "GetTensorMutableData": (51, "void *, void **"),
    "FillStringTensor": (52, "void *, const char **, size_t"),
    "GetStringTensorDataLength": (53, "void *, size_t *"),
    "GetStringTensorContent": (54, "void *, void *, size_t, size_t *, size_t"),
    "GetTensorElementType": (60, "void *, int *"),
    "GetDimensionsCount": (61, "void *, size_t *"),
    "GetDimensions": (62, "void *, int64_t *, size_t"),
    "GetTensorTypeAndShape": (65, "void *, void **"),
    "GetValueType": (67, "void *, int *"),
    "CreateCpuMemoryInfo": (69, "int, int, void **"),
    "AllocatorFree": (76, "void *, void *"),
    "GetAllocatorWithDefaultOptions": (78, "void **"),
    "GetValue": (80, "void *, int, void *, void **"),
    "GetValueCount": (81, "void *, size_t *"),
    "CreateValue": (82, "void **, size_t, int, void **"),
    "AddSessionConfigEntry": (130, "void *, const char *, const char *"),
    "CreateIoBinding": (134, "void *, void **"),
    "BindInput": (136, "void *, const char *, void *"),
    "BindOutput": (137, "void *, const char *, void *"),
    "BindOutputToDevice": (138, "void *, const char *, void *"),
    "GetBoundOutputValues": (140, "void *, void *, void ***, size_t *"),
    "AddInitializer": (150, "void *, const char *, void *"),
    "HasValue": (192, "void *, int *"),
    "AddExternalInitializers": (210, "void *, const char **, void **, size_t"),
    "GetResizedStringTensorElementBuffer": (252, "void *, size_t, size_t, char **"),
}
"""By function: position in the library's table, and parameters. A function returns a status, NULL for success."""
_RELEASES = {
    "Status": 93,
    "Session": 95,
    "Value": 96,
    "TensorTypeAndShapeInfo": 99,
    "SessionOptions": 100,
    "IoBinding": 135,
    "BoundInputs": 141,
}
_TENSOR, _SEQUENCE, _MAP = 1, 2, 3
_KINDS = ("nothing", "tensor", "sequence", "map", "opaque", "sparse tensor", "optional")
_ERRORS_ONLY = 3
"""Minimum severity of the messages that ONNX Runtime logs: errors. Warnings are normal, and not logged."""


class OrtError(Exception):
    """A failure that ONNX Runtime reports."""


def _function(kind: str, address: object) -> Any:
    return ffi.cast(kind, address)


class _Api:
    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        base = _function("void **(*)(void)", ctypes.cast(library.OrtGetApiBase, ctypes.c_void_p).value)()
        self.version = ffi.string(_function("const char *(*)(void)", base[1])()).decode()
        self.table = _function("void **(*)(uint32_t)", base[0])(_VERSION)
        if not self.table:
            raise OSError(f"{path} has not version {_VERSION} of its interface")
        self._error_message = _function("const char *(*)(void *)", self.table[2])
        self._functions = {
            name: _function(f"void *(*)({takes})", self.table[slot]) for name, (slot, takes) in _FUNCTIONS.items()
        }
        self._releases = {what: _function("void (*)(void *)", self.table[slot]) for what, slot in _RELEASES.items()}
        self.env = self.get("CreateEnv", _ERRORS_ONLY, b"Default")  # It exists until the process ends.
        self.memory = self.get("CreateCpuMemoryInfo", 0, 0)
        self.allocator = self.get("GetAllocatorWithDefaultOptions")

    def call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if not status:
            return
        text = ffi.string(self._error_message(status)).decode(errors="replace")
        self._releases["Status"](status)
        if "std::bad_alloc" in text:
            raise MemoryError(text)
        raise OrtError(text)

    def get(self, name: str, *arguments: Any, kind: str = "void *") -> Any:
        """Call a function; return the value that the function writes to its last argument."""
        out = ffi.new(f"{kind} *")
        self.call(name, *arguments, out)
        return out[0]

    def own(self, what: str, handle: Any) -> Any:
        """Return a handle that owns its object: when the handle is freed, a C function releases the object.

        Args:
            what: The type of the object, such as "Value", which determines the C function.
        """
        return ffi.gc(handle, self._releases[what])

    def release(self, what: str, handle: Any) -> None:
        self._releases[what](handle)

    def tensor(self, element: int, dims: Sequence[int], address: int) -> Any:
        """Return a tensor over the memory at `address`, which the caller must keep longer than the tensor."""
        nbytes = tensor_nbytes(element_within(element, ""), dims)
        place, shape = ffi.cast("void *", address), ffi.new("int64_t[]", dims)
        name = "CreateTensorWithDataAsOrtValue"
        return self.own("Value", self.get(name, self.memory, place, nbytes, shape, len(dims), element))


_api: _Api


def _package() -> Path:
    spec = find_spec("onnxruntime")
    assert spec is not None
    return Path(next(iter(spec.submodule_search_locations or ())))


@cache
def package_version() -> str:
    """Return ONNX Runtime's version from the file of its Python module, because the package can have several names."""
    try:
        match = re.search(r'^__version__ = "(.+)"$', (_package() / "__init__.py").read_text(), re.MULTILINE)
    except FileNotFoundError:  # A frozen program has no file.
        return str(import_module("onnxruntime").__version__)
    return match[1] if match else "unknown"


def load() -> bool:
    """Load the C library once. Return False if it is missing or has another version than the Python module."""
    global _api
    try:
        (path,) = _package().glob("capi/libonnxruntime.so.*")
        _api = _Api(path)
        if not package_version().startswith(_api.version):
            raise OSError(f"the library is of version {_api.version}")
    except (ValueError, OSError, AttributeError) as error:
        _log.info("runs go through ONNX Runtime's Python module, not through its C library: %s", error)
        return False
    return True


def _setting(name: str) -> property:
    return property(None, lambda options, value: _api.call(name, options.handle, value))


class SessionOptions:
    def __init__(self) -> None:
        self.handle = _api.own("SessionOptions", _api.get("CreateSessionOptions"))

    intra_op_num_threads = _setting("SetIntraOpNumThreads")
    inter_op_num_threads = _setting("SetInterOpNumThreads")
    log_severity_level = _setting("SetSessionLogSeverityLevel")
    graph_optimization_level = _setting("SetSessionGraphOptimizationLevel")
    optimized_model_filepath = property(
        None, lambda self, path: _api.call("SetOptimizedModelFilePath", self.handle, os.fsencode(path))
    )

    def add_session_config_entry(self, key: str, value: str) -> None:
        _api.call("AddSessionConfigEntry", self.handle, key.encode(), os.fsencode(value))

    def add_initializer(self, name: str, value: OrtValue) -> None:
        """Replace an initializer of the graph. The value must outlive the session."""
        _api.call("AddInitializer", self.handle, name.encode(), value.handle)

    def add_external_initializers(self, names: Sequence[str], values: Sequence[OrtValue]) -> None:
        """Supply tensors that the graph expects in external files.

        The tensors must exist until the session has been created.
        """
        texts = [ffi.new("char[]", name.encode()) for name in names]
        handles = ffi.new("void *[]", [value.handle for value in values])
        _api.call("AddExternalInitializers", self.handle, ffi.new("const char *[]", texts), handles, len(names))


class OrtValue:
    """A value in ONNX Runtime: a tensor, sequence, map or optional."""

    def __init__(self, handle: Any, array: np.ndarray[Any, Any] | None = None) -> None:
        self.handle = handle
        self._array = array

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(cls, array: np.ndarray[Any, Any], element: int) -> OrtValue:
        """Return a tensor over an array, with the ONNX element type `element`, which NumPy may lack."""
        return cls(_api.tensor(element, array.shape, array.ctypes.data), array)

    def has_value(self) -> bool:
        """Return False for an optional without a value."""
        return bool(_api.get("HasValue", self.handle, kind="int"))

    def shape(self) -> list[int]:
        info = _api.own("TensorTypeAndShapeInfo", _api.get("GetTensorTypeAndShape", self.handle))
        return _dimensions(info)

    def data_ptr(self) -> int:
        return int(ffi.cast("uintptr_t", _api.get("GetTensorMutableData", self.handle)))

    @classmethod
    def of(cls, value: Value) -> OrtValue:
        """Wrap a value other than None. Numbers stay in the memory of `value`, which must outlive the result."""
        if isinstance(value, EncodedTensor):
            if value.offsets is None:
                return cls(_api.tensor(value.element, value.shape, value.data.ctypes.data))
            return cls(_strings(value.offsets, value))
        if isinstance(value, EncodedSequence) and not value.items:
            return _no_tensors(value.element)
        if isinstance(value, EncodedSequence):
            kind, parts = _SEQUENCE, [cls.of(item) for item in value.items]
        else:
            assert isinstance(value, EncodedMap)
            kind, parts = _MAP, [cls.of(value.keys), cls.of(value.values)]
        handles = ffi.new("void *[]", [part.handle for part in parts])
        return cls(_api.own("Value", _api.get("CreateValue", handles, len(parts), kind)))

    def value(self) -> Value:
        """Return a copy of the value. Raises `GeneralFailure` if a value of this kind cannot be sent to clients."""
        if not self.has_value():
            return None
        kind = _api.get("GetValueType", self.handle, kind="int")
        if kind == _TENSOR:
            return self._tensor()
        if kind not in (_SEQUENCE, _MAP):
            raise GeneralFailure(f"a {_KINDS[kind]} cannot be passed on")
        count = 2 if kind == _MAP else _api.get("GetValueCount", self.handle, kind="size_t")
        items = (_api.own("Value", _api.get("GetValue", self.handle, i, _api.allocator)) for i in range(count))
        parts: tuple[Any, ...] = tuple(OrtValue(item).value() for item in items)
        return EncodedMap(*parts) if kind == _MAP else EncodedSequence(0, parts)

    def _tensor(self) -> EncodedTensor:
        info = _api.own("TensorTypeAndShapeInfo", _api.get("GetTensorTypeAndShape", self.handle))
        element, shape = _api.get("GetTensorElementType", info, kind="int"), tuple(_dimensions(info))
        if element != STRING:
            data = np.empty(tensor_nbytes(element_within(element, "a value"), shape), np.uint8)
            if data.size:
                ctypes.memmove(data.ctypes.data, self.data_ptr(), data.size)
            return EncodedTensor(element, shape, data)
        count, nbytes = element_count(shape), _api.get("GetStringTensorDataLength", self.handle, kind="size_t")
        text, starts = np.empty(nbytes, np.uint8), np.zeros(count + 1, np.int64)
        if count:
            places = (ffi.cast(f"{what} *", array.ctypes.data) for what, array in (("void", text), ("size_t", starts)))
            content, offsets = places
            _api.call("GetStringTensorContent", self.handle, content, nbytes, offsets, count)
        starts[count] = nbytes
        return EncodedTensor(STRING, shape, np.insert(text, starts[1:], 0), starts + np.arange(count + 1))


def _strings(offsets: np.ndarray[Any, np.dtype[np.int64]], tensor: EncodedTensor) -> Any:
    """Return a tensor of strings. FillStringTensor cuts strings at a NUL, so strings with NULs are set again."""
    data = tensor.data
    shape = ffi.new("int64_t[]", tensor.shape)
    made = _api.own("Value", _api.get("CreateTensorAsOrtValue", _api.allocator, shape, len(tensor.shape), STRING))
    places = (data.ctypes.data + offsets[:-1]).astype(np.uintp)
    _api.call("FillStringTensor", made, ffi.cast("const char **", places.ctypes.data), len(places))
    inner = np.setdiff1d(np.flatnonzero(data == 0), offsets[1:] - 1)
    for i in np.unique(np.searchsorted(offsets, inner, "right") - 1).tolist():
        start, length = int(offsets[i]), int(offsets[i + 1] - offsets[i] - 1)
        buffer = _api.get("GetResizedStringTensorElementBuffer", made, i, length, kind="char *")
        ffi.memmove(buffer, data[start : start + length].data, length)
    return made


@cache
def _no_tensors(element: int) -> OrtValue:
    """Return an empty sequence of tensors. A model makes it, because no API function can."""
    element_within(element, "a sequence")
    helper, options = import_module("onnx.helper"), SessionOptions()
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(element, None))
    node = helper.make_node("SequenceEmpty", [], ["y"], dtype=element)
    graph = helper.make_graph([node], "empty", [], [helper.make_value_info("y", kind)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options.intra_op_num_threads = 1
    session = InferenceSession(model.SerializeToString(), options)
    binding = session.io_binding()
    binding.bind_output("y", "cpu")
    run = BoundRun(binding)
    if status := run.run(0):
        raise run.failure(status)
    return binding.get_outputs()[0]


def _dimensions(info: Any) -> list[int]:
    rank = _api.get("GetDimensionsCount", info, kind="size_t")
    sizes = ffi.new("int64_t[]", rank)
    _api.call("GetDimensions", info, sizes, rank)
    return list(sizes)


class InferenceSession:
    """A session on the CPU. Thread safe. Raises `OrtError` if ONNX Runtime refuses the model."""

    def __init__(self, data: bytes, options: SessionOptions, **others: object) -> None:
        made = _api.get("CreateSessionFromArray", _api.env, data, len(data), options.handle)
        self.handle = _api.own("Session", made)

    def io_binding(self) -> IOBinding:
        return IOBinding(self)


class IOBinding:
    """The inputs and outputs of a session, each bound to memory under its name. Not for concurrent use."""

    def __init__(self, session: InferenceSession) -> None:
        self.handle = _api.own("IoBinding", _api.get("CreateIoBinding", session.handle))
        self.session = session

    def bind_input(self, name: str, device: str, number: int, element: int, dims: Sequence[int], address: int) -> None:
        """Bind an input to memory that the caller keeps open."""
        _api.call("BindInput", self.handle, name.encode(), _api.tensor(element, dims, address))

    def bind_value(self, name: str, value: OrtValue) -> None:
        _api.call("BindInput", self.handle, name.encode(), value.handle)

    def clear_inputs(self) -> None:
        _api.release("BoundInputs", self.handle)

    def bind_output(
        self, name: str, device: str, number: int = 0, element: int = 0, dims: Sequence[int] = (), address: int = 0
    ) -> None:
        """Bind an output to memory that the caller keeps open. For address 0, ONNX Runtime allocates the output."""
        if address:
            _api.call("BindOutput", self.handle, name.encode(), _api.tensor(element, dims, address))
        else:
            _api.call("BindOutputToDevice", self.handle, name.encode(), _api.memory)

    def get_outputs(self) -> list[OrtValue]:
        values, count = ffi.new("void ***"), ffi.new("size_t *")
        _api.call("GetBoundOutputValues", self.handle, _api.allocator, values, count)
        outputs = [OrtValue(_api.own("Value", values[0][i])) for i in range(count[0])]
        if values[0]:
            _api.call("AllocatorFree", _api.allocator, values[0])
        return outputs


Copies = Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
"""Pairs (target, source) of equally large arrays. In copies of bools, any byte but 0 becomes 1."""
_FAILURES: dict[int, type[NNBurstError]] = {
    ErrorStatus.MISSED_DEADLINE_TRANSIENT: MissedDeadline,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: ResourceExhausted,
}


class BoundRun:
    """A kernel in C that copies inputs, runs a binding and copies outputs.

    Args:
        binding: The binding to run.

    Attributes:
        kernel: An ``nnb_kernel *``, valid as long as this object.
        run: Function that runs the kernel until a deadline (0 for none) without the interpreter's lock. Returns 0, or
            the status of a failure.
    """

    def __init__(self, binding: IOBinding, before: Copies = (), after: Copies = ()) -> None:
        def place(array: np.ndarray[Any, Any]) -> Any:
            return ffi.cast("void *", array.ctypes.data)

        self._kept: list[object] = [binding, before, after]
        rows = [(place(to), place(source), to.nbytes, to.dtype == np.bool_) for to, source in (*before, *after)]
        copies = ffi.new("nnb_copy[]", rows)
        out = ffi.new("nnb_kernel **")
        session, bound = binding.session.handle, binding.handle
        check(lib.nnb_ort_create(out, _api.table, session, bound, copies, len(before), len(after)))
        self.kernel = ffi.gc(out[0], out[0].destroy)
        self.run = partial(lib.nnb_kernel_run, self.kernel)

    def describe_arguments(self, rows: Any, n_inputs: int, *, adapts: bool) -> None:
        """Pass the ``nnb_ort_argument`` structures of all arguments to the kernel; see ``nnb_ort_tell``."""
        self._kept.append(rows)
        n_outputs = len(rows) - n_inputs
        check(lib.nnb_ort_tell(self.kernel, rows, n_inputs, n_outputs, _api.memory, _api.allocator, adapts))

    def finish(self) -> int:
        """Finish a run that stopped because a buffer was too small, and return a status like `run`."""
        return int(lib.nnb_ort_take(self.kernel))

    def run_into_binding(self, deadline_ns: int) -> int:
        """Run like `run`, but leave the outputs in the binding."""
        result, self.kernel.result = self.kernel.result, ffi.NULL
        try:
            return int(self.run(deadline_ns))
        finally:
            self.kernel.result = result

    def result(self) -> ExecutionResult | None:
        """Return the last run's result with output shapes; None if all shapes were known before the run."""
        return python_result(self.kernel.result(self.kernel)) if self.kernel.result else None

    def failure(self, status: int) -> NNBurstError:
        """Return the error of a run that has just failed with this status."""
        sentence = self.kernel.sentence(self.kernel)
        text = ffi.string(sentence).decode(errors="replace") if sentence else "no reason is known"
        return _FAILURES.get(status, GeneralFailure)(text)

    def cancel(self) -> None:
        """Stop the present run between two nodes, and later runs before their first node."""
        lib.nnb_ort_cancel(self.kernel)
