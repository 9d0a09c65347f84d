"""Compiled graphs: ONNX Runtime sessions, which models from equal files share."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ...errors import GeneralFailure, InvalidArgument, ResourceExhausted
from ...model.dimensions import element_count
from ..common import OwnBytes
from ..elements import element_type
from ..encoded import Bytes, read
from .capi import BoundRun, Copies, InferenceSession
from .guards import add_guards
from .importer import GraphArgument, all_tensors, describe, external_location, parse, serialise
from .library import CPU, messages, onnxruntime
from .python_run import PythonRun
from .snapshots import exposed_arguments
from .zip_maps import replace_zip_maps

_log = logging.getLogger(__name__)


FILES_OF_MODELS = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's option for the directory of external data."""
_FORMAT_OF_MODELS = "session.load_model_format"
"""ONNX Runtime's option for a model's format, which it otherwise guesses from the first bytes."""


class SessionSettings(Struct, frozen=True):
    """The settings of an ONNX Runtime session.

    Attributes:
        threads: Number of threads that work on one operation; 0 for one per processor.
        spinning: True if idle threads spin instead of sleeping.
        providers: Execution providers in order of preference; empty for the CPU alone.
        optimization: ONNX Runtime's name of the optimisation level.
    """

    threads: int = 0
    spinning: bool = False
    providers: tuple[str, ...] = ()
    optimization: str = "ORT_ENABLE_ALL"

    @property
    def runtime(self) -> Any:
        return onnxruntime(self.providers)

    def options(self) -> Any:
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if self.spinning else "0")
        options.graph_optimization_level = getattr(self.runtime.GraphOptimizationLevel, self.optimization)
        options.log_severity_level = 3
        options.add_session_config_entry(FILES_OF_MODELS, "/dev/null")  # No external file is found there.
        options.add_session_config_entry(_FORMAT_OF_MODELS, "ONNX")
        return options


class About(Struct, frozen=True):
    """The properties of a graph that requests need. The cache stores them with the compilation."""

    inputs: tuple[GraphArgument, ...]
    optional: tuple[GraphArgument, ...]
    outputs: tuple[GraphArgument, ...]
    exposed: frozenset[str]
    labels: dict[str, bytes]


class Graph:
    """An ONNX Runtime session, with the properties that do not depend on requests. Thread safe.

    Attributes:
        session: The `InferenceSession` of `capi` or of the Python module.
        inputs: Inputs without a default.
        optional: Inputs with a default, keyed by name.
        exposed: Names of inputs and outputs to copy around each run; see `exposed_arguments`.
        keys: For each output that returns scores in place of maps, the keys of the maps; see `replace_zip_maps`.
    """

    __slots__ = ("__weakref__", "_kept", "exposed", "inputs", "keys", "optional", "outputs", "session")

    def __init__(self, session: Any, about: About, kept: object = None) -> None:
        self.session = session
        self.inputs, self.outputs = about.inputs, about.outputs
        self.optional = {each.name: each for each in about.optional}
        self.exposed = about.exposed
        self.keys = {name: read(np.frombuffer(text, np.uint8), name) for name, text in about.labels.items()}
        self._kept = kept  # The session uses these weights but does not own them.
        held = [each.name for each in (*about.inputs, *about.optional, *about.outputs) if each.holds]
        if held and not isinstance(session, InferenceSession):
            raise GeneralFailure(
                f"{held} hold other values than numbers; that needs the C library of ONNX Runtime 1.19, and {CPU} alone"
            )

    def bind(
        self, binding: Any, before: Copies, after: Copies, binds: Sequence[Callable[[], None]] = ()
    ) -> BoundRun | PythonRun:
        """Return a kernel that copies the inputs, runs the binding, and copies the outputs.

        Args:
            binds: Functions that bind the inputs; used only for a run in Python.
        """
        if isinstance(self.session, InferenceSession):
            return BoundRun(binding, before, after)
        return PythonRun(self.session, binding, before, after, binds)


def content_digest(data: bytes, files: Mapping[str, Bytes]) -> bytes:
    """Return a digest (32 bytes) of a model's files."""
    whole = hashlib.sha256(hashlib.sha256(data).digest())
    for name, content in sorted(files.items()):
        whole.update(hashlib.sha256(name.encode()).digest())
        whole.update(hashlib.sha256(content.data).digest())
    return whole.digest()


class GraphStore:
    """The graphs in use, keyed by a digest of the model's files or by cache entry. Equal models share weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: weakref.WeakValueDictionary[bytes, Graph] = weakref.WeakValueDictionary()
        self._making: weakref.WeakValueDictionary[bytes, threading.Lock] = weakref.WeakValueDictionary()

    def get(self, key: bytes, make: Callable[[], Graph]) -> Graph:
        """Return the graph of a key. The first caller makes the graph while other callers wait."""
        with self._lock:
            turn = self._making.setdefault(key, threading.Lock())
        with turn:
            graph = self._graphs.get(key)
            if graph is None:
                graph = make()
                self.put(key, graph)
        return graph

    def put(self, key: bytes, graph: Graph) -> None:
        with self._lock:
            self._graphs[key] = graph


def compile_graph(data: bytes, files: Mapping[str, Bytes], settings: SessionSettings) -> Graph:
    """Compile a model to a graph.

    Args:
        files: Contents of the model's external files, by name.

    Raises:
        InvalidArgument: The model is malformed, or an external file is missing.
        GeneralFailure: ONNX Runtime cannot run the model, for example because of an unknown operator.
        ResourceExhausted: There is not enough memory.
    """
    return Graph(*build_session(data, files, settings, settings.options()))  # The session copies the files.


def build_session(
    data: bytes, files: Mapping[str, Bytes], settings: SessionSettings, options: Any
) -> tuple[Any, About]:
    """Return an ``InferenceSession`` for a model's files. Raises the errors of `compile_graph`."""
    proto = parse(data)
    inputs, optional, outputs = describe(proto)
    labels = replace_zip_maps(proto)
    add_guards(proto)
    about = About(inputs, optional, _copy_passed_inputs(proto, outputs), exposed_arguments(proto), labels)
    _place_external(proto, files, settings.runtime.OrtValue, options)
    parsed = serialise(proto)
    del proto
    return open_session(parsed, settings, options), about


