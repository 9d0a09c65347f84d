"""The cache files: the optimised graph in the model file, its weights in the data file.

The model file is MessagePack: the model's operands, the graph as ONNX Runtime optimised it, and a table of the graph's
large tensors. The data file contains these tensors, at multiples of 64 bytes, and a loaded graph uses them in place. A
tensor of equal elements is stored as one number. When a graph is loaded, ONNX Runtime makes rearranged copies of some
large matrices, which the table marks. Afterwards, the memory of the originals is released.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ..._core._nnburst import ffi, lib
from ..._core.errno import check
from ...cache.files import default_state_directory
from ...cache.reasons import CacheReason, CacheRejected
from ...errors import GeneralFailure
from ...model.types import Model
from ..common import OwnBytes
from ..elements import element_type
from ..encoded import Bytes
from .functions import inner_graphs
from .graph import FILES_OF_MODELS, About, Graph, SessionSettings, build_session, open_session
from .importer import all_tensors, parse, serialise
from .library import messages

FORMAT = 11
"""Version of the format. Files of another version are not used."""
_ALIGNMENT = 64
_SMALLEST = 1024
"""Minimum size in bytes of a large tensor, which is stored outside the graph."""
_SPARE = 16 << 20
"""Bytes of the machine's memory that must stay free."""
_WEIGHTS = "weights.bin"
_TELL_REARRANGED = "session.save_external_prepacked_constant_initializers"


class _Tensor(Struct, frozen=True, array_like=True):
    """A large tensor of the graph: `length` bytes at `offset` of the data file, or one number for all elements.

    If `rearranged`, ONNX Runtime copies the tensor when the graph is loaded, and does not need it afterwards.
    """

    name: str
    element: int
    shape: tuple[int, ...]
    offset: int
    length: int
    rearranged: bool


class Contents(Struct, frozen=True):
    """The contents of the model file.

    Attributes:
        model: The prepared model, without the contents of its pools.
        graph: The optimised graph from ONNX Runtime.
        file_size: Size of the external file to which the graph refers, in bytes.
    """

    model: Model
    about: About
    graph: bytes
    tensors: tuple[_Tensor, ...]
    file_size: int

    @property
    def gives_back(self) -> bool:
        """True if the memory of some weights is released after the graph is loaded."""
        return any(tensor.rearranged for tensor in self.tensors)


def _require_room(nbytes: int) -> None:
    """Raise `CacheRejected` if this machine has less than `nbytes` of free memory."""
    left = _memory_left()
    if left < nbytes:
        raise CacheRejected(CacheReason.IO_ERROR, f"there is no room for {nbytes} bytes in memory: {left} are left")


def _memory_left() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))


@contextlib.contextmanager
def _file_in_memory() -> Iterator[Path]:
    """Make a file in memory that no other process can reach."""
    fd = os.memfd_create("nnburst-pack", os.MFD_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def pack(model: Model, data: bytes, files: Mapping[str, Bytes], settings: SessionSettings) -> tuple[bytes, Bytes]:
    """Optimise a model, separate its graph from its weights, and check that the result can be loaded.

    Returns:
        Contents of the model file and of the data file, which has at least one byte.

    Raises:
        CacheRejected: There is not enough memory.
        NNBurstError: The model cannot be written or loaded.
    """
    nbytes = len(data) + sum(content.nbytes for content in files.values())
    _require_room(3 * nbytes + _SPARE)
    contents, blob = _optimise(replace(model, operand_values=b"", pools=()), data, files, settings)
    load_graph(contents, blob.data, settings)  # ONNX Runtime cannot read some graphs that it writes.
    return msgspec.msgpack.encode(contents), blob


def _optimise(
    model: Model, data: bytes, files: Mapping[str, Bytes], settings: SessionSettings
) -> tuple[Contents, Bytes]:
    """Let ONNX Runtime optimise a model. Return the graph, and separately its large tensors."""
    with _file_in_memory() as graph, _file_in_memory() as weights:  # ONNX Runtime expects both in one directory.
        options = settings.options()
        options.optimized_model_filepath = str(graph)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights.name)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_min_size_in_bytes", str(_SMALLEST)
        )
        options.add_session_config_entry(_TELL_REARRANGED, "1")
        about = build_session(data, files, settings, options)[1]
        proto = parse(graph.read_bytes())
        raw: Bytes = np.memmap(weights, np.uint8, "r") if weights.stat().st_size else np.zeros(0, np.uint8)
    # Drop inputs whose initializers ONNX Runtime has folded away.
    names = {argument.name for argument in (*about.inputs, *about.optional)}
    inputs = [value for value in proto.graph.input if value.name in names]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.ir_version = max(proto.ir_version, 4)  # Version 4 allows initializers that are not inputs.
    tensors, blob = _split(proto, raw)
    return Contents(model, about, serialise(proto), tensors, raw.nbytes), blob


