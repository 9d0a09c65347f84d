"""Mutations of valid models. Each mutation is applied at every possible place."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from nnburst import Model, OperandType, OperationType
from nnburst.model import Operation
from nnburst.model.operand_types import OPERANDS
from nnburst.model.types import DataLocation, Lifetime, OperandDesc, Subgraph, SymmPerChannelQuantParams

T, L = OperandType, Lifetime
Mutant = tuple[str, Model]
CONSTANT = (L.CONSTANT_COPY, L.CONSTANT_REFERENCE)
WRITTEN = (L.TEMPORARY_VARIABLE, L.SUBGRAPH_OUTPUT)


def with_main(model: Model, **changes: object) -> Model:
    return replace(model, main=replace(model.main, **changes))


def with_operand(model: Model, index: int, **changes: object) -> Model:
    operands = list(model.main.operands)
    operands[index] = replace(operands[index], **changes)
    return with_main(model, operands=tuple(operands))


def with_operation(model: Model, position: int, **changes: object) -> Model:
    operations = list(model.main.operations)
    operations[position] = replace(operations[position], **changes)
    return with_main(model, operations=tuple(operations))


def recounted(model: Model) -> Model:
    """Correct every consumer count, so that only the mutation itself is wrong."""
    counts = [0] * len(model.main.operands)
    for operation in model.main.operations:
        for index in operation.inputs:
            if 0 <= index < len(counts):
                counts[index] += 1
    operands = tuple(
        replace(operand, number_of_consumers=count) for operand, count in zip(model.main.operands, counts, strict=True)
    )
    return with_main(model, operands=operands)


def relisted(model: Model) -> Model:
    """Rebuild the input and output lists from the operands' lifetimes."""

    def listed(old: tuple[int, ...], lifetime: Lifetime) -> tuple[int, ...]:
        marked = [i for i, operand in enumerate(model.main.operands) if operand.lifetime == lifetime]
        return (*(i for i in old if i in marked), *(i for i in marked if i not in old))

    main = model.main
    return replace(
        with_main(
            model,
            input_indexes=listed(main.input_indexes, L.SUBGRAPH_INPUT),
            output_indexes=listed(main.output_indexes, L.SUBGRAPH_OUTPUT),
        ),
        input_names=(),
        output_names=(),
    )


def mutate_014(model: Model) -> Iterator[Mutant]:
    """Move to the front an operation that reads a result."""
    operations = model.main.operations
    for position, operation in enumerate(model.main.operations):
        if any(model.main.operands[i].lifetime in WRITTEN for i in operation.inputs):
            rest = operations[:position] + operations[position + 1 :]
            yield f"operation {position}", with_main(model, operations=(operation, *rest))


def mutate_015(model: Model) -> Iterator[Mutant]:
    """Move to the end an operation whose result is read."""
    operations = model.main.operations
    for position, operation in enumerate(model.main.operations):
        if any(model.main.operands[i].number_of_consumers for i in operation.outputs):
            rest = operations[:position] + operations[position + 1 :]
            yield f"operation {position}", with_main(model, operations=(*rest, operation))


def mutate_016(model: Model) -> Iterator[Mutant]:
    for index, _ in enumerate(model.main.operands):
        for code in (0xFFFFFFFF, max(t for t in T if t < 10000) + 1, T.OEM - 1, T.TENSOR_OEM_BYTE + 1):
            yield f"operand {index}: {code:#x}", with_operand(model, index, type=code)


def mutate_017(model: Model) -> Iterator[Mutant]:
    for index, operand in enumerate(model.main.operands):
        if OPERANDS[operand.type].is_scalar:
            yield f"operand {index}", with_operand(model, index, dimensions=(1,))


def mutate_018(model: Model) -> Iterator[Mutant]:
    bad = {"zero": 1.0, "non-negative": -1.0, "positive": 0.0}
    for index, operand in enumerate(model.main.operands):
        yield f"operand {index}", with_operand(model, index, scale=bad[OPERANDS[operand.type].scale])


