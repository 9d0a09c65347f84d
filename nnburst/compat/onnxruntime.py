"""ONNX Runtime's Python interface, for models in sandboxed processes.

In your program, use ``import nnburst.compat.onnxruntime as onnxruntime``. For packages that import ``onnxruntime``,
call `install`. Each session has its own process, unless the environment variable NNBURST_SERVICE names a service for
all sessions (see `nnburst.connect`).
"""

from __future__ import annotations

import copy
import enum
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec import Struct

from ..devices.elements import element_of, element_within
from ..devices.onnxruntime.levels import GraphOptimizationLevel
from ..errors import DeadObject, GeneralFailure, InvalidArgument, NoSuchFile, OutputInsufficientSize

if TYPE_CHECKING:
    from ..memory.memory import Memory
    from ..model.extensions import ModelMetadata
    from ..model.types import Array
    from ..runtime.execution import Execution

__all__ = [
    "ExecutionMode", "GraphOptimizationLevel", "IOBinding", "InferenceSession", "NodeArg", "OrtValue", "RunOptions",
    "SessionOptions", "get_available_providers", "get_device", "install", "uninstall",
]  # fmt: skip

_CPU = "CPUExecutionProvider"
_DEVICE = "nnburst-onnxruntime"

# Packages import these names of ONNX Runtime's exceptions and modules.
Fail = InvalidGraph = ModelLoaded = NoModel = NotImplemented = RuntimeException = EPFail = EngineError = GeneralFailure
InvalidProtobuf, DeviceReset = InvalidArgument, DeadObject
capi = onnxruntime_pybind11_state = _pybind_state = onnxruntime_inference_collection = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ..devices.onnxruntime.capi import package_version

        return package_version()
    raise AttributeError(f"nnburst.compat.onnxruntime has no {name}; docs/api.md lists what it has")


