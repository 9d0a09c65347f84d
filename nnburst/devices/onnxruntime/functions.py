"""A limit on graphs that call functions, since each call is replaced by the nodes of the function.

If each function calls the next one twice, a file of n functions becomes a graph of 2 ** n nodes. So the nodes are
counted before ONNX Runtime reads the model; the count looks at each function once.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ...errors import InvalidArgument

MOST_NODES = 30_000
"""Largest number of nodes of a graph that calls functions: the more there are, the longer each replacement takes.
A graph without functions may have any number of nodes."""

_Name = tuple[str, str, str]


def check_functions(proto: Any) -> None:
    """Check that a ``ModelProto`` is within the limit of nodes after the expansion of its function calls."""
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
    """Yield the function that each node calls, including nodes of inner graphs."""
    todo = [nodes]
    while todo:
        for node in todo.pop():
            yield _name_of(node.domain, node.op_type, node)
            todo += [graph.node for graph in inner_graphs(node)]


def inner_graphs(node: Any) -> Iterator[Any]:
    """Yield the graphs among a node's attributes: branches and loop bodies."""
    for attribute in node.attribute:
        yield from attribute.graphs
        if attribute.HasField("g"):
            yield attribute.g


def _name_of(domain: str, name: str, holder: Any) -> _Name:
    return domain, name, getattr(holder, "overload", "")
