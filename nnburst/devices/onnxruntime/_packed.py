"""What the device keeps in a compilation cache: the optimised graph, and beside it the weights.

The model blob is MessagePack: the operands of the model, the graph as ONNX Runtime optimised it, and a table of its
large tensors. The data blob is the bytes of those tensors, each at a multiple of 64 bytes; a tensor whose elements are
all equal is a number in the table instead. A graph that is loaded uses the tensors where they lie.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...cache import CacheReason, CacheRejected
from ...errors import GeneralFailure
from ...model import Model, Subgraph
from .._elements import element_type
from ._graph import FILES_OF_MODELS, Bytes, Graph, SessionSettings, build_session, open_session
from ._importer import all_tensors, parse
from ._library import onnx, onnxruntime

__all__ = ["FORMAT", "Contents", "Packed", "load_graph", "pack", "pays", "read_contents"]

FORMAT = 2
"""Part of the epoch: files of another format are not even opened."""
_ALIGNMENT = 64
_SMALLEST = 1024
"""Bytes from which on a tensor is kept outside of the graph."""
_GAIN = 0.8
"""A graph is kept if loading it takes at most this part of the time that compiling took."""
_HIT_SECONDS = 0.005
"""What a hit costs beside hashing and loading: opening files, copying them, asking the trust store, counting."""
_WEIGHTS = "weights.bin"
_MATRIX_OPERATORS = {"Gemm", "MatMul"}
_MUCH = 64 << 20


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A large tensor of the graph: `length` bytes at `offset` of the data blob, or all elements `fill`."""

    name: str
    element: int
    shape: tuple[int, ...]
    offset: int
    length: int
    fill: bytes


class _Packed(msgspec.Struct, frozen=True):
    version: int
    main: Subgraph
    prefixes: dict[str, int]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    exposed: tuple[str, ...]
    graph: bytes
    tensors: tuple[_Tensor, ...]
    data_size: int
    file_size: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


@dataclass(frozen=True, slots=True)
class Packed:
    """A compiled model as two blobs.

    Attributes:
        model: The graph.
        data: The weights; at least one byte.
        load_seconds: What loading them took.
    """

    model: bytes
    data: Bytes
    load_seconds: float


def pays(proto: Any) -> bool:
    """Guess whether keeping a model's graph can pay; only measuring tells.

    It does not if most of the weights are large matrices: what takes time then is bringing these into the order that
    the processor wants, and that has to be done again for a graph that was kept.
    """
    sizes = {tensor.name: _nbytes(tensor.dims, tensor.data_type) for tensor in proto.graph.initializer}
    shapes = {t.name: onnx().numpy_helper.to_array(t) for t in proto.graph.initializer if _is_shape(t)}
    matrices = 0
    for node in proto.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes:
            sizes[node.output[0]] = 4 * int(np.prod(shapes[node.input[0]], dtype=np.float64))
    for node in proto.graph.node:
        if node.op_type in _MATRIX_OPERATORS:
            matrices += sum(sizes.get(name, 0) for name in node.input)
    return matrices < _MUCH or 2 * matrices < sum(sizes.values())


