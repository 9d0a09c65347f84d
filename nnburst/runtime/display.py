"""Texts that describe public objects at a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compile.compilation import Compilation
    from .request.node_args import NodeArg


def describe(compilation: Compilation) -> str:
    """Return a line about a model: ``x (1, 4) float32 → y (1, 4) float32``."""
    return f"{_line(compilation.inputs)} → {_line(compilation.outputs)}"


def _line(nodes: Iterable[NodeArg]) -> str:
    return ", ".join(f"{node.name} {_shape(node.user_view)} {_type(node)}" for node in nodes if not node.is_optional)


def _type(node: NodeArg) -> str:
    return node.holds or str(node.dtype) + f", bits of {node.bits_of}" * bool(node.bits_of)


def _shape(node: NodeArg) -> str:
    return "(any shape)" if node.shape is None else f"({', '.join('?' if n is None else str(n) for n in node.shape)})"