class ExecutionMode(enum.IntEnum):
    """Modes for running a model's nodes. The choice has no effect here."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class _Options:
    """Base of option classes: attributes with defaults, and entries by key."""

    _defaults: ClassVar[dict[str, Any]]
    _instead: ClassVar[dict[str, str]] = {}
    """Alternatives to unsupported attributes, by name."""
    _entries: ClassVar[frozenset[str]] = frozenset()
    """Keys of accepted entries, which do not affect results."""

    def __init__(self) -> None:
        vars(self).update(self._defaults, _given={})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._refusal(name))

    def __setattr__(self, name: str, value: Any) -> None:
        default = self._defaults.get(name)
        if default is None or (name in self._instead and value != default):
            raise InvalidArgument(self._refusal(name))
        vars(self)[name] = type(default)(value)

    def _refusal(self, name: str) -> str:
        remedy = self._instead.get(name, f"leave it out; there are {', '.join(self._defaults)}")
        return f"{type(self).__name__}.{name} is not for models in another process: {remedy}"

    def _add(self, key: str, value: str) -> None:
        """Set an entry.

        Args:
            key: Name of the entry.
            value: Text, such as ``"1"``.

        Raises:
            InvalidArgument: The key is unknown.
        """
        if key not in self._entries:
            raise InvalidArgument(f"the entry {key!r} is not for models in another process: leave it out")
        vars(self)["_given"][key] = value

    def _get(self, key: str) -> str:
        """Return the value of an entry.

        Args:
            key: Name of the entry.

        Raises:
            GeneralFailure: The entry was not set.
        """
        if key not in self._given:
            raise GeneralFailure(f"{type(self).__name__} has no entry {key!r}")
        return str(self._given[key])


_LOGGING = {"log_severity_level": -1, "log_verbosity_level": 0, "logid": ""}
_SPINNING = "session.intra_op.allow_spinning"


class SessionOptions(_Options):
    """Options of a session.

    ``intra_op_num_threads``, ``graph_optimization_level`` and the entry ``session.intra_op.allow_spinning`` have an
    effect. Options that do not affect results, such as log levels, are accepted without effect. All other options
    raise an error. In a shared service, `intra_op_num_threads` has no effect.

    Example:
        >>> from nnburst.compat import onnxruntime
        >>> options = onnxruntime.SessionOptions()
        >>> options.intra_op_num_threads = 2
    """

    _defaults: ClassVar[dict[str, Any]] = {
        **_LOGGING, "enable_cpu_mem_arena": True, "enable_mem_pattern": True, "enable_mem_reuse": True,
        "enable_profiling": False, "execution_mode": ExecutionMode.ORT_SEQUENTIAL,
        "graph_optimization_level": GraphOptimizationLevel.ORT_ENABLE_ALL, "inter_op_num_threads": 0,
        "intra_op_num_threads": 0, "optimized_model_filepath": "", "use_deterministic_compute": False,
    }  # fmt: skip
    _instead: ClassVar[dict[str, str]] = {
        "add_external_initializers": "keep the weights in files beside the model",
        "add_free_dimension_override_by_name": "set the dimension in the model file",
        "add_initializer": "keep the weights in the model file",
        "enable_profiling": "use Session.latency() or `nnburst trace`",
        "register_custom_ops_library": "serve a function that opens the model with that library (docs/onnx.md)",
        "use_deterministic_compute": "leave it out",
    }
    _entries = frozenset((_SPINNING, "session.inter_op.allow_spinning", "session.use_env_allocators"))

    add_session_config_entry, get_session_config_entry = _Options._add, _Options._get

    def _device(self) -> str:
        spinning, level = int(self._given.get(_SPINNING) == "1"), self.graph_optimization_level.name
        return f"{_DEVICE}:threads={max(self.intra_op_num_threads, 0)},spinning={spinning},optimization={level}"


class RunOptions(_Options):
    """Options of a run. With ``terminate``, new runs fail at once, and runs in progress continue.

    Example:
        >>> from nnburst.compat import onnxruntime
        >>> options = onnxruntime.RunOptions()
        >>> options.terminate = True
    """

    _defaults: ClassVar[dict[str, Any]] = {**_LOGGING, "only_execute_path_to_fetches": False, "terminate": False}
    _entries = frozenset(("memory.enable_memory_arena_shrinkage", "disable_synchronize_execution_providers"))

    add_run_config_entry, get_run_config_entry = _Options._add, _Options._get


class NodeArg(Struct, frozen=True):
    """The description of an input or output.

    Attributes:
        name: Name in the model file.
        type: ONNX Runtime's name of the type: ``tensor(float)``, ``seq(map(int64,tensor(float)))``.
        shape: Sizes of the dimensions; a symbolic name or None for an open dimension.

    Example:
        >>> from nnburst.compat.onnxruntime import NodeArg
        >>> NodeArg("image", "tensor(float)", ["n", 8, 8, 1]).shape[0]
        'n'
    """

    name: str
    type: str
    shape: list[int | str | None]


class OrtValue:
    """A value on the CPU, created by class methods.

    A value from `ortvalue_from_shape_and_type` is in memory shared with services. A run copies nothing if all values
    are bound and in shared memory.

    Example:
        >>> from nnburst.compat.onnxruntime import OrtValue
        >>> value = OrtValue.ortvalue_from_numpy(np.zeros((2, 3), np.float32))
        >>> value.data_type(), value.shape()
        ('tensor(float)', [2, 3])
    """

    def __init__(self, value: Any, data_type: str = "", memory: Memory | None = None) -> None:
        """Use `ortvalue_from_numpy` or `ortvalue_from_shape_and_type` instead."""
        self._value, self._memory = value, memory
        self._type = data_type or f"tensor({element_of(value.dtype, 'the array').name})"

    @classmethod
    def ortvalue_from_numpy(cls, numpy_obj: Array, /, device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """Return a value that uses an array without a copy.

        Args:
            numpy_obj: The array.
            device_type, device_id: ``"cpu"``; the number is ignored.
        """
        _require_cpu(device_type)
        return cls(numpy_obj)

    @classmethod
    def ortvalue_from_shape_and_type(
        cls, shape: Sequence[int], element_type: Any = np.float32, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        """Return a value of zeros in shared memory.

        Args:
            shape: Sizes of the dimensions.
            element_type: A NumPy type, or ONNX's number of a type.
            device_type, device_id: ``"cpu"``; the number is ignored.
        """
        from ..memory.memory import Memory

        _require_cpu(device_type)
        dtype, data_type = _element(element_type)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = Memory.ashmem(max(nbytes, 1), "ortvalue")
        return cls(memory.array(dtype, tuple(shape)), data_type, memory if nbytes else None)

    def numpy(self) -> Array:
        """Return the array. Raises `GeneralFailure` if the value is not an array."""
        if not isinstance(self._value, np.ndarray):
            raise GeneralFailure(f"a value of type {self._type} is no array")
        return self._value

    def update_inplace(self, np_arr: Array) -> None:
        """Overwrite the elements.

        Args:
            np_arr: Array of the same type and shape.
        """
        if (np_arr.shape, np_arr.dtype) != (self.numpy().shape, self.numpy().dtype):
            raise InvalidArgument(f"an array of {np_arr.dtype} {np_arr.shape} does not fit {self._type} {self.shape()}")
        self.numpy()[...] = np_arr

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return int(self.numpy().ctypes.data)

    def device_name(self) -> str:
        """Return ``"cpu"``."""
        return "cpu"

    def shape(self) -> list[int]:
        """Return the sizes of the array."""
        return list(self.numpy().shape)

    def data_type(self) -> str:
        """Return ONNX Runtime's name of the type, such as ``tensor(float)``."""
        return self._type

    def is_tensor(self) -> bool:
        """Return True for an array."""
        return self._type.startswith("tensor(")