_ZERO_POINTS = {
    T.TENSOR_QUANT8_ASYMM: (-1, 256),
    T.TENSOR_QUANT8_SYMM: (-129, -1, 1, 128),
    T.TENSOR_QUANT8_ASYMM_SIGNED: (-129, 128),
    T.TENSOR_QUANT16_ASYMM: (-1, 65536),
    T.TENSOR_QUANT16_SYMM: (-32769, -1, 1, 32768),
}


def mutate_019(model: Model) -> Iterator[Mutant]:
    for index, operand in enumerate(model.main.operands):
        for zero_point in _ZERO_POINTS.get(OperandType(operand.type), (1,)):
            yield f"operand {index}: {zero_point}", with_operand(model, index, zero_point=zero_point)


def mutate_020(model: Model) -> Iterator[Mutant]:
    for index, operand in enumerate(model.main.operands):
        if operand.lifetime in WRITTEN:
            yield f"operand {index} to input", relisted(with_operand(model, index, lifetime=L.SUBGRAPH_INPUT))
            dims = tuple(size or 1 for size in operand.dimensions) or (1,)
            where = DataLocation(0, len(model.operand_values), _nbytes(replace(operand, dimensions=dims)))
            constant = with_operand(model, index, lifetime=L.CONSTANT_COPY, location=where, dimensions=dims)
            values = model.operand_values + bytes(where.length)
            yield f"operand {index} to constant", relisted(replace(constant, operand_values=values))


def mutate_021(model: Model) -> Iterator[Mutant]:
    for index, operand in enumerate(model.main.operands):
        if operand.lifetime not in WRITTEN:
            for lifetime in WRITTEN:
                changed = with_operand(model, index, lifetime=lifetime, location=DataLocation())
                yield f"operand {index} to {lifetime.name}", relisted(changed)


_UNLISTED = {
    L.CONSTANT_COPY: L.SUBGRAPH_INPUT,
    L.CONSTANT_REFERENCE: L.SUBGRAPH_INPUT,
    L.SUBGRAPH_OUTPUT: L.TEMPORARY_VARIABLE,
    L.TEMPORARY_VARIABLE: L.SUBGRAPH_OUTPUT,
}


def mutate_022(model: Model) -> Iterator[Mutant]:
    for index, operand in enumerate(model.main.operands):
        if operand.lifetime in _UNLISTED:
            lifetime = _UNLISTED[Lifetime(operand.lifetime)]
            yield f"operand {index}", with_operand(model, index, lifetime=lifetime, location=DataLocation())
        elif operand.lifetime == L.SUBGRAPH_INPUT and all(operand.dimensions):
            changed = with_operand(
                model, index, lifetime=L.CONSTANT_COPY, location=DataLocation(0, 0, _nbytes(operand))
            )
            yield f"operand {index}", replace(changed, operand_values=bytes(4096))


def _nbytes(operand: OperandDesc) -> int:
    from nnburst.model.operand_types import operand_nbytes

    return operand_nbytes(operand.type, operand.dimensions)


def mutate_023(model: Model) -> Iterator[Mutant]:
    for index, operand in enumerate(model.main.operands):
        for by in (-1, 1):
            count = (operand.number_of_consumers + by) % 2**32
            yield f"operand {index} by {by}", with_operand(model, index, number_of_consumers=count)


def mutate_024(model: Model) -> Iterator[Mutant]:
    """Append a copy of an operation, which writes the same operands as the original."""
    for position, operation in enumerate(model.main.operations):
        doubled = with_main(model, operations=(*model.main.operations, operation))
        yield f"operation {position}", recounted(doubled)


def legal_for(operand: OperandDesc, code: OperandType) -> OperandDesc:
    """Give an operand another type, with dimensions, scale and zero point that are legal for the type."""
    info = OPERANDS[code]
    dims = () if info.is_scalar else operand.dimensions or (1,)
    extra = None
    if code == T.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        dims = tuple(size or 1 for size in dims)
        extra = SymmPerChannelQuantParams((1.0,) * dims[0], 0)
    lifetime, location = operand.lifetime, operand.location
    if lifetime in CONSTANT:
        dims = tuple(size or 1 for size in dims)
        changed = replace(operand, type=code, dimensions=dims)
        location = DataLocation(0, 0, _nbytes(changed)) if info.dtype is not None else location
        lifetime = L.CONSTANT_COPY
    return replace(
        operand,
        type=code,
        dimensions=dims,
        scale=0.5 if info.is_quantised else 0.0,
        zero_point=0,
        extra_params=extra,
        lifetime=lifetime,
        location=location,
    )


