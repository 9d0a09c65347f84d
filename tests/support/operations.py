"""Runs of one operation in every data type, compared with a function of real numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from nnburst import Model, ModelBuilder, OperandType, OperationType
from nnburst.devices import LocalDevice
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.errors import DeviceUnavailable, ErrorStatus, NNBurstError
from nnburst.model.operand import Output
from nnburst.model.operand_types import operand_info
from nnburst.model.types import DataLocation, Lifetime, OperandDesc
from support.models import built
from support.samples import ran, with_unspecified_outputs

if TYPE_CHECKING:
    from nnburst.devices.onnxruntime.device import OnnxRuntimeDevice

T, O = OperandType, OperationType  # noqa: E741
Array = np.ndarray[Any, np.dtype[Any]]
F32, F16, I32 = T.TENSOR_FLOAT32, T.TENSOR_FLOAT16, T.TENSOR_INT32
Q8, Q8S, B8 = T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED, T.TENSOR_BOOL8
FLOATS, QUANTS = (F32, F16), (Q8, Q8S)
REALS = (*FLOATS, *QUANTS)
HALF = 5 / 1024
KINDS = {"float32": F32, "float16": F16, "int32": I32, "uint8": Q8, "int8": Q8S}


@dataclass(frozen=True)
class Fx:
    """A floating point scalar, float16 if the data is float16."""

    value: float


@dataclass(frozen=True)
class Box:
    """Coordinates, of the data's type if the data is floating point, else in eighths of a pixel."""

    value: Array


@dataclass(frozen=True)
class Typed:
    """A tensor or scalar whose type does not depend on T."""

    value: Any
    type: OperandType


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def quantisation(kind: OperandType, *values: Array) -> tuple[float, int]:
    """Return a scale and zero point with which a type can represent the values."""
    info = operand_info(kind)
    if not info.is_quantised:
        return 0.0, 0
    bounds = np.iinfo(info.dtype)
    low, high = min(0.0, *(float(v.min()) for v in values)), max(1e-3, *(float(v.max()) for v in values))
    scale = float(np.float32((high - low) / 250))
    return scale, int(bounds.min + 2 + round(-low / scale))


def encoded(real: Array, kind: OperandType, scale: float, zero_point: int) -> Array:
    info = operand_info(kind)
    if not info.is_quantised:
        return np.asarray(real).astype(info.dtype)
    bounds = np.iinfo(info.dtype)
    steps = np.asarray(real, np.float64) / scale
    stored = np.sign(steps) * np.floor(np.abs(steps) + 0.5) + zero_point
    return np.clip(stored, bounds.min, bounds.max).astype(info.dtype)


def decoded(stored: Array, scale: float, zero_point: int) -> Array:
    return (stored.astype(np.float64) - zero_point) * scale if scale else stored.astype(np.float64)


def run_model(
    model: Model, inputs: Sequence[Array], *, loop_timeout_ns: int = 0
) -> tuple[ErrorStatus, list[Array], Any]:
    """Run a model on the reference device. Return status, outputs and the reported output shapes.

    If every operation can be lowered, ONNX Runtime must give the same outputs, with the specified tolerance.
    """
    found = run_on(ReferenceDevice(), model, inputs, loop_timeout_ns=loop_timeout_ns)
    check_lowered(model, inputs, *found[:2])
    return found


@cache
def lowering_device() -> OnnxRuntimeDevice | None:
    """Return the device that lowers operations to ONNX Runtime, or None if its libraries are not installed."""
    with contextlib.suppress(DeviceUnavailable, ImportError):
        from nnburst.devices.onnxruntime.device import OnnxRuntimeDevice

        return OnnxRuntimeDevice(threads="1")
    return None


def check_lowered(model: Model, inputs: Sequence[Array], status: ErrorStatus, wanted: Sequence[Array]) -> bool:
    """Compare results with the results of the lowered model. Return False if the model is not compared."""
    device = lowering_device()
    try:
        if device is None or not all(device.get_supported_operations(model)):
            return False
    except NNBurstError:
        assert status is not ErrorStatus.NONE
        return False
    if status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT:  # only the reference device needs memory for padded copies
        return False
    found, outputs, _ = run_on(device, model, inputs)
    assert found is status or ErrorStatus.NONE not in (found, status), f"lowered: {found.name}, not {status.name}"
    is_relaxed = model.relax_computation_float32_to_float16 or any(o.type == F16 for o in model.main.operands)
    for index, out, want in zip(model.main.output_indexes, outputs, wanted, strict=True):
        info = operand_info(model.main.operands[index].type)
        assert out.shape == want.shape, "lowered"
        half = info.type == F16 or (is_relaxed and info.is_float)
        atol, rtol = (HALF, HALF) if half else (1e-5, 5 * 2.0**-23) if info.is_float else (int(info.type != B8), 0)
        if model.main.operations[-1].type == O.LSTM and index == model.main.operations[-1].outputs[0]:
            continue  # scratch, with undefined values
        with np.errstate(over="ignore", invalid="ignore"):
            np.testing.assert_allclose(
                out.astype(np.float64), want.astype(np.float64), atol=atol, rtol=rtol, err_msg="lowered"
            )
    return True