def _split(proto: Any, raw: Bytes) -> tuple[tuple[_Tensor, ...], Bytes]:
    tensors: list[_Tensor] = []
    pieces: list[Bytes] = []
    end = 0
    uses = Counter(name for node in proto.graph.node for name in node.input)
    nested = any(any(inner_graphs(node)) for node in proto.graph.node)
    for tensor, is_initializer in all_tensors(proto):
        if tensor.data_location != messages().TensorProto.EXTERNAL:
            continue
        place = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key in ("offset", "length")}
        piece = raw[place.get("offset", 0) : place.get("offset", 0) + place["length"]]
        try:
            row = element_type(int(tensor.data_type), tensor.name)
        except GeneralFailure:
            row = None
        if not is_initializer or row is None:
            tensor.raw_data = piece.tobytes()
            tensor.data_location = 0
            del tensor.external_data[:]
            continue
        next(entry for entry in tensor.external_data if entry.key == "location").value = _WEIGHTS
        rearranged = [entry for entry in tensor.external_data if entry.key.startswith("prepacked")]
        for entry in rearranged:  # ONNX Runtime makes the copies again.
            tensor.external_data.remove(entry)
        gone = bool(rearranged) and uses[tensor.name] == 1 and not nested
        if _is_one_number(piece, row.itemsize):
            piece = piece[: row.itemsize]
        tensors.append(_Tensor(tensor.name, row.number, tuple(tensor.dims), end, piece.nbytes, gone))
        pieces += [piece, np.zeros(-piece.nbytes % _ALIGNMENT, np.uint8)]
        end += piece.nbytes + -piece.nbytes % _ALIGNMENT
    return tuple(tensors), np.concatenate(pieces) if pieces else np.zeros(1, np.uint8)


def _is_one_number(piece: Bytes, itemsize: int) -> bool:
    bits = piece.view(f"u{itemsize}")
    return all(bool((part == bits[0]).all()) for part in (bits[:_SMALLEST], bits))  # The first part usually decides.


def read_contents(model: memoryview) -> Contents:
    """Decode a model file, which the caller has verified."""
    try:
        return msgspec.msgpack.decode(model, type=Contents)
    except msgspec.MsgspecError as error:
        raise CacheRejected(CacheReason.BAD_CONTENT, f"not a packed graph: {error}") from None


def load_graph(contents: Contents, data: memoryview, settings: SessionSettings, *, own: bool = False) -> Graph:
    """Load a packed graph.

    Args:
        data: Contents of the data file, which the graph keeps and uses in place.
        own: True if the graph is the only user of `data`, so that parts can be released.

    Raises:
        GeneralFailure: ONNX Runtime refuses the graph.
        CacheRejected: The temporary sparse file, of which ONNX Runtime checks the size, cannot be made.
    """
    raw = np.frombuffer(data, np.uint8)
    options = settings.options()
    options.graph_optimization_level = settings.runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    wrap = settings.runtime.OrtValue.ortvalue_from_numpy_with_onnx_type
    arrays = [_array(tensor, raw) for tensor in contents.tensors]
    values = [wrap(array, tensor.element) for tensor, array in zip(contents.tensors, arrays, strict=True)]
    for tensor, value in zip(contents.tensors, values, strict=True):
        options.add_initializer(tensor.name, value)  # The value replaces bytes of the external file.
    with _directory_of_holes(max(contents.file_size, 1)) as directory:
        options.add_session_config_entry(FILES_OF_MODELS, directory)
        session = open_session(OwnBytes(contents.graph), settings, options)
    kept = [value for tensor, value in zip(contents.tensors, values, strict=True) if not tensor.rearranged]
    graph = Graph(session, contents.about, (data, kept))
    for tensor in contents.tensors:
        if tensor.rearranged and own:
            _give_back(raw[tensor.offset : tensor.offset + tensor.length])
    return graph


def _array(tensor: _Tensor, raw: Bytes) -> np.ndarray[Any, Any]:
    stored = raw[tensor.offset : tensor.offset + tensor.length].view(element_type(tensor.element, tensor.name).dtype)
    if stored.size == math.prod(tensor.shape):
        return stored.reshape(tensor.shape)
    return np.full(tensor.shape, stored[0])


@contextlib.contextmanager
def _directory_of_holes(size: int) -> Iterator[str]:
    """Make a temporary directory with a sparse external file. ONNX Runtime checks only the file's size."""
    import tempfile  # This import is slow, and only caching needs it.

    with contextlib.ExitStack() as stack:
        try:  # A service may write into its state directory, where the trust store is, too.
            place = default_state_directory()
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="holes-", dir=place))
            with open(os.path.join(directory, _WEIGHTS), "wb") as file:
                file.truncate(size)
        except OSError as error:
            raise CacheRejected(CacheReason.IO_ERROR, f"no file of holes can be made: {error}") from error
        yield directory


def _give_back(array: np.ndarray[Any, Any]) -> None:
    """Return the memory pages of an unused array to the system."""
    start = array.ctypes.data + -array.ctypes.data % mmap.PAGESIZE
    length = (array.ctypes.data + array.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        check(lib.nnb_give_back(ffi.cast("void *", start), length), "cannot return memory of weights")