_FILTERS = {OperationType.CONV_2D, OperationType.DEPTHWISE_CONV_2D}
_QUANT8 = {T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED}
_DEQUANTIZE = {*_QUANT8, T.TENSOR_QUANT8_SYMM, T.TENSOR_QUANT8_SYMM_PER_CHANNEL}
_FLOATS = {T.TENSOR_FLOAT32, T.TENSOR_FLOAT16}


def _is_exempt(model: Model, index: int, code: OperandType) -> bool:
    """Return True if an operation that uses the operand accepts the other type. `mutate_025` skips such operands."""
    for operation in model.main.operations:
        here = index in operation.inputs
        if operation.type in _FILTERS and here and operation.inputs[1] == index:
            if {model.main.operands[index].type, code} <= {*_QUANT8, T.TENSOR_QUANT8_SYMM_PER_CHANNEL}:
                return True
        if operation.type == OperationType.QUANTIZE and code in (_FLOATS if here else _QUANT8):
            return here or index in operation.outputs
        if operation.type == OperationType.DEQUANTIZE and code in (_DEQUANTIZE if here else _FLOATS):
            return here or index in operation.outputs
    return False


def mutate_025(model: Model) -> Iterator[Mutant]:
    for index, operand in enumerate(model.main.operands):
        for code in T:
            if code in (operand.type, T.OEM, T.TENSOR_OEM_BYTE) or _is_exempt(model, index, code):
                continue
            operands = list(model.main.operands)
            operands[index] = legal_for(operand, code)
            changed = with_main(model, operands=tuple(operands))
            yield f"operand {index}: {code.name}", replace(changed, operand_values=model.operand_values + bytes(4096))


def mutate_026(model: Model) -> Iterator[Mutant]:
    known = [code for code in OperationType if code < 10000]
    for position, _ in enumerate(model.main.operations):
        for code in (max(known) + 1, OperationType.OEM_OPERATION - 1, OperationType.OEM_OPERATION + 1):
            yield f"operation {position}: {code}", with_operation(model, position, type=code)


def _replaced(indexes: tuple[int, ...], at: int, by: int) -> tuple[int, ...]:
    return (*indexes[:at], by, *indexes[at + 1 :])


def mutate_027(model: Model) -> Iterator[Mutant]:
    for position, operation in enumerate(model.main.operations):
        for at in range(len(operation.inputs)):
            inputs = _replaced(operation.inputs, at, len(model.main.operands))
            yield f"operation {position} input {at}", recounted(with_operation(model, position, inputs=inputs))


def mutate_028(model: Model) -> Iterator[Mutant]:
    for position, operation in enumerate(model.main.operations):
        for at in range(len(operation.outputs)):
            outputs = _replaced(operation.outputs, at, len(model.main.operands))
            yield f"operation {position} output {at}", with_operation(model, position, outputs=outputs)


def mutate_029(model: Model) -> Iterator[Mutant]:
    for position, operation in enumerate(model.main.operations):
        for at, index in enumerate(operation.outputs):
            fresh = replace(model.main.operands[index], lifetime=L.TEMPORARY_VARIABLE, number_of_consumers=0)
            wider = with_main(model, operands=(*model.main.operands, fresh))
            outputs = _replaced(operation.outputs, at, len(model.main.operands))
            yield f"operation {position} output {at}", with_operation(wider, position, outputs=outputs)


def without_operand(model: Model, gone: int) -> Model:
    """Remove an operand from the operand list and from every list that contains its index."""

    def kept(indexes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i - (i > gone) for i in indexes if i != gone)

    main = model.main
    subgraph = Subgraph(
        main.operands[:gone] + main.operands[gone + 1 :],
        tuple(Operation(o.type, kept(o.inputs), kept(o.outputs)) for o in main.operations),
        kept(main.input_indexes),
        kept(main.output_indexes),
    )
    return replace(model, main=subgraph, input_names=(), output_names=())