def _require_cpu(device_type: str) -> None:
    if device_type.lower() != "cpu":
        raise InvalidArgument(f"memory of {device_type!r}: models run on the CPU, and values lie there; give 'cpu'")


def _element(element_type: Any) -> tuple[np.dtype[Any], str]:
    """Return the NumPy type for `element_type`, and ONNX Runtime's name for an array of such elements."""
    is_number = isinstance(element_type, int)
    row = element_within(element_type, "a value") if is_number else element_of(np.dtype(element_type), "a value")
    return np.dtype(row.dtype), f"tensor({row.name})"


def _value_at(address: int, element_type: Any, shape: Sequence[int] | None) -> OrtValue:
    """Return a value at a memory address. The caller must keep the memory allocated."""
    import ctypes

    if element_type is None or shape is None:
        raise InvalidArgument("memory at buffer_ptr needs element_type and shape, too")
    dtype, data_type = _element(element_type)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return OrtValue(np.ndarray(shape, dtype, memory), data_type)


class IOBinding:
    """Bound inputs and outputs for several runs, created by `InferenceSession.io_binding`.

    Example:
        >>> from importlib.resources import files
        >>> from nnburst.compat import onnxruntime
        >>> session = onnxruntime.InferenceSession(files("nnburst.cli.demo") / "data" / "digits.onnx")
        >>> binding = session.io_binding()
        >>> binding.bind_cpu_input("image", np.zeros((2, 8, 8, 1), np.float32))
        >>> binding.bind_output("probabilities")
        >>> session.run_with_iobinding(binding)
        >>> binding.get_outputs()[0].shape()
        [2, 10]
    """

    def __init__(self, session: InferenceSession) -> None:
        """Use `InferenceSession.io_binding` instead."""
        self._session = session
        self._inputs: dict[str, OrtValue] = {}
        self._outputs: dict[str, OrtValue | None] = {}
        self._results: list[OrtValue] = []
        self._bound: tuple[dict[str, OrtValue | None], Execution] | None = None
        """The bound values in shared memory, and their execution."""

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Bind an input to an array.

        Args:
            name: Name of the input.
            arr_on_cpu: The array, which each run reads.
        """
        self._inputs[name] = OrtValue(arr_on_cpu, "" if isinstance(arr_on_cpu, np.ndarray) else "value")

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind an input to memory at an address.

        Args:
            name: Name of the input.
            device_type, device_id: ``"cpu"``; the number is ignored.
            element_type: A NumPy type, or ONNX's number of a type.
            shape: Sizes of the dimensions.
            buffer_ptr: The address. The memory must stay allocated until the last run.
        """
        _require_cpu(device_type)
        self._inputs[name] = _value_at(buffer_ptr, element_type, shape)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an input to a value.

        Args:
            name: Name of the input.
            ortvalue: The value.
        """
        self._inputs[name] = ortvalue

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output to memory at an address, or to a new array in each run.

        Args:
            name: Name of the output.
            device_type, device_id, element_type, shape: See `bind_input`.
            buffer_ptr: The address, as for `bind_input`; None for new arrays.
        """
        _require_cpu(device_type)
        self._outputs[name] = None if buffer_ptr is None else _value_at(buffer_ptr, element_type, shape)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an output to a value.

        Args:
            name: Name of the output.
            ortvalue: The value, which each run overwrites.
        """
        self._outputs[name] = ortvalue

    def synchronize_inputs(self) -> None:
        """Do nothing: all values are on the CPU."""

    synchronize_outputs = synchronize_inputs

    def clear_binding_inputs(self) -> None:
        """Remove the bound inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Remove the bound outputs, and the last run's outputs."""
        self._outputs.clear()
        self._results = []

    def get_outputs(self) -> list[OrtValue]:
        """Return the outputs of the last run, in the order of binding."""
        return list(self._results)

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Return copies of the outputs of the last run, as arrays."""
        return [value.numpy().copy() if value.is_tensor() else value._value for value in self._results]

    def _run(self) -> None:
        if not self._outputs:
            raise GeneralFailure("no output is bound: call bind_output() first")
        bound = {**self._inputs, **self._outputs}
        if all(value is not None and value._memory is not None for value in bound.values()):
            if self._bound is None or self._bound[0] != bound:
                arrays = {name: value.numpy() for name, value in bound.items() if value is not None}
                self._bound = bound, self._session._session.bind(memory=arrays)
            with suppress(OutputInsufficientSize):  # an unbound output of unknown shape raises it
                self._bound[1].run()
                self._results = [value for value in self._outputs.values() if value is not None]
                return
        made = self._session.run_with_ort_values(list(self._outputs), self._inputs)
        for value, new in zip(self._outputs.values(), made, strict=True):
            if value is not None:
                value.update_inplace(new.numpy())
        self._results = [value or new for value, new in zip(self._outputs.values(), made, strict=True)]


class InferenceSession:
    """A model in its own process, with ONNX Runtime's methods. Any number of threads may use a session.

    If the model crashes, runs in progress raise `DeadObject`, and the next run restarts the process. The process ends
    when the last reference to the session is dropped.

    Args:
        path_or_bytes: Path of a model file, or its contents.
        sess_options: See `SessionOptions`.
        providers: Names, or pairs of a name and options. Providers other than ``CPUExecutionProvider`` cause a warning.
        provider_options: Ignored.
        others: ``enable_fallback`` is ignored; other keywords raise an error.

    Raises:
        NoSuchFile: The file does not exist.
        InvalidArgument: The file contains no model, or an option is not supported.
        NNBurstError: See `nnburst.Session`.

    Example:
        >>> from importlib.resources import files
        >>> from nnburst.compat import onnxruntime
        >>> session = onnxruntime.InferenceSession(files("nnburst.cli.demo") / "data" / "digits.onnx")
        >>> (y,) = session.run(["probabilities"], {"image": np.zeros((2, 8, 8, 1), np.float32)})
        >>> y.shape
        (2, 10)
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        **others: Any,
    ) -> None:
        from ..runtime.session import Session

        if refused := [name for name in others if name != "enable_fallback"]:
            raise InvalidArgument(f"{', '.join(refused)} is not for models in another process: leave it out")
        _check_kind(options := sess_options or SessionOptions(), SessionOptions)
        self._options = copy.deepcopy(options)
        self._model_path = os.fspath(path_or_bytes) if isinstance(path_or_bytes, str | os.PathLike) else None
        self._providers, self._provider_options = self.get_providers(), self.get_provider_options()
        if options.optimized_model_filepath:
            warnings.warn("optimized_model_filepath: no file is written; nnburst.Session has cache_dir=", stacklevel=2)
        self.set_providers(providers)
        service, device = None, self._options._device()
        if address := os.environ.get("NNBURST_SERVICE"):
            from ..runtime.pickled import connected

            if self._options.graph_optimization_level != GraphOptimizationLevel.ORT_ENABLE_ALL:
                raise InvalidArgument("graph_optimization_level is a shared service's own: unset it or NNBURST_SERVICE")
            service, device = connected(address, 10.0, ()), _DEVICE
        self._session = Session(_source(path_or_bytes), service=service, device=device, on_death="restart")
        self._types = {node.name: node.type for node in self.get_outputs()}

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None = None
    ) -> list[Any]:
        """Run the model and return its outputs. Raises the same errors as `nnburst.Session.run`.

        Args:
            output_names: Outputs to return, in order; None or an empty list for all.
            input_feed: Arrays, or `OrtValue` objects, by name.
            run_options: See `RunOptions`.
        """
        _check_run(run_options)
        if OrtValue in map(type, input_feed.values()):
            input_feed = {name: getattr(value, "_value", value) for name, value in input_feed.items()}
        return [_decode_strings(output) for output in self._session.run(output_names, input_feed)]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], object],
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """Run the model in a thread.

        Args:
            output_names, input_feed, run_options: See `run`.
            callback: Function that the thread calls at the end, as ``callback(outputs, user_data, error)``. After a
                success, ``error`` is "".
            user_data: An object for `callback`.
        """

        def run() -> None:
            try:
                outputs, failure = self.run(output_names, input_feed, run_options), ""
            except Exception as error:
                outputs, failure = [], str(error)
            callback(outputs, user_data, failure)

        threading.Thread(target=run, name="nnburst-run-async").start()

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """Run the model like `run`, and return `OrtValue` objects.

        Args:
            output_names, run_options: See `run`.
            input_dict_ort_values: Values by name.
        """
        outputs = self.run(output_names, input_dict_ort_values, run_options)
        return list(map(OrtValue, outputs, [self._types[name] for name in output_names or self._types]))

    def io_binding(self) -> IOBinding:
        """Return an empty binding."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run the model on a binding's inputs and outputs.

        Args:
            iobinding: A binding from `io_binding`.
            run_options: See `RunOptions`.
        """
        _check_run(run_options)
        if iobinding._session is not self:
            raise InvalidArgument("the binding belongs to another session; make one with io_binding()")
        iobinding._run()

    def get_inputs(self) -> list[NodeArg]:
        """Return the required inputs."""
        return _node_args(self._session.get_inputs())

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs."""
        return _node_args(self._session.get_outputs())

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return the optional inputs."""
        return _node_args(self._session.get_overridable_initializers())

    def get_modelmeta(self) -> ModelMetadata:
        """Return the file's metadata, such as ``custom_metadata_map``."""
        return self._session.compilation.metadata

    def get_session_options(self) -> SessionOptions:
        """Return the session's options."""
        return self._options

    def get_providers(self) -> list[str]:
        """Return ``["CPUExecutionProvider"]``."""
        return [_CPU]

    def set_providers(self, providers: Sequence[Any] | None = None, provider_options: object = None) -> None:
        """Keep the CPU provider.

        Args:
            providers: Names, or pairs of a name and options. Other providers than the CPU's cause a warning.
            provider_options: Ignored.
        """
        if absent := {each if isinstance(each, str) else each[0] for each in providers or ()} - {_CPU}:
            remedy = f'nnburst.Session(path, device="{_DEVICE}:providers=cuda") has CUDA, and others by their names'
            warnings.warn(f"without {', '.join(sorted(absent))}: models run on the CPU here; {remedy}", stacklevel=3)

    def disable_fallback(self) -> None:
        """Do nothing: sessions have only one provider."""

    enable_fallback = disable_fallback

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return the options of the CPU provider, which has none."""
        return {_CPU: {}}


def _check_kind(options: object, kind: type) -> None:
    if not isinstance(options, kind):
        raise TypeError(f"options are {options!r}: make {__name__}.{kind.__name__}, or install() before other imports")


def _check_run(options: RunOptions | None) -> None:
    if options is not None:
        _check_kind(options, RunOptions)
        if options.terminate:
            raise GeneralFailure("RunOptions.terminate is set: nothing ran")


def _source(path_or_bytes: Any) -> Any:
    """Return the contents of a file whose name does not end in ``.onnx``; return any other argument unchanged."""
    if isinstance(path_or_bytes, str | os.PathLike) and not os.fspath(path_or_bytes).lower().endswith(".onnx"):
        try:
            return Path(path_or_bytes).read_bytes()
        except OSError as error:
            raise NoSuchFile(f"model file {str(path_or_bytes)!r} cannot be opened: {error.strerror}") from None
    return path_or_bytes


def _node_args(nodes: Sequence[Any]) -> list[NodeArg]:
    def type_of(node: Any) -> str:
        return node.holds or f"tensor({node.bits_of.replace('_', '') or element_of(node.dtype, node.name).name})"

    return [NodeArg(node.name, type_of(node), list(node.shape or ())) for node in nodes]


def _decode_strings(value: Any) -> Any:
    """Return a value with strings as Python objects, as in ONNX Runtime's outputs."""
    if isinstance(value, list):
        return [_decode_strings(item) for item in value]
    return value.astype(object) if isinstance(value, np.ndarray) and value.dtype.kind == "T" else value


