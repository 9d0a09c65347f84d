"""The operation table, part: IF and WHILE, whose inputs and outputs depend on their subgraphs (rule V16)."""

from __future__ import annotations

from ..operand_types import OPERANDS
from ..operation_types import OperationType
from ..operation_view import OperationView, Signature, UnknownYet
from ..signature import signature
from .common import Outputs


def _infer_from_subgraphs(view: OperationView) -> Outputs:
    raise UnknownYet("its outputs are those of its subgraphs; give their types and dimensions")


_EVERY = " ".join(info.short for info in OPERANDS.values())

ROWS: dict[OperationType, Signature] = {
    OperationType.IF: signature(
        "condition:T then:sub else:sub values:any*", "B8", _infer_from_subgraphs, "out:any+", zero_sized=True
    ),
    OperationType.WHILE: signature(
        "condition:sub body:sub first:T values:any*", _EVERY, _infer_from_subgraphs, "out:any+", zero_sized=True
    ),
}