def run_on(
    device: LocalDevice, model: Model, inputs: Sequence[Array], *, loop_timeout_ns: int = 0
) -> tuple[ErrorStatus, list[Array], Any]:
    """Run a model on a device in this process, and return the same as `run_model`."""
    outcome = ran(device, model, inputs, loop_timeout_ns=loop_timeout_ns)
    nothing = [np.empty(0)] * len(model.main.output_indexes)
    return outcome.status, outcome.outputs or nothing, outcome.shapes


def outputs_of(make: Callable[..., Any], *inputs: Array, **quantisation: Any) -> list[Array]:
    """Build a model and return its outputs for `inputs`.

    Args:
        make: Function that gets a builder and the input operands, and returns one output operand or several.
        inputs: Values of the inputs, which have the arrays' types. uint8 becomes `TENSOR_QUANT8_ASYMM`.
        quantisation: `scale` and `zero_point` of all inputs.
    """
    descs = [OperandDesc(KINDS[x.dtype.name], x.shape, **quantisation) for x in inputs]
    status, found, _ = run_model(built(descs, make), inputs)
    assert status is ErrorStatus.NONE
    return found


def with_constants_as_inputs(model: Model, inputs: Sequence[Array]) -> tuple[Model, list[Array]]:
    """Turn each constant into an input, except constants with one scale per channel. Return the inputs' values."""
    operands, arrays, indexes = list(model.main.operands), list(inputs), list(model.main.input_indexes)
    for index, operand in enumerate(operands):
        dtype, where = operand_info(operand.type).dtype, operand.location
        if dtype is None or operand.type == T.TENSOR_QUANT8_SYMM_PER_CHANNEL:
            continue
        if operand.lifetime == Lifetime.CONSTANT_COPY:
            raw = model.operand_values[where.offset : where.offset + where.length]
            arrays.append(np.frombuffer(raw, dtype).reshape(operand.dimensions))
        elif operand.lifetime == Lifetime.CONSTANT_REFERENCE:
            arrays.append(model.pools[where.pool_index].array(dtype, operand.dimensions, where.offset))
        else:
            continue
        operands[index] = replace(operand, lifetime=Lifetime.SUBGRAPH_INPUT, location=DataLocation())
        indexes.append(index)
    main = replace(model.main, operands=tuple(operands), input_indexes=tuple(indexes))
    return replace(model, main=main, input_names=(), output_names=()), arrays


def with_omitted_inputs(model: Model) -> Model:
    """Turn each operand without a value into an input, which requests then omit."""
    operands, missing = list(model.main.operands), []
    for index, operand in enumerate(operands):
        if operand.lifetime == Lifetime.NO_VALUE:
            operands[index] = replace(operand, lifetime=Lifetime.SUBGRAPH_INPUT)
            missing.append(index)
    main = replace(model.main, operands=tuple(operands), input_indexes=(*model.main.input_indexes, *missing))
    return replace(model, main=main, input_names=(), output_names=())