def get_available_providers() -> list[str]:
    """Return ``["CPUExecutionProvider"]``.

    Example:
        >>> from nnburst.compat import onnxruntime
        >>> onnxruntime.get_available_providers()
        ['CPUExecutionProvider']
    """
    return [_CPU]


get_all_providers = get_available_providers


def get_device() -> str:
    """Return ``"CPU"``.

    Example:
        >>> from nnburst.compat import onnxruntime
        >>> onnxruntime.get_device()
        'CPU'
    """
    return "CPU"


def disable_telemetry_events(*args: Any, **kwargs: Any) -> None:
    """Do nothing, because nnburst needs none of these settings. Services log only errors, and send no telemetry."""


enable_telemetry_events = preload_dlls = disable_telemetry_events
set_default_logger_severity = set_default_logger_verbosity = disable_telemetry_events

_replaced: dict[str, ModuleType] = {}
_NAMES = ("onnxruntime", *(f"onnxruntime.{name}" for name in ("capi", "capi.onnxruntime_pybind11_state")))
_NAMES += ("onnxruntime.capi._pybind_state", "onnxruntime.capi.onnxruntime_inference_collection")


def install() -> None:
    """Make ``import onnxruntime`` return this module, everywhere in this process. Idempotent.

    Modules that have already imported ONNX Runtime keep it. A warning names these modules.

    Example:
        >>> import nnburst.compat.onnxruntime
        >>> nnburst.compat.onnxruntime.install()  # doctest: +SKIP
        >>> import onnxruntime  # doctest: +SKIP
    """
    if _is_installed():
        return
    real, spec = sys.modules.get("onnxruntime"), find_spec("onnxruntime")
    stand_in = ModuleType("onnxruntime", __doc__)
    # The module has the spec and path of the real package: users look for both, and import `onnxruntime.transformers`.
    vars(stand_in).update(globals(), __name__="onnxruntime", __spec__=spec or __spec__)
    stand_in.__path__ = (spec and spec.submodule_search_locations) or []
    if real is not None:
        names = {name: [*getattr(module, "__dict__", {}).values()] for name, module in [*sys.modules.items()]}
        users = [name for name, values in names.items() if any(value is real for value in values)]
        warnings.warn(f"onnxruntime was imported before install(), and stays in {users or 'use'}", stacklevel=2)
    _replaced.update(_remove_modules())
    sys.modules.update(dict.fromkeys(_NAMES, stand_in))


def uninstall() -> None:
    """Undo `install` for later imports. Idempotent.

    Example:
        >>> from nnburst.compat.onnxruntime import uninstall
        >>> uninstall()
    """
    if _is_installed():
        _remove_modules()
        sys.modules.update(_replaced)
        _replaced.clear()


def _remove_modules() -> dict[str, ModuleType]:
    """Remove the modules of ONNX Runtime from `sys.modules`, and return them by name."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "onnxruntime"}


def _is_installed() -> bool:
    return getattr(sys.modules.get("onnxruntime"), "install", None) is install