def mutate_030(model: Model) -> Iterator[Mutant]:
    for index, _ in enumerate(model.main.operands):
        uses = [(o, at) for _, o in enumerate(model.main.operations) for at, i in enumerate(o.inputs) if i == index]
        if uses and all(_shorter_is_legal(operation, at) for operation, at in uses):
            continue  # options that may be left out
        yield f"operand {index}", without_operand(model, index)


def mutate_031(model: Model) -> Iterator[Mutant]:
    for position, _ in enumerate(model.main.operations):
        operations = model.main.operations[:position] + model.main.operations[position + 1 :]
        yield f"operation {position}", recounted(with_main(model, operations=operations))


def mutate_032(model: Model) -> Iterator[Mutant]:
    for position, operation in enumerate(model.main.operations):
        for at in range(len(operation.inputs)):
            if _shorter_is_legal(operation, at):
                continue
            inputs = operation.inputs[:at] + operation.inputs[at + 1 :]
            yield f"operation {position} input {at}", recounted(with_operation(model, position, inputs=inputs))


_OPTION_COUNTS = {
    OperationType.CONV_2D: (8, 11),
    OperationType.DEPTHWISE_CONV_2D: (9, 12),
    OperationType.AVERAGE_POOL_2D: (8, 11),
    OperationType.MAX_POOL_2D: (8, 11),
    OperationType.L2_POOL_2D: (8, 11),
    OperationType.SOFTMAX: (3,),
}
"""By operation: the numbers of inputs for which the last input alone can be left out."""


def _shorter_is_legal(operation: Operation, at: int) -> bool:
    count = len(operation.inputs)
    if operation.type == OperationType.CONCATENATION:
        return count > 2 and at < count - 1
    return at == count - 1 and count in _OPTION_COUNTS.get(OperationType(operation.type), ())


def mutate_033(model: Model) -> Iterator[Mutant]:
    for position, operation in enumerate(model.main.operations):
        for at in range(len(operation.outputs)):
            outputs = operation.outputs[:at] + operation.outputs[at + 1 :]
            yield f"operation {position} output {at}", with_operation(model, position, outputs=outputs)


def mutate_034(model: Model) -> Iterator[Mutant]:
    fresh = len(model.main.operands)
    extra = OperandDesc(T.INT32, lifetime=L.SUBGRAPH_INPUT, number_of_consumers=1)
    wider = replace(
        with_main(model, operands=(*model.main.operands, extra), input_indexes=(*model.main.input_indexes, fresh)),
        input_names=(),
    )
    for position, operation in enumerate(model.main.operations):
        if operation.type == OperationType.SOFTMAX and len(operation.inputs) == 2:
            continue  # the axis fits there
        yield f"operation {position}", with_operation(wider, position, inputs=(*operation.inputs, fresh))


def mutate_035(model: Model) -> Iterator[Mutant]:
    fresh = len(model.main.operands)
    extra = OperandDesc(T.INT32, lifetime=L.SUBGRAPH_OUTPUT)
    wider = replace(
        with_main(model, operands=(*model.main.operands, extra), output_indexes=(*model.main.output_indexes, fresh)),
        output_names=(),
    )
    for position, operation in enumerate(model.main.operations):
        yield f"operation {position}", with_operation(wider, position, outputs=(*operation.outputs, fresh))


def mutate_038(model: Model) -> Iterator[Mutant]:
    for index, operand in enumerate(model.main.operands):
        if operand.lifetime not in CONSTANT:
            continue
        where = operand.location
        for name, location in (
            ("shorter", replace(where, length=where.length - 1)),
            ("longer", replace(where, length=where.length + 1)),
            ("beyond", replace(where, offset=2**32 - 1)),
            ("wraps", replace(where, offset=2**32 - where.length)),
            ("another pool", replace(where, pool_index=where.pool_index + 1)),
        ):
            padded = replace(model, operand_values=model.operand_values + bytes(8))
            yield f"operand {index} {name}", with_operand(padded, index, location=location)