class Case:
    """One use of an operation in a tested type T. Arrays of float64 become model inputs of type T."""

    def __init__(self, operation: OperationType, *arguments: Any) -> None:
        self.operation = operation
        self.arguments = arguments

    def run(
        self,
        kind: OperandType,
        wanted: Callable[..., Any] | None = None,
        *,
        count: int | None = None,
        shared: bool = False,
        quantisations: Sequence[tuple[float, int]] = (),
    ) -> tuple[list[Array], list[Array], list[Any]]:
        """Run the operation with T = `kind`.

        Returns:
            Stored outputs, their real values, and the result of `wanted` for the inputs' real values.
        """
        b, inputs, reals = ModelBuilder(), [], []
        floats = [a for a in self.arguments if isinstance(a, np.ndarray) and a.dtype == np.float64]
        common = quantisation(kind, *floats) if shared and floats else None
        operands: list[Any] = []
        for position, argument in enumerate(self.arguments):
            quant, stored = (0.0, 0), None
            if argument is None:
                operands.append(b.omitted(kind))
                continue
            if isinstance(argument, Fx):
                half = T.FLOAT16 if kind == F16 else T.FLOAT32
                reals.append(float(np.float16(argument.value)) if kind == F16 else float(np.float32(argument.value)))
                operands.append(b.scalar(argument.value, half))
                continue
            if isinstance(argument, bool | int):
                operands.append(b.scalar(argument))
                continue
            if isinstance(argument, Typed):
                its, value = argument.type, np.asarray(argument.value)
                if operand_info(its).is_scalar:
                    operands.append(b.scalar(argument.value, its))
                    continue
                stored = value.astype(operand_info(its).dtype)
            elif isinstance(argument, Box):
                its = kind if kind in FLOATS else T.TENSOR_QUANT16_ASYMM
                quant = (0.0, 0) if kind in FLOATS else (0.125, 0)
                stored = encoded(argument.value, its, *quant)
            elif argument.dtype.kind == "i":
                operands.append(b.constant(argument.astype(np.int32)))
                continue
            else:
                its = kind
                quant = common or quantisation(kind, argument)
                stored = encoded(argument, its, *quant)
            operands.append(b.input(f"x{position}", its, stored.shape, scale=quant[0], zero_point=quant[1]))
            inputs.append(stored)
            reals.append(decoded(stored, *quant) if its not in (I32, B8) else stored)
        expected = [] if wanted is None else wanted(*reals)
        expected = list(expected) if isinstance(expected, tuple | list) else [expected]
        given = list(quantisations)
        if not given and kind in QUANTS:
            given = [quantisation(kind, np.asarray(e, np.float64)) if np.size(e) else (0.1, 0) for e in expected]
            if self.operation.name in SAME_QUANTISATION or self.operation.name in FIXED_QUANTISATION:
                given = []
        said: list[Output] = [{} for _ in range(max(len(given), count or 0))]
        for output, (scale, zero_point) in zip(said, given, strict=False):
            output["scale"], output["zero_point"] = scale, zero_point
        outs = b.operation(self.operation, *operands, outputs=said or None)
        for which, out in enumerate(outs):
            b.output(f"y{which}", out)
        model = b.build()
        status, outputs, _ = run_model(model, inputs)
        assert status is ErrorStatus.NONE, status
        if self.operation.name != "RANDOM_MULTINOMIAL":
            late_model, arrays = with_constants_as_inputs(model, inputs)
            again, late, _ = run_model(with_unspecified_outputs(late_model), arrays)
            assert again is ErrorStatus.NONE, "as inputs"
            _, omitted, _ = run_model(with_omitted_inputs(model), inputs)
            assert [out.tobytes() for out in omitted] == [out.tobytes() for out in outputs], "omitted by the request"
            for now, then in zip(outputs, late, strict=True):
                assert now.shape == then.shape
                assert now.tobytes() == then.tobytes(), "constants as inputs, outputs without dimensions"
        quants = [(model.main.operands[i].scale, model.main.operands[i].zero_point) for i in model.main.output_indexes]
        values = [decoded(out, *quant) for out, quant in zip(outputs, quants, strict=True)]
        self.quants = quants
        return outputs, values, expected

    def check(self, wanted: Callable[..., Any], kinds: Sequence[OperandType] = REALS, **options: Any) -> None:
        """Compare the operation in each type with `wanted`, a function from real inputs to real outputs."""
        for kind in kinds:
            outputs, values, expected = self.run(kind, wanted, **options)
            for out, found, want, quant in zip(outputs, values, expected, self.quants, strict=False):
                want = np.asarray(want, np.float64)
                assert out.shape == want.shape, (kind.name, out.shape, want.shape)
                if out.dtype == np.float16 or kind == F16:
                    tolerance = {"atol": HALF, "rtol": HALF}
                elif quant[0]:
                    bounds = np.iinfo(out.dtype)
                    want = np.clip(want, *decoded(np.array([bounds.min, bounds.max]), *quant))
                    tolerance = {"atol": 0.51 * quant[0], "rtol": 0}
                else:
                    tolerance = {"atol": 1e-5, "rtol": 1e-6}
                np.testing.assert_allclose(found, want, err_msg=kind.name, **tolerance)


SAME_QUANTISATION = set(
    "AVERAGE_POOL_2D MAX_POOL_2D RELU RELU1 RELU6 RESHAPE SQUEEZE EXPAND_DIMS TRANSPOSE SLICE STRIDED_SLICE SPLIT TILE "
    "PAD PAD_V2 GATHER CHANNEL_SHUFFLE MEAN REDUCE_MAX REDUCE_MIN TOPK_V2 DEPTH_TO_SPACE SPACE_TO_DEPTH "
    "BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR EMBEDDING_LOOKUP HASHTABLE_LOOKUP "
    "ROI_POOLING BOX_WITH_NMS_LIMIT GENERATE_PROPOSALS".split()
)
FIXED_QUANTISATION = {"LOGISTIC", "SOFTMAX", "TANH", "L2_NORMALIZATION"}
