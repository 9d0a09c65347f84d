"""The operation table, part: operations that look up values, hash, or draw random numbers."""

from __future__ import annotations

from ...errors import InvalidArgument
from ..operand_types import OperandType
from ..operation_types import OperationType
from ..operation_view import OperationView, OutputSpec, Signature
from ..signature import signature
from .common import FLOAT, I32, LATE_FLOAT, Outputs, like_data, require_equal


def _infer_embedding(view: OperationView) -> Outputs:
    return like_data(view, view.dims("lookups") + view.dims("values")[1:])


def _infer_hashtable(view: OperationView) -> Outputs:
    lookups, keys, values = view.dims("lookups"), view.dims("keys"), view.dims("values")
    require_equal("the number of keys", keys[0], values[0], view.partial)
    hits = OutputSpec(OperandType.TENSOR_QUANT8_ASYMM, lookups, 1.0, 0)
    return (*like_data(view, lookups + values[1:]), hits)


def _check_hits(view: OperationView) -> None:
    hits = view.output(1)
    if (hits.scale, hits.zero_point) != (1.0, 0):
        raise InvalidArgument(f"the hits have scale {hits.scale:g}, zero point {hits.zero_point}; they must be 1 and 0")


def _infer_projection(view: OperationView) -> Outputs:
    """Infer the output of LSH_PROJECTION: a number for each hash, or for each bit."""
    kind, (count, bits) = view.integer("kind"), view.dims("hash")
    if kind not in (1, 2, 3):
        raise InvalidArgument(f"kind is {kind}; it must be 1 (sparse, deprecated), 2 (dense) or 3 (sparse)")
    if bits > 32:
        raise InvalidArgument(f"hashes of {bits} bits do not fit into 32")
    if (kind == 2) != view.is_given("weight"):
        raise InvalidArgument("a dense projection needs weights, a sparse one takes none")
    if view.is_given("weight"):
        require_equal("the number of weights", view.dims("weight")[0], view.dims("input")[0], view.partial)
    return (OutputSpec(I32, (count * bits if kind == 2 else count,)),)


def _infer_multinomial(view: OperationView) -> Outputs:
    return (OutputSpec(I32, (view.dims("logits")[0], view.integer("samples", least=1))),)


_O = OperationType

ROWS: dict[OperationType, Signature] = {
    _O.EMBEDDING_LOOKUP: signature(
        "lookups/1:I32 values:T", "F32 I32@1.2 Q8@1.2 F16@1.3 Q8S@1.3", _infer_embedding, "out:T=values"
    ),
    _O.HASHTABLE_LOOKUP: signature(
        "lookups/1:I32 keys/1:I32 values:T", "F32 I32 Q8", _infer_hashtable, "out:T=values hits:Q8", check=_check_hits
    ),
    _O.LSH_PROJECTION: signature(
        "hash/2:T input:F32|F16@1.2|I32|Q8 weight/1:T? kind:i32", FLOAT, _infer_projection, "out:I32"
    ),
    _O.RANDOM_MULTINOMIAL: signature("logits/2:T samples:i32 seeds/1:I32", LATE_FLOAT, _infer_multinomial, "out:I32"),
}
