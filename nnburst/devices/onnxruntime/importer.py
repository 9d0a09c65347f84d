"""Import of an ONNX file as a model of one operation GRAPH, which refers to the file and its external data."""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, msgpack

from ...errors import GeneralFailure, InvalidArgument
from ...model.dimensions import HIGHEST_RANK
from ...model.extensions import ImportedModel, ModelMetadata, OpenShape, extension_code
from ...model.types import DataLocation, Lifetime, Model, OperandDesc
from ..common import OwnBytes, one_operation
from ..elements import ENCODED, ElementType, element_type, element_within, operand_code
from .functions import check_functions
from .library import messages, onnx

EXTENSION_NAME = "org.nnburst.onnx"
FILE = 0
"""Extension operand type of a file. The operand's extra parameters are the file's name."""
GRAPH = 0
"""Extension operation that runs an ONNX graph. Its inputs are the model's files, then the graph's inputs.
"""
_PREFIX = 1
_MOST_FILES = 252
"""Largest number of a model's external files. A message cannot contain more pools."""
_LONGEST_NAME = 4096
_MOST_METADATA = 1 << 23
"""Largest size in bytes of a model's metadata. One message contains all metadata."""
_NO_VERSION = 2**63 - 1
"""Version that ONNX Runtime reports for a model without one."""
_OTHERS = {
    b"version https://git-lfs": "a pointer to one: fetch the file itself with git lfs pull",
    b"<": "a page of the web: fetch the file itself",
    b"ORTM": "one in ONNX Runtime's own format: take the .onnx file that it was made from",
    b"PK\x03\x04": "an archive, as torch.save() writes one: export the model with torch.onnx.export()",
}
"""By first bytes: files that are not models, and advice for their users."""
_DEFAULTS_OF_INPUTS = 4
"""First version of the format that allows initializers that are not inputs."""


