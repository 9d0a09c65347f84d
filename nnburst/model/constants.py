"""Constants of a model: from arrays, from scalars, from memory that the caller holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgument
from .builder import GraphBuilder, as_array
from .operand import Operand
from .operand_types import OperandType, operand_info, operand_nbytes
from .types import Array, MemoryLike, SymmPerChannelQuantParams

_TYPE_OF_DTYPE = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "int32": OperandType.TENSOR_INT32,
    "int64": OperandType.TENSOR_INT32,
    "bool": OperandType.TENSOR_BOOL8,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    "int16": OperandType.TENSOR_QUANT16_SYMM,
    "uint16": OperandType.TENSOR_QUANT16_ASYMM,
}
_SCALAR_TYPES = {bool: OperandType.BOOL, int: OperandType.INT32, float: OperandType.FLOAT32}


class ConstantBuilder(GraphBuilder):
    """Adds constants without naming what follows from their values."""

    def constant(
        self,
        value: npt.ArrayLike,
        type: OperandType | npt.DTypeLike | None = None,
        *,
        scale: float | None = None,
        zero_point: int = 0,
        channel_scales: npt.ArrayLike | None = None,
        channel_dim: int = 0,
    ) -> Operand:
        """Add a constant tensor and return it.

        Args:
            value: Array of rank 1 or more, or a list of numbers. int64 becomes int32 if no number is too large. float64
                becomes float32, which drops digits, only if `type` says so; Python's own floats do in any case.
            type: Operand type or dtype; default: what the dtype says (uint8 and int8: the asymmetric types).
            scale: Needed for quantised types.
            zero_point: For quantised types.
            channel_scales: Makes an int8 array TENSOR_QUANT8_SYMM_PER_CHANNEL, one scale per index along `channel_dim`.
            channel_dim: See `channel_scales`.

        Raises:
            InvalidArgument: The dtype has no operand type, the value does not fit it, or a scale is missing.
        """
        if isinstance(value, Operand):
            raise InvalidArgument(
                f"{value!r} is an operand already; a constant is made of an array or a list of numbers"
            )
        array = as_array(value, "a constant")
        if array.ndim == 0:
            raise InvalidArgument("a constant tensor has rank 1 or more; use scalar() for a scalar")
        is_array = isinstance(value, np.ndarray)
        if type is None:
            floats = not is_array and array.dtype == np.float64
            type = _type_of(np.dtype(np.float32) if floats else array.dtype, channel_scales)
        elif not isinstance(type, OperandType):
            type = _type_of(np.dtype(type), channel_scales)
        index = self._constant_operand(type, array.shape, scale, zero_point, channel_scales, channel_dim)
        self.set_operand_value(index, _narrowed(array, operand_info(type).dtype) if is_array else value)
        return Operand(self, index)

    def constant_from_memory(
        self,
        memory: MemoryLike,
        dimensions: Sequence[int],
        type: OperandType | npt.DTypeLike = OperandType.TENSOR_FLOAT32,
        *,
        offset: int = 0,
        scale: float | None = None,
        zero_point: int = 0,
        channel_scales: npt.ArrayLike | None = None,
        channel_dim: int = 0,
    ) -> Operand:
        """Add and return a constant tensor whose values lie in a memory, for example weights in a file.

        Nothing is read or copied here, and only the memory's handle crosses to a service. The device reads the values
        once, privately, when the model is prepared, so that they cannot change under it::

            with open("weights.bin", "rb") as file:
                weights = Memory.mmap_fd(file.fileno(), size, prot=PROT_READ)
            w = b.constant_from_memory(weights, (64, 128), offset=4096)

        Args:
            memory: Holds the values in C order and the machine's byte order; it must outlive the model.
            dimensions: Sizes, all known.
            type: Operand type, or the dtype of the values (uint8 and int8: the asymmetric types).
            offset: First byte; any alignment.
            scale: Needed for quantised types.
            zero_point: For quantised types.
            channel_scales: As for `constant`.
            channel_dim: As for `constant`.

        Raises:
            InvalidArgument: The region is outside the memory, or a scale is missing.
        """
        if not isinstance(type, OperandType):
            type = _type_of(np.dtype(type), channel_scales)
        index = self._constant_operand(type, dimensions, scale, zero_point, channel_scales, channel_dim)
        nbytes = operand_nbytes(type, tuple(dimensions))
        self.set_operand_value_from_memory(index, memory, offset, nbytes)
        return Operand(self, index)

    def _constant_operand(
        self,
        type: OperandType,
        dimensions: Sequence[int],
        scale: float | None,
        zero_point: int,
        channel_scales: npt.ArrayLike | None,
        channel_dim: int,
    ) -> int:
        if operand_info(type).is_quantised and scale is None:
            raise InvalidArgument(f"a constant of {type.name} needs scale= (and zero_point=)")
        extra = None
        if channel_scales is not None:
            scales = tuple(float(s) for s in np.asarray(channel_scales).reshape(-1))
            extra = SymmPerChannelQuantParams(scales, channel_dim)
        return self.add_operand(type, dimensions, scale=scale or 0.0, zero_point=zero_point, extra_params=extra)

    def scalar(self, value: bool | int | float, type: OperandType | None = None) -> Operand:
        """Add a scalar constant and return it; equal scalars share an operand.

        Args:
            value: A bool, int or float.
            type: Default BOOL, INT32 or FLOAT32 after the Python type.

        Raises:
            InvalidArgument: The type is none of a scalar, or the value does not fit it.
        """
        if type is None:
            kind = bool if isinstance(value, bool | np.bool_) else int if isinstance(value, int | np.integer) else float
            type = _SCALAR_TYPES[kind]
        info = operand_info(type)
        if not info.is_scalar or info.dtype is None:
            raise InvalidArgument(f"expected a scalar type, got {type.name}")
        try:
            array = np.asarray(value).astype(info.dtype) if info.is_float else np.array(int(value), info.dtype)
        except (OverflowError, TypeError, ValueError):
            raise InvalidArgument(f"{value!r} does not fit into {type.name}") from None
        key = (type, array.tobytes())
        if key not in self._scalars:
            index = self.add_operand(type)
            self.set_operand_value(index, array)
            self._scalars[key] = index
        return Operand(self, self._scalars[key])

    def omitted(self, type: OperandType) -> Operand:
        """Return a new operand for an optional input that has no value.

        Args:
            type: What it would be.
        """
        index = self.add_operand(type, scale=1.0 if operand_info(type).is_quantised else 0.0)
        self.set_operand_value(index, None)
        return Operand(self, index)

    def operand(self, index: int) -> Operand:
        """Return the operand at an index.

        Args:
            index: As `add_operand` returns them.
        """
        return Operand(self, self._index_of(index))


def type_of_dtype(dtype: np.dtype[Any]) -> OperandType | None:
    """Return the type of a constant made from an array; None if it has to be converted."""
    return _TYPE_OF_DTYPE.get(dtype.name)


def _type_of(dtype: np.dtype[Any], channel_scales: npt.ArrayLike | None) -> OperandType:
    found = type_of_dtype(dtype)
    if dtype == np.float64:
        raise InvalidArgument(
            "a float64 array would lose digits: no operand type holds them all; write array.astype(np.float32), or"
            " constant(array, np.float32)"
        )
    if found is None:
        raise InvalidArgument(f"no operand type holds dtype {dtype}; convert it, e.g. to float32")
    return found if channel_scales is None else OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL


def _narrowed(array: Array, dtype: np.dtype[Any] | None) -> Array:
    """Convert float64 and int64 to what operands hold; other mismatches are left for the check that reports them."""
    if dtype is not None and array.dtype.name in ("float64", "int64") and dtype.kind == array.dtype.kind:
        with np.errstate(over="ignore"):
            narrow = array.astype(dtype)
        if dtype.kind == "i" and not np.array_equal(narrow, array):
            raise InvalidArgument(f"a constant has values outside {dtype}")
        return narrow
    return array