def _memory_directory() -> str | None:
    """Where temporary files are in memory; None for wherever they usually are."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


def _is_shape(tensor: Any) -> bool:
    return tensor.data_type == onnx().TensorProto.INT64 and len(tensor.dims) == 1 and not tensor.external_data


def _nbytes(dims: Any, number: int) -> int:
    try:
        return int(np.prod(dims, dtype=np.float64)) * element_type(int(number), "").itemsize
    except GeneralFailure:
        return 0


def pack(
    model: Model, data: bytes, files: Mapping[str, Bytes], settings: SessionSettings, compile_seconds: float | None
) -> Packed:
    """Optimise a model once more, take the result apart, and try it out.

    Args:
        model: As it was prepared.
        data: The model file.
        files: Its external files.
        settings: As it was compiled.
        compile_seconds: What that took; None to keep it even if it does not pay.

    Raises:
        CacheRejected: It would not pay.
        NNBurstError: It cannot be done.
    """
    if compile_seconds is not None and compile_seconds < 2 * _HIT_SECONDS:
        raise CacheRejected(CacheReason.NOT_WORTH_IT, f"compiling took {compile_seconds * 1e3:.1f} ms only")
    proto = parse(data)
    if compile_seconds is not None and not pays(proto):
        raise CacheRejected(CacheReason.NOT_WORTH_IT, "most weights are large matrices, which are slow to load, too")
    del proto
    with tempfile.TemporaryDirectory(prefix="nnburst-pack-", dir=_memory_directory()) as directory:
        exposed, graph, tensors, blob, file_size, again = _optimised(data, files, settings, Path(directory))
    packed = _Packed(
        version=FORMAT,
        main=model.main,
        prefixes=dict(model.extension_name_to_prefix),
        input_names=tuple(model.input_names),
        output_names=tuple(model.output_names),
        exposed=tuple(sorted(exposed)),
        graph=graph,
        tensors=tensors,
        data_size=blob.nbytes,
        file_size=file_size,
    )
    encoded = _encoder.encode(packed)
    started = time.perf_counter()
    hashlib.sha256(encoded).digest()
    hashlib.sha256(blob.data).digest()
    load_graph(read_contents(memoryview(encoded), blob.data), blob.data, settings)
    seconds = time.perf_counter() - started
    if compile_seconds is not None:
        usual = min(compile_seconds, again)  # the first time in a process takes longer than it ever will again
        if seconds + _HIT_SECONDS > _GAIN * usual:
            raise CacheRejected(
                CacheReason.NOT_WORTH_IT,
                f"loading takes {seconds * 1e3:.1f} ms, compiling took {usual * 1e3:.1f} ms",
            )
    return Packed(encoded, blob, seconds)


def _optimised(
    data: bytes, files: Mapping[str, Bytes], settings: SessionSettings, directory: Path
) -> tuple[frozenset[str], bytes, tuple[_Tensor, ...], Bytes, int, float]:
    """Have ONNX Runtime write the graph that it made of a model, and take its large tensors out.

    Returns:
        The exposed arguments, the graph, the table, the tensors, the size of the file that the graph believes them to
        be in, and the seconds that compiling took this time.
    """
    options = settings.options()
    options.optimized_model_filepath = str(directory / "graph.onnx")
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", str(_SMALLEST))
    started = time.perf_counter()
    session, exposed = build_session(data, files, options)
    seconds = time.perf_counter() - started
    names = {argument.name for argument in session.get_inputs()}
    del session
    proto = parse((directory / "graph.onnx").read_bytes())
    weights = directory / _WEIGHTS
    raw: Bytes = np.fromfile(weights, np.uint8) if weights.exists() else np.zeros(0, np.uint8)
    # Inputs whose initializers were folded away are still there; nobody can give them any more.
    inputs = [value for value in proto.graph.input if value.name in names]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.ir_version = max(proto.ir_version, 4)  # from then on an initializer needs not be an input
    return exposed, *_take_apart(proto, raw), raw.nbytes, seconds


def _take_apart(proto: Any, raw: Bytes) -> tuple[bytes, tuple[_Tensor, ...], Bytes]:
    tensors: list[_Tensor] = []
    pieces: list[Bytes] = []
    end = 0
    for tensor, is_initializer in all_tensors(proto):
        if tensor.data_location != onnx().TensorProto.EXTERNAL:
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
        fill = _fill_of(piece.view(row.dtype))
        stored = 0 if fill else piece.nbytes
        tensors.append(_Tensor(tensor.name, row.number, tuple(tensor.dims), end, stored, fill))
        if stored:
            padding = -stored % _ALIGNMENT
            pieces += [piece, np.zeros(padding, np.uint8)]
            end += stored + padding
    return proto.SerializeToString(), tuple(tensors), np.concatenate(pieces) if pieces else np.zeros(1, np.uint8)


def _fill_of(elements: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of the element that a tensor consists of, or nothing."""
    bits = elements.view(f"u{elements.itemsize}")
    return elements[:1].tobytes() if bits.size and (bits == bits[0]).all() else b""


@dataclass(frozen=True, slots=True)
class Contents:
    """A packed model that has been read, but not loaded.

    Attributes:
        model: As it was prepared, without its files.
        packed: The rest.
    """

    model: Model
    packed: _Packed


def read_contents(model: memoryview, data: memoryview) -> Contents:
    """Read what `pack` made. Both are trusted: whoever calls has verified that this device wrote them.

    Raises:
        CacheRejected: They are something else.
    """
    try:
        packed = _decoder.decode(model)
    except msgspec.MsgspecError as error:
        raise CacheRejected(CacheReason.BAD_CONTENT, f"not a packed graph: {error}") from None
    if packed.version != FORMAT or packed.data_size != data.nbytes:
        raise CacheRejected(CacheReason.BAD_CONTENT, f"{data.nbytes} bytes of weights, not {packed.data_size}")
    restored = Model(
        packed.main,
        extension_name_to_prefix=packed.prefixes,
        input_names=packed.input_names,
        output_names=packed.output_names,
    )
    return Contents(restored, packed)


def load_graph(contents: Contents, data: memoryview, settings: SessionSettings) -> Graph:
    """Make a session of a packed graph.

    Args:
        contents: The graph.
        data: The weights; kept and used where they are.
        settings: How.

    Raises:
        GeneralFailure: ONNX Runtime refuses the graph.
    """
    packed, raw = contents.packed, np.frombuffer(data, np.uint8)
    options = settings.options()
    options.graph_optimization_level = onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
    wrap = onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type
    values = [wrap(_array(tensor, raw), tensor.element) for tensor in packed.tensors]
    for tensor, value in zip(packed.tensors, values, strict=True):
        options.add_initializer(tensor.name, value)  # used where it lies, and instead of what the graph says
    with tempfile.TemporaryDirectory(prefix="nnburst-load-", dir=_memory_directory()) as directory:
        # The graph says that they are in a file, which must exist and be large enough. Nobody reads it: it is holes.
        with open(os.path.join(directory, _WEIGHTS), "wb") as file:
            file.truncate(max(packed.file_size, 1))
        options.add_session_config_entry(FILES_OF_MODELS, directory)
        return Graph(open_session(packed.graph, options), frozenset(packed.exposed), values)


def _array(tensor: _Tensor, raw: Bytes) -> np.ndarray[Any, Any]:
    dtype = element_type(tensor.element, tensor.name).dtype
    if tensor.fill:
        return np.full(tensor.shape, np.frombuffer(tensor.fill, dtype)[0], dtype)
    return raw[tensor.offset : tensor.offset + tensor.length].view(dtype).reshape(tensor.shape)