class GraphArgument(Struct, frozen=True):
    """An input or output of a graph. If `holds` is empty, values are numeric arrays, else they are encoded as bytes."""

    name: str
    element: ElementType
    shape: OpenShape
    holds: str = ""

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions of the operand, with 0 for an unknown size or a size of 0."""
        if self.holds:
            return (0,)
        return tuple(size if isinstance(size, int) else 0 for size in self.shape or ())

    @property
    def rank(self) -> int | None:
        if self.holds:
            return 1
        return None if self.shape is None else len(self.shape)


def is_bool(node: GraphArgument) -> bool:
    """Return True for booleans, whose bytes must be 0 or 1: ONNX Runtime adds them to count true values."""
    return node.element.dtype == "|b1"


def parse(data: bytes) -> Any:
    """Parse a model file to a ``ModelProto``, dropping fields that this version does not know."""
    try:
        proto = messages().ModelProto.FromString(data)
    except Exception as error:  # Implementations of protobuf raise different exceptions.
        raise _no_model(data, str(error)) from None
    if not proto.graph.node and not proto.graph.output:
        raise _no_model(data, "it has no graph")
    proto.DiscardUnknownFields()
    check_functions(proto)
    return proto


def _no_model(data: bytes, why: str) -> InvalidArgument:
    for start, found in _OTHERS.items():
        if data.startswith(start) or data[4:8] == start:
            return InvalidArgument(f"this is no ONNX model, but {found}")
    return InvalidArgument(f"this is no ONNX model: {why}; fetch it again if it was cut off, else export it anew")


def serialise(proto: Any) -> OwnBytes:
    """Serialise a ``ModelProto`` from `parse`. Raises `InvalidArgument` if it is too large for one file."""
    try:
        return OwnBytes(proto.SerializeToString())
    except Exception as error:  # See `parse`.
        raise InvalidArgument(f"the model cannot be written again ({error}); use external data for weights") from None


def _initializers(graph: Any) -> set[str]:
    return {tensor.name for tensor in graph.initializer} | {each.values.name for each in graph.sparse_initializer}


def constants(proto: Any) -> set[str]:
    """Return the names of the initializers that are not defaults of inputs.

    An initializer with the name of an input is the input's default. In files older than version 4 of the format, every
    initializer is also listed as an input, and none is a default.
    """
    inputs = {value.name for value in proto.graph.input} if proto.ir_version >= _DEFAULTS_OF_INPUTS else set()
    return _initializers(proto.graph) - inputs


def describe(proto: Any) -> tuple[tuple[GraphArgument, ...], tuple[GraphArgument, ...], tuple[GraphArgument, ...]]:
    """Return (inputs without a default, inputs with a default, outputs)."""
    graph, fixed = proto.graph, constants(proto)
    defaults, outputs = _initializers(graph) - fixed, graph.output
    if not all(value.type.WhichOneof("value") for value in outputs):
        outputs = _infer_shapes(proto).graph.output
    optional = []
    for value in graph.input:
        if value.name in defaults:
            with contextlib.suppress(GeneralFailure):
                optional.append(_argument(value, "input"))
    return (
        tuple(_argument(value, "input") for value in graph.input if value.name not in fixed | defaults),
        tuple(optional),
        tuple(_argument(value, "output") for value in outputs),
    )


def _infer_shapes(proto: Any) -> Any:
    try:
        return onnx().shape_inference.infer_shapes(proto)
    except Exception as error:
        raise InvalidArgument(f"the types of the model's outputs cannot be inferred: {error}") from None


def _text(value: Any) -> str:
    """Return a string of a model as text. Protobuf returns a string that is not UTF-8 as bytes."""
    if not isinstance(value, str):
        raise InvalidArgument(f"this is no ONNX model: {value[:100]!r} is no UTF-8")
    return value


def _argument(value: Any, kind: str) -> GraphArgument:
    name = _text(value.name)
    place = f"{kind} {name!r}"
    if len(name) > _LONGEST_NAME:
        raise InvalidArgument(f"the name of an {kind} has {len(name)} characters; {_LONGEST_NAME} are possible")
    if "\0" in name:
        raise InvalidArgument(f"{place} has a NUL in its name; ONNX Runtime takes names without")
    tensor = value.type.tensor_type
    shape = _shape(tensor)
    if shape is not None and len(shape) > HIGHEST_RANK:
        raise GeneralFailure(f"{place} has {len(shape)} dimensions; at most {HIGHEST_RANK} can be passed to a model")
    holds = _type_text(value.type, place)
    if not _HELD.fullmatch(holds):
        raise GeneralFailure(f"{place} has type {holds!r}, which cannot be passed to a model")
    with contextlib.suppress(GeneralFailure):
        if holds.startswith("tensor("):
            return GraphArgument(name, element_type(int(tensor.elem_type), place), shape)
    return GraphArgument(name, ENCODED, shape, holds)


_HELD = re.compile(
    r"(optional\()?(seq\()?(tensor\(\w+\)|map\((string|int64),tensor\((string|int64|float|double)\)\))\)*"
)


def _type_text(kind: Any, place: str) -> str:
    """Return ONNX Runtime's name of a type. Raises `GeneralFailure` if a request cannot contain values of the type."""
    what = kind.WhichOneof("value")
    if what == "tensor_type":
        return f"tensor({element_within(int(kind.tensor_type.elem_type), place).name})"
    if what == "sequence_type":
        return f"seq({_type_text(kind.sequence_type.elem_type, place)})"
    if what == "optional_type":
        return f"optional({_type_text(kind.optional_type.elem_type, place)})"
    if what == "map_type":
        key = element_within(int(kind.map_type.key_type), place).name
        return f"map({key},{_type_text(kind.map_type.value_type, place)})"
    return (what or "value without a type").removesuffix("_type").replace("_", " ")


def _shape(tensor: Any) -> OpenShape:
    if not tensor.HasField("shape"):
        return None
    out: list[int | str | None] = []
    for dim in tensor.shape.dim:
        kind = dim.WhichOneof("value")
        size = int(dim.dim_value) if kind == "dim_value" else -1
        out.append(size if 0 <= size < 2**32 else _text(dim.dim_param)[:_LONGEST_NAME] or None)
    return tuple(out)


