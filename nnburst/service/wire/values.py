"""Values inside messages: what stands for models, requests, pools and queues on the control plane, and the limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ...errors import InvalidArgument
from ...memory import ImageLayout
from ...model import MAX_OPERANDS, OutputShape, RequestArgument, Steps, Subgraph

MAX_FDS = 253
"""Descriptors per message (SCM_MAX_FD of Linux)."""
MAX_INLINE = 64 * 1024
"""Longest body in a datagram; a longer one travels in a sealed memfd."""
MAX_BODY = 16 * 1024 * 1024
"""Longest body at all. Large constants are in pools, so this is structure only."""
MAX_REFERENCED = 1024
"""Subgraphs that a model refers to; all together have at most `MAX_OPERANDS` operands and operations each."""

Id = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Cpus = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**20)], ...], msgspec.Meta(max_length=8192)]
Unsigned64 = Annotated[int, msgspec.Meta(ge=0)]  # MessagePack ends at 2**64 - 1
ArgumentName = Annotated[str, msgspec.Meta(max_length=4096)]
OpenShapes = Annotated[
    tuple[Annotated[tuple[Id | ArgumentName | None, ...], msgspec.Meta(max_length=64)] | None, ...],
    msgspec.Meta(max_length=MAX_OPERANDS),
]
Slot = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=65536)]
Sentences = Annotated[tuple[Text, ...], msgspec.Meta(max_length=1024)]
FdCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_FDS)]
Shapes = Annotated[tuple[OutputShape, ...], msgspec.Meta(max_length=MAX_OPERANDS)]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the structs inside messages."""


class Sandbox(Value, frozen=True, omit_defaults=True):
    """What keeps a service process in, as it said when it closed its door.

    Attributes:
        mode: ``"strict"``, ``"on"`` or ``"off"``.
        landlock: Version of the kernel's Landlock that is in force: which files, ports and processes it may reach; 0:
            not in force.
        seccomp: Whether it may make only the system calls of a list.
        granted: What its devices have said that they need, a sentence each.
        missing: What it was to have and this kernel, or this container, lacks.
    """

    mode: Name
    landlock: Id = 0
    seccomp: bool = False
    granted: Sentences = ()
    missing: Sentences = ()

    def __str__(self) -> str:
        walls = [f"Landlock {self.landlock}"] * bool(self.landlock) + ["seccomp"] * self.seccomp
        said = f"{self.mode}: {', '.join(walls) or 'no wall'}" if self.mode != "off" else self.mode
        said += f"; without {', '.join(self.missing)}" if self.missing else ""
        return said + "".join(f"; {sentence}" for sentence in self.granted)


class WireMemory(Value, frozen=True, omit_defaults=True):
    """A memory pool: its schema, and how many of the message's descriptors are its own (in order).

    `token` other than 0: a driver-managed buffer instead, named by its token; `steps`: how many steps a
    request has. The rest says nothing then.
    """

    kind: Annotated[str, msgspec.Meta(max_length=64)]
    size: Unsigned64
    prot: Annotated[int, msgspec.Meta(ge=0, le=255)]
    offset: Unsigned64
    n_fds: Annotated[int, msgspec.Meta(ge=0, le=8)] = 1
    direct: bool = False
    image: ImageLayout | None = None
    token: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    steps: Steps | None = None


Pools = Annotated[tuple[WireMemory, ...], msgspec.Meta(max_length=MAX_FDS)]


class WireGrantor(Value, frozen=True):
    """One region of a queue, in bytes."""

    flags: Id
    fd_index: Id
    offset: Id
    extent: Unsigned64


class WireQueue(Value, frozen=True):
    """An `MQDescriptor` without its descriptors."""

    grantors: Annotated[tuple[WireGrantor, ...], msgspec.Meta(max_length=16)]
    quantum: Id
    flags: Id
    n_fds: Annotated[int, msgspec.Meta(ge=1, le=16)]


class WireModel(Value, frozen=True):
    """A `Model` with handles in place of pools."""

    main: Subgraph
    referenced: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_REFERENCED)]
    operand_values: bytes
    pools: Pools
    relax_computation_float32_to_float16: bool
    extension_name_to_prefix: Annotated[dict[Name, int], msgspec.Meta(max_length=1024)]
    input_names: Annotated[tuple[ArgumentName, ...], msgspec.Meta(max_length=MAX_OPERANDS)]
    output_names: Annotated[tuple[ArgumentName, ...], msgspec.Meta(max_length=MAX_OPERANDS)]


_subgraphs = msgspec.msgpack.Decoder(Subgraph)


def referenced_from_wire(encoded: Sequence[msgspec.Raw]) -> tuple[Subgraph, ...]:
    """Decode the subgraphs that a model refers to, one by one, until there are too many operands.

    Raises:
        InvalidArgument: There are, or one of them is no subgraph.
    """
    graphs: list[Subgraph] = []
    left = MAX_OPERANDS
    for raw in encoded:
        try:
            graph = _subgraphs.decode(raw)
        except Exception as error:  # of whatever the sender made of it
            raise InvalidArgument(f"subgraph {len(graphs)} cannot be read: {error}") from None
        graphs.append(graph)
        left -= max(len(graph.operands), len(graph.operations))
        if left < 0:
            raise InvalidArgument(f"the subgraphs of the model have more than {MAX_OPERANDS} operands or operations")
    return tuple(graphs)


class WireRequest(Value, frozen=True):
    """A `Request` with handles in place of pools."""

    inputs: Annotated[tuple[RequestArgument, ...], msgspec.Meta(max_length=MAX_OPERANDS)]
    outputs: Annotated[tuple[RequestArgument, ...], msgspec.Meta(max_length=MAX_OPERANDS)]
    pools: Pools


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="call"):
    """Base of all messages. What follows in comments is what a field alone does not say."""