def mutate_039(model: Model) -> Iterator[Mutant]:
    for index, operand in enumerate(model.main.operands):
        if operand.lifetime not in CONSTANT:
            for location in (DataLocation(1), DataLocation(0, 1), DataLocation(0, 0, 1)):
                yield f"operand {index} {location}", with_operand(model, index, location=location)


def mutate_040(model: Model) -> Iterator[Mutant]:
    for index, operand in enumerate(model.main.operands):
        params = operand.extra_params
        if not isinstance(params, SymmPerChannelQuantParams):
            channel = SymmPerChannelQuantParams((1.0,), 0)
            yield f"operand {index} channels", with_operand(model, index, extra_params=channel)
            yield f"operand {index} bytes", with_operand(model, index, extra_params=b"x")
            continue
        for name, bad in (
            ("none", None),
            ("dimension", replace(params, channel_dim=len(operand.dimensions))),
            ("fewer", replace(params, scales=params.scales[:-1])),
            ("more", replace(params, scales=(*params.scales, 1.0))),
            ("zero", replace(params, scales=(0.0, *params.scales[1:]))),
            ("negative", replace(params, scales=(-1.0, *params.scales[1:]))),
        ):
            yield f"operand {index} {name}", with_operand(model, index, extra_params=bad)


def mutate_041(model: Model) -> Iterator[Mutant]:
    plain = {"dimensions": (), "scale": 0.0, "zero_point": 0, "extra_params": None}
    for index, _ in enumerate(model.main.operands):
        yield f"operand {index} type", with_operand(model, index, type=T.SUBGRAPH, **plain)
        yield f"operand {index} lifetime", with_operand(model, index, lifetime=L.SUBGRAPH)
    reference = OperandDesc(T.SUBGRAPH, lifetime=L.SUBGRAPH)
    yield "out of range", with_main(model, operands=(*model.main.operands, reference))
    looped = replace(model.main, operands=(*model.main.operands, reference))
    yield "refers to itself", replace(model, referenced=(looped,))
    second = replace(reference, location=DataLocation(0, 1))
    other = replace(model.main, operands=(*model.main.operands, second))
    yield "two refer to each other", replace(model, referenced=(other, looped))


def mutate_043(model: Model) -> Iterator[Mutant]:
    main = replace(model, input_names=(), output_names=()).main
    bare = replace(model, input_names=(), output_names=())
    inputs, outputs = main.input_indexes, main.output_indexes
    yield "input twice", with_main(bare, input_indexes=(*inputs, inputs[0]))
    yield "output twice", with_main(bare, output_indexes=(*outputs, outputs[0]))
    yield "input left out", with_main(bare, input_indexes=inputs[1:])
    yield "output left out", with_main(bare, output_indexes=outputs[1:])
    yield "input that is none", with_main(bare, input_indexes=(*inputs, outputs[0]))
    yield "output that is none", with_main(bare, output_indexes=(*outputs, inputs[0]))
    yield "input that does not exist", with_main(bare, input_indexes=(*inputs, len(main.operands)))


RULES = {
    "014": "V11",
    "015": "V11",
    "016": "V2",
    "017": "V2",
    "018": "V2",
    "019": "V2",
    "020": "V9",
    "021": "V11|V12",
    "022": "V10",
    "023": "V13",
    "024": "V12",
    "025": "V8|V5",
    "026": "V6",
    "027": "V7",
    "028": "V7",
    "029": "V11|V12",
    "030": "V8",
    "031": "V1|V11|V12",
    "032": "V8",
    "033": "V8",
    "034": "V8",
    "035": "V8",
    "038": "V3",
    "039": "V4",
    "040": "V2",
    "041": "V4|V5|V15",
    "043": "V10",
}
"""The only rule that each mutation breaks. A mutant that another rule rejects would test nothing."""

MUTATIONS = {
    name.removeprefix("mutate_"): function for name, function in list(globals().items()) if name.startswith("mutate_")
}
