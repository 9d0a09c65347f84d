"""A compiled graph: one ONNX Runtime session, shared by all models that were prepared from the same files."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from ...errors import GeneralFailure, InvalidArgument, ResourceExhausted
from ...model import element_count
from ..common import OwnBytes
from ..elements import element_type
from .capi import BoundRun, Copies, InferenceSession
from .importer import GraphArgument, all_tensors, external_location, parse, serialised
from .library import onnx, onnxruntime
from .python_run import PythonRun
from .snapshots import exposed_arguments
from .unwritten import write_all

_log = logging.getLogger(__name__)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

FILES_OF_MODELS = "session.model_external_initializers_file_folder_path"
"""Where ONNX Runtime looks for external data; without it, in the working directory."""
_FORMAT_OF_MODELS = "session.load_model_format"
"""What ONNX Runtime reads a model as; without it, what the first bytes look like to it."""


class SessionSettings(Struct, frozen=True):
    """How sessions are made.

    Attributes:
        threads: That work on one operation; 0 for one per processor.
        spinning: Whether idle ones spin for work.
    """

    threads: int = 0
    spinning: bool = False

    def options(self) -> Any:
        """Return ``SessionOptions``."""
        options = onnxruntime().SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if self.spinning else "0")
        options.log_severity_level = 3
        options.add_session_config_entry(FILES_OF_MODELS, "/dev/null")  # no directory: a session opens no file
        options.add_session_config_entry(_FORMAT_OF_MODELS, "ONNX")
        return options


class Graph:
    """A session, and what about it does not depend on requests. Safe for concurrent use.

    Attributes:
        seconds: What making it took.
        session: The `InferenceSession`, or the Python module's.
        inputs: In order.
        outputs: In order.
        exposed: Names of inputs and outputs that need a copy around each run, see `exposed_arguments`.
    """

    __slots__ = ("__weakref__", "_kept", "exposed", "inputs", "outputs", "seconds", "session")

    def __init__(self, session: Any, exposed: frozenset[str], kept: object = None, seconds: float = 0.0) -> None:
        self.session = session
        self.exposed = exposed
        self.seconds = seconds
        self._kept = kept  # weights that the session does not own
        self.inputs = tuple(described_by(argument, "input") for argument in session.get_inputs())
        self.outputs = tuple(described_by(argument, "output") for argument in session.get_outputs())

    def bound(self, binding: Any, before: Copies, after: Copies) -> BoundRun | PythonRun:
        """Return a run of a binding of the session, None for nothing, between copies."""
        if isinstance(self.session, InferenceSession):
            return BoundRun(binding, before, after)
        return PythonRun(self.session, binding, before, after)


def described_by(argument: Any, kind: str) -> GraphArgument:
    """Return an argument of a session.

    Raises:
        GeneralFailure: It is no tensor of numbers.
    """
    place = f"{kind} {argument.name!r}"
    text: str = argument.type
    if not text.startswith("tensor("):
        raise GeneralFailure(f"{place} has type {text!r}; only dense tensors of numbers can be passed to a model")
    shape = tuple(size if isinstance(size, int) and size >= 0 else str(size) for size in argument.shape)
    return GraphArgument(argument.name, element_type(text[len("tensor(") : -1], place), shape)


def content_digest(data: bytes, files: Mapping[str, Bytes]) -> bytes:
    """Return what identifies the contents of a model's files: 32 bytes."""
    whole = hashlib.sha256(hashlib.sha256(data).digest())
    for name, content in sorted(files.items()):
        whole.update(hashlib.sha256(name.encode()).digest())
        whole.update(hashlib.sha256(content.data).digest())
    return whole.digest()


class GraphStore:
    """The graphs in use, by the files that they were made from, so that weights exist once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: weakref.WeakValueDictionary[bytes, Graph] = weakref.WeakValueDictionary()
        self._making: weakref.WeakValueDictionary[bytes, _Turn] = weakref.WeakValueDictionary()

    def get(self, key: bytes, make: Callable[[], Graph]) -> Graph:
        """Return the graph of a key; callers that come while it is being made wait for it."""
        with self._lock:
            turn = self._making.setdefault(key, _Turn())
        with turn.lock:
            graph = self._graphs.get(key)
            if graph is None:
                graph = make()
                self.put(key, graph)
        return graph

    def put(self, key: bytes, graph: Graph) -> None:
        """Let a graph be found under one more key."""
        with self._lock:
            self._graphs[key] = graph


class _Turn:
    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()


def compile_graph(data: bytes, files: Mapping[str, Bytes], settings: SessionSettings) -> Graph:
    """Make a session of a model's files.

    Args:
        data: The model file.
        files: Contents of its external files, by name.
        settings: How.

    Raises:
        InvalidArgument: The model is malformed, or refers to a file that is not given.
        GeneralFailure: ONNX Runtime cannot run it, for example because it does not know an operator.
        ResourceExhausted: There is no memory for it.
    """
    onnx()
    options = settings.options()  # by now the libraries are loaded, which is no part of compiling
    started = time.perf_counter()
    session, exposed = build_session(data, files, options)
    return Graph(session, exposed, seconds=time.perf_counter() - started)  # the session has copied the files


def build_session(data: bytes, files: Mapping[str, Bytes], options: Any) -> tuple[Any, frozenset[str]]:
    """Return an ``InferenceSession`` of a model's files, and its `exposed_arguments`; raises as `compile_graph`."""
    proto = parse(data)
    write_all(proto)
    exposed = exposed_arguments(proto)
    _place_external(proto, files, options)
    parsed = serialised(proto)
    del proto
    return open_session(parsed, options), exposed


def open_session(data: OwnBytes, options: Any) -> Any:
    """Return an ``InferenceSession`` of a model without external files.

    Raises:
        GeneralFailure: ONNX Runtime cannot run it.
        ResourceExhausted: There is no memory for it.
    """
    try:
        return onnxruntime().InferenceSession(data, options, providers=["CPUExecutionProvider"], enable_fallback=False)
    except MemoryError as error:
        raise ResourceExhausted("no memory for the model") from error
    except Exception as error:  # ONNX Runtime's own classes have no common base
        raise GeneralFailure(f"ONNX Runtime refuses the model: {error}") from None


def _place_external(proto: Any, files: Mapping[str, Bytes], options: Any) -> None:
    """Give the session the tensors that are in external files, or put them into the model."""
    placed: dict[str, Any] = {}
    for tensor, is_initializer in all_tensors(proto):
        location = external_location(tensor)
        if not location:
            continue
        raw = _external_bytes(tensor, location, files)
        value = _as_ort_value(tensor, raw) if is_initializer else None
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


def _as_ort_value(tensor: Any, raw: Bytes) -> Any:
    """Wrap a tensor's bytes; None for types that this cannot be done for."""
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
    return onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(array, row.number)
