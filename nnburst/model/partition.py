"""Partitioning of a model into parts for several devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from ..errors import GeneralFailure
from .dimensions import is_fully_specified
from .operand_types import OPERANDS, operand_info
from .operation_types import operation_name
from .types import Lifetime, Model, OperandDesc, Operation, Subgraph

_COMPUTED = (Lifetime.TEMPORARY_VARIABLE, Lifetime.SUBGRAPH_OUTPUT)


class Part(Struct, frozen=True):
    """A part of a model. One device runs the part as a separate model.

    Attributes:
        device: Number of the device in `chosen`; see `split_model`.
        operations: Indexes of the part's operations in the main subgraph, in running order.
        model: The part as a model, which shares the whole model's constants.
        inputs: Indexes of operands in the main subgraph, one per input of `model`.
        outputs: Indexes of operands in the main subgraph, one per output of `model`.
    """

    device: int
    operations: tuple[int, ...]
    model: Model
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def split_model(model: Model, chosen: Sequence[int]) -> tuple[Part, ...]:
    """Cut a valid model into few parts by a greedy algorithm. Return the parts in running order.

    The subgraphs of an IF or WHILE belong to the operation's part.

    Args:
        chosen: Number of the device for each operation of the main subgraph.

    Raises:
        GeneralFailure: A value between two parts has no known size.
    """
    main = model.main
    writer = {index: n for n, operation in enumerate(main.operations) for index in operation.outputs}
    groups: list[tuple[int, list[int]]] = []
    waiting = list(range(len(main.operations)))
    done: set[int] = set()

    def able(n: int) -> bool:
        return all(writer[i] in done for i in main.operations[n].inputs if i in writer)

    while waiting:
        device, group = next(chosen[n] for n in waiting if able(n)), []
        for n in waiting:  # `waiting` is in execution order.
            if chosen[n] == device and able(n):
                group.append(n)
                done.add(n)
        waiting = [n for n in waiting if n not in done]
        groups.append((device, group))
    return tuple(_part(model, device, group, writer) for device, group in groups)


def _part(model: Model, device: int, group: Sequence[int], writer: dict[int, int]) -> Part:
    main, members = model.main, set(group)
    operations = [main.operations[n] for n in group]
    used = list(dict.fromkeys(i for operation in operations for i in (*operation.inputs, *operation.outputs)))
    consumers = Counter(i for operation in operations for i in operation.inputs)
    read_later = {i for n, operation in enumerate(main.operations) if n not in members for i in operation.inputs}
    flow = any(main.operands[i].lifetime == Lifetime.SUBGRAPH for i in used)
    pools = range(len(model.pools)) if flow else sorted(
        {main.operands[i].location.pool_index for i in used if main.operands[i].lifetime == Lifetime.CONSTANT_REFERENCE}
    )  # fmt: skip
    place = {old: new for new, old in enumerate(pools)}
    inputs, outputs, operands = [], [], []
    for i in used:
        operand, lifetime = main.operands[i], main.operands[i].lifetime
        location = operand.location
        if lifetime == Lifetime.CONSTANT_REFERENCE:
            location = replace(location, pool_index=place[location.pool_index])
        elif lifetime == Lifetime.SUBGRAPH_INPUT or (lifetime in _COMPUTED and writer[i] not in members):
            lifetime = Lifetime.SUBGRAPH_INPUT
            inputs.append(i)
        elif lifetime == Lifetime.SUBGRAPH_OUTPUT or (lifetime in _COMPUTED and i in read_later):
            lifetime = Lifetime.SUBGRAPH_OUTPUT
            outputs.append(i)
        crosses = main.operands[i].lifetime in _COMPUTED and (lifetime == Lifetime.SUBGRAPH_INPUT or i in read_later)
        if crosses and not has_known_size(operand):
            name = operation_name(main.operations[writer[i]].type)
            raise GeneralFailure(
                f"the model cannot be cut behind operation {writer[i]} ({name}): dimensions {list(operand.dimensions)} "
                "of its result are not all known"
            )
        operands.append(replace(operand, lifetime=lifetime, location=location, number_of_consumers=consumers.get(i, 0)))
    number = {old: new for new, old in enumerate(used)}
    subgraph = Subgraph(
        tuple(operands),
        tuple(
            Operation(o.type, tuple(number[i] for i in o.inputs), tuple(number[i] for i in o.outputs))
            for o in operations
        ),
        tuple(number[i] for i in inputs),
        tuple(number[i] for i in outputs),
    )
    part = replace(
        model,
        main=subgraph,
        referenced=model.referenced if flow else (),
        pools=tuple(model.pools[i] for i in pools),
        input_names=(),
        output_names=(),
    )
    return Part(device, tuple(group), part, tuple(inputs), tuple(outputs))


def has_known_size(operand: OperandDesc) -> bool:
    if operand.type not in OPERANDS or operand_info(operand.type).dtype is None:
        return False
    return operand_info(operand.type).is_scalar or is_fully_specified(operand.dimensions)


def regions(sizes: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], int]:
    """Place values in one pool. Values that are needed at the same time do not overlap.

    Args:
        sizes: Bytes of each value.
        lives: For each value, the first and the last part that needs the value. Sorted by first part.

    Returns:
        The offsets, which are multiples of 64, and the size of the pool in bytes.
    """
    offsets: list[int] = []
    for k, (first, _) in enumerate(lives):
        occupied = sorted((offsets[j], offsets[j] + sizes[j]) for j in range(k) if lives[j][1] >= first)
        offset = 0
        for begin, end in occupied:
            if offset + sizes[k] <= begin:
                break
            offset = max(offset, -(-end // 64) * 64)
        offsets.append(offset)
    return tuple(offsets), max((o + s for o, s in zip(offsets, sizes, strict=True)), default=0)
