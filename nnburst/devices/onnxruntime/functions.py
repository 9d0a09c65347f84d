"""A limit on the size of graphs that call functions.

ONNX Runtime replaces each call by the nodes of the function. If each function calls the next one twice, n functions
become 2 ** n nodes. So this module counts the nodes first, visiting each function once.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ...errors import InvalidArgument

MOST_NODES = 30_000
"""Largest number of nodes in a graph that calls functions. Other graphs can have any number of nodes."""

_Name = tuple[str, str, str]


def check_functions(proto: Any) -> None:
    """Check that a ``ModelProto`` has at most `MOST_NODES` nodes after the inlining of all functions."""
    if not proto.functions:
        return
    bodies = {_name_of(function.domain, function.name, function): function.node for function in proto.functions}
    calls = {name: [each for each in _called_functions(nodes) if each in bodies] for name, nodes in bodies.items()}
    sizes: dict[_Name, int] = {}
    try:
        for name in TopologicalSorter(calls).static_order():
            sizes[name] = _size(bodies[name], sizes)
    except CycleError as error:
        name = error.args[1][0]
        raise InvalidArgument(
            f"the model's function {name[1][:100]!r} calls itself, directly or through others"
        ) from None
    size = _size(proto.graph.node, sizes)
    if size > MOST_NODES:
        raise InvalidArgument(
            f"the model's graph has {size} nodes once its functions are replaced by what they consist of; "
            f"{MOST_NODES} are possible: export it without functions"
        )


def _size(nodes: Any, sizes: dict[_Name, int]) -> int:
    return sum(sizes.get(name, 1) for name in _called_functions(nodes))


def _called_functions(nodes: Any) -> Iterator[_Name]:
    todo = [nodes]
    while todo:
        for node in todo.pop():
            yield _name_of(node.domain, node.op_type, node)
            todo += [graph.node for graph in inner_graphs(node)]


def inner_graphs(node: Any) -> Iterator[Any]:
    """Yield a node's inner graphs: branches and loop bodies."""
    for attribute in node.attribute:
        yield from attribute.graphs
        if attribute.HasField("g"):
            yield attribute.g


def _name_of(domain: str, name: str, holder: Any) -> _Name:
    return domain, name, getattr(holder, "overload", "")