def open_session(data: OwnBytes, settings: SessionSettings, options: Any) -> Any:
    """Return an ``InferenceSession`` for a model without external files. Raises the errors of `compile_graph`."""
    providers = list(settings.providers)
    hint = "; a provider that talks to hardware through files of /dev needs sandbox='off'" * bool(providers)
    try:
        session = settings.runtime.InferenceSession(data, options, providers=providers or [CPU], enable_fallback=False)
    except MemoryError as error:
        raise ResourceExhausted("no memory for the model") from error
    except Exception as error:  # ONNX Runtime's exceptions have no common base.
        if unknown := re.search(r"Fatal error: (\S*):(\w+)\(-?\d+\) is not a registered function/op", str(error)):
            domain, name = unknown.groups()
            hint = f"; it has no operator {name} of the domain {domain!r}: if a library of yours has it, serve a "
            hint += "function that opens the model with that library (docs/onnx.md#operators-of-a-library)"
        raise GeneralFailure(f"ONNX Runtime refuses the model: {error}{hint}") from None
    if providers and (missing := set(providers).difference(session.get_providers())):
        raise GeneralFailure(f"ONNX Runtime cannot start {', '.join(sorted(missing))} here{hint}")
    return session


def _copy_passed_inputs(proto: Any, outputs: Sequence[GraphArgument]) -> tuple[GraphArgument, ...]:
    """Rename each output that is also an input, and add a node that copies the input to the output.

    ONNX Runtime never writes to the bound memory of an output that is also an input.

    Returns:
        All outputs, with their new names.
    """
    inputs = {value.name for value in proto.graph.input}
    copies: dict[str, str] = {}
    for value, output in zip(proto.graph.output, outputs, strict=True):
        if value.name in inputs and not output.holds:
            if value.name not in copies:
                copies[value.name] = f"{value.name}:passed on"
                proto.graph.node.add(op_type="Identity", input=[value.name], output=[copies[value.name]])
            value.name = copies[value.name]
    return tuple(replace(output, name=copies.get(output.name, output.name)) for output in outputs)


def _place_external(proto: Any, files: Mapping[str, Bytes], make: Any, options: Any) -> None:
    """Pass the tensors in external files to the session. Copy those that it cannot take from there into the model."""
    placed: dict[str, Any] = {}
    for tensor, is_initializer in all_tensors(proto):
        location = external_location(tensor)
        if not location:
            continue
        raw = _external_bytes(tensor, location, files)
        is_bool = tensor.data_type == messages().TensorProto.BOOL  # A bool must be 0 or 1.
        value = _as_ort_value(tensor, raw, make) if is_initializer and not is_bool else None
        if value is not None:
            if tensor.name in placed:
                raise InvalidArgument(f"there are two initializers with the name {tensor.name!r}")
            placed[tensor.name] = value
            continue
        tensor.raw_data = raw.tobytes()
        tensor.data_location = 0
        del tensor.external_data[:]
    if placed:
        options.add_external_initializers(list(placed), list(placed.values()))


def _external_bytes(tensor: Any, location: str, files: Mapping[str, Bytes]) -> Bytes:
    content = files.get(location)
    if content is None:
        raise InvalidArgument(f"tensor {tensor.name!r} is in the external file {location!r}, which is missing")
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", content.nbytes - offset))
    except ValueError:
        raise InvalidArgument(f"tensor {tensor.name!r}: offset or length is not a number") from None
    if offset < 0 or length < 0 or offset + length > content.nbytes:
        raise InvalidArgument(
            f"tensor {tensor.name!r} ends at byte {offset + length} of {location!r}, which has {content.nbytes}"
        )
    return content[offset : offset + length]


def _as_ort_value(tensor: Any, raw: Bytes, make: Any) -> Any:
    """Return an `OrtValue` over a tensor's bytes; None if the type or alignment prevents one."""
    try:
        row = element_type(int(tensor.data_type), "")
    except GeneralFailure:
        return None
    shape = tuple(tensor.dims)
    try:
        count = element_count(shape)
    except InvalidArgument as error:
        raise InvalidArgument(f"tensor {tensor.name[:100]!r}: {error}") from None
    if count * row.itemsize != raw.nbytes:
        raise InvalidArgument(f"tensor {tensor.name[:100]!r} of shape {list(shape)} has {raw.nbytes} bytes")
    if raw.ctypes.data % row.itemsize or raw.nbytes == 0:
        return None
    array = raw.view(row.dtype).reshape(shape)
    return make.ortvalue_from_numpy_with_onnx_type(array, row.number)