def all_tensors(proto: Any) -> Iterator[tuple[Any, bool]]:
    """Yield (tensor, True if it is an initializer of the outermost graph) for each tensor in any part of a model."""
    leaf = messages().TensorProto.DESCRIPTOR
    graph, todo = proto.graph, [proto]
    while todo:
        message = todo.pop()
        for field, value in message.ListFields():
            if field.message_type is None:
                continue
            inner = (value,) if hasattr(value, "ListFields") else value
            if field.message_type.full_name != leaf.full_name:
                todo.extend(inner)
                continue
            is_initializer = message is graph and field.name == "initializer"
            for tensor in inner:
                yield tensor, is_initializer


def external_location(tensor: Any) -> str:
    """Return the name of a tensor's external file; empty if the model contains the data."""
    if tensor.data_location != messages().TensorProto.EXTERNAL:
        return ""
    name = _text(next((entry.value for entry in tensor.external_data if entry.key == "location"), ""))
    if len(name) > _LONGEST_NAME:
        raise InvalidArgument(
            f"tensor {tensor.name[:100]!r}: the name of its external file has {len(name)} characters; "
            f"{_LONGEST_NAME} are possible"
        )
    clean = posixpath.normpath(name)
    if not name or "\0" in name or clean.startswith(("/", "../")) or clean in ("..", "."):
        raise InvalidArgument(
            f"tensor {tensor.name!r} is in the external file {name!r}; it must be inside the model's directory"
        )
    return clean


def import_graph(data: bytes) -> ImportedModel:
    """Import a model file.

    Raises:
        InvalidArgument: The model is malformed.
        GeneralFailure: An input or output has a type that requests do not support, or there are too many external
            files.
    """
    proto = parse(data)
    required, optional, outputs = describe(proto)
    if not outputs:
        raise InvalidArgument("the graph has no output")
    files = sorted({location for tensor, _ in all_tensors(proto) if (location := external_location(tensor))})
    if len(files) > _MOST_FILES:
        raise GeneralFailure(f"the model has {len(files)} external files; at most {_MOST_FILES} can be passed on")
    inputs = [*required, *optional]
    return ImportedModel(
        graph_model(len(data), files, inputs, outputs),
        ("", *files),
        tuple(argument.shape for argument in inputs),
        tuple(argument.shape for argument in outputs),
        len(optional),
        _metadata(proto),
    )


def _metadata(proto: Any) -> ModelMetadata | None:

    def text(value: Any) -> str:
        return value if isinstance(value, str) else str(value, errors="replace")  # Invalid UTF-8 comes as bytes.

    graph = proto.graph
    texts = map(text, (proto.producer_name, graph.name, proto.domain, proto.doc_string, graph.doc_string))
    version = proto.model_version if proto.HasField("model_version") else _NO_VERSION
    entries = {text(entry.key): text(entry.value) for entry in proto.metadata_props}
    metadata = ModelMetadata(version, entries, *texts)
    return metadata if len(msgpack.encode(metadata)) <= _MOST_METADATA else None


def graph_model(
    size: int, files: Sequence[str], inputs: Sequence[GraphArgument], outputs: Sequence[GraphArgument]
) -> Model:
    """Return a model of one ONNX graph, whose file has `size` bytes. The caller adds the pools."""
    return one_operation(
        extension_code(_PREFIX, GRAPH),
        [_file(0, "", size), *(_file(1 + i, name, 0) for i, name in enumerate(files))],
        [_operand(argument, is_input=True) for argument in inputs],
        [_operand(argument, is_input=False) for argument in outputs],
        extension_name_to_prefix={EXTENSION_NAME: _PREFIX},
        input_names=tuple(argument.name for argument in inputs),
        output_names=tuple(argument.name for argument in outputs),
    )


def _file(pool: int, name: str, size: int) -> OperandDesc:
    return OperandDesc(
        extension_code(_PREFIX, FILE),
        lifetime=Lifetime.CONSTANT_REFERENCE,
        location=DataLocation(pool, 0, size),
        extra_params=name.encode(),
    )


def _operand(argument: GraphArgument, *, is_input: bool) -> OperandDesc:
    if argument.rank is None and is_input:
        # NNAPI has no tensors of rank 0, but the extension has.
        return OperandDesc(extension_code(_PREFIX, argument.element.number))
    code, scale = operand_code(argument.element, argument.rank, _PREFIX)
    holds = argument.holds.encode() or None
    return OperandDesc(code, argument.dimensions, scale=scale, extra_params=holds)
