"""Replacement of ZipMaps at the end of a graph. The graph then returns scores, from which the client makes dicts.

ONNX Runtime's own maps, one for each row, would take far longer than the rest of the graph.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...errors import GeneralFailure
from ..encoded import EncodedMap, EncodedTensor, Value, from_python, string_type, write
from .library import messages


def replace_zip_maps(proto: Any) -> dict[str, bytes]:
    """Replace the ZipMaps of a model. Return the encoded labels, keyed by output.

    Each replaced output was a map from labels to scores, and becomes an array of scores. A map with labels of an
    unexpected type stays unchanged.
    """
    labels: dict[str, bytes] = {}
    makers = {name: node for node in proto.graph.node if _is_zip_map(node) for name in node.output}
    for value in proto.graph.output:
        node = makers.pop(value.name, None)  # An output can be listed twice.
        if node is not None and (found := _labels(node, value.type.sequence_type.elem_type.map_type.key_type)):
            labels[value.name] = found
            node.domain, node.op_type = "", "Identity"
            del node.attribute[:]
        if value.name in labels:
            value.type.tensor_type.elem_type = messages().TensorProto.FLOAT
    return labels


def _is_zip_map(node: Any) -> bool:
    return (node.domain, node.op_type, len(node.attribute)) == ("ai.onnx.ml", "ZipMap", 1)


def _labels(node: Any, key: int) -> bytes:
    """Return a ZipMap's encoded labels; empty if they are not of type `key` (0: any type)."""
    types, (attribute,) = messages().TensorProto, node.attribute
    if attribute.name == "classlabels_int64s" and attribute.ints and key in (0, types.INT64):
        return write(from_python(np.array(attribute.ints, np.int64), "tensor(int64)", "")).tobytes()
    if attribute.name == "classlabels_strings" and attribute.strings and key in (0, types.STRING):
        with contextlib.suppress(UnicodeDecodeError):
            texts = np.array([text.decode() for text in attribute.strings], string_type())
            return write(from_python(texts, "tensor(string)", "")).tobytes()
    return b""


def as_maps(scores: Value, keys: Value, place: str) -> EncodedMap:
    """Return a map for each row of scores. Raises `GeneralFailure` unless a row has one score per key."""
    assert isinstance(scores, EncodedTensor)
    assert isinstance(keys, EncodedTensor)
    rows = (1, *scores.shape) if len(scores.shape) == 1 else scores.shape
    if len(rows) != 2 or rows[1:] != keys.shape:
        raise GeneralFailure(f"{place} has scores of shape {scores.shape} for {keys.shape[0]} labels")
    return EncodedMap(keys, replace(scores, shape=rows))
