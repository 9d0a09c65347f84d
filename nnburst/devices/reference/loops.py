"""The calls of a program as loops of C, where each is one: NumPy's calls take longer than the loops of a small run.

A call of a ufunc on arrays that stay where they are comes down to its inner loop, a C function that needs no
interpreter, with the same addresses each time. `csrc/loops.c` calls that, so results are NumPy's bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._core._nnburst import ffi, lib
from ..._core.errno import check
from ...model import Array
from .call import KernelStep, store

if TYPE_CHECKING:
    from ..._core._nnburst import CData

_MOST = 256
"""Calls; a program of more spends its time elsewhere."""
_AT_ONCE = 1 << 13
"""Elements up to which a loop of this project is not slower than NumPy's conversions."""
_OF_INTEGERS = (np.add, np.subtract, np.multiply, np.maximum, np.minimum)
"""Those that raise nothing, so that they need no interpreter."""
_FUNCTION = "void(*)(char **, const intptr_t *, const intptr_t *, void *)"


class _NoLoop(Exception):
    """A step is something else."""


@dataclass(frozen=True)
class _Walk:
    """How a loop goes over its arguments; see ``nnb_loop``."""

    counts: Sequence[int]
    strides: Sequence[int]
    times: int = 1
    hops: Sequence[int] = ()


class Loops:
    """The steps of a program as a kernel in C. Keeps their arrays."""

    def __init__(self, steps: Sequence[KernelStep]) -> None:
        """Use `of`."""
        self._kept: list[object] = [*steps]
        self._list: list[dict[str, Any]] = []
        for step in steps:
            self._add(step)
        out = ffi.new("nnb_kernel **")
        check(lib.nnb_loops_create(out, ffi.new("nnb_loop[]", self._list), len(self._list)), "bind")
        self.kernel: CData = ffi.gc(out[0], out[0].destroy)

    @classmethod
    def of(cls, steps: Sequence[KernelStep]) -> Loops | None:
        """Return them; None if a step is no loop, or there are many."""
        try:
            return cls(steps) if len(steps) <= _MOST else None
        except _NoLoop:
            return None

    def cancel(self) -> None:
        """End the run under way before its next loop, and each later run before the first. Any thread."""
        lib.nnb_loops_cancel(self.kernel)

    def _add(self, step: KernelStep) -> None:
        if not isinstance(step, partial):
            raise _NoLoop
        function: Any = step.func
        args = step.args
        if isinstance(function, np.ufunc) and set(step.keywords) <= {"out"}:
            operands = args if len(args) == function.nargs else (*args, step.keywords.get("out"))
            if function is np.matmul:
                self._add_product(*operands)
            elif function is np.subtract and getattr(args[0], "dtype", np.dtype(float)).kind in "iu":
                self._add_centred(*operands)
            else:
                self._add_elements(function, operands[:-1], operands[-1])
        elif function is np.copyto and len(args) == 2 and getattr(args[1], "dtype", None) != args[0].dtype:
            self._convert(args[1], 0, args[0])
        elif function is store:
            real, _, zero_point, out = args
            self._add_own("nnb_loop_store", real, out, self._centre(zero_point, real))
        elif isinstance(table := getattr(function, "__self__", None), np.ndarray) and function == table.take:
            codes, _, out, _ = args
            is_taken = codes.dtype == np.uint8 and table.shape == (256,) and table.flags.c_contiguous
            if not is_taken or table.dtype != out.dtype or out.itemsize not in (1, 8):
                raise _NoLoop
            self._kept.append(table)
            self._add_own("nnb_loop_take", codes, out, ffi.cast("void *", _address(table)))
        else:
            raise _NoLoop

    def _add_elements(self, function: np.ufunc, inputs: Sequence[Any], out: Any) -> None:
        if not isinstance(out, np.ndarray) or out.dtype.char not in "fdi":
            raise _NoLoop
        if out.dtype.char == "i" and function not in _OF_INTEGERS:
            raise _NoLoop
        types = [value.dtype.char for value in inputs if isinstance(value, np.ndarray)]
        if "f" in types and out.dtype.char == "d" and sorted(types) != ["d", "f"]:
            raise _NoLoop  # NumPy would compute in float, or there is no second place for the conversion
        arrays = []
        for value in inputs:
            array = value if isinstance(value, np.ndarray) else np.array(value, out.dtype)
            if isinstance(value, np.generic) and value.dtype != out.dtype:
                raise _NoLoop  # NumPy would compute in another type
            if (array.dtype.char, out.dtype.char) == ("f", "d"):
                if any(np.may_share_memory(other, out) for other in inputs):
                    raise _NoLoop
                self._convert(array, 0, out)
                array = out
            if array.dtype != out.dtype or (np.may_share_memory(array, out) and not _is_same(array, out)):
                raise _NoLoop  # NumPy would make a copy
            arrays.append(array)
        char = out.dtype.char
        arrays.append(out)
        self._append(_inner(function, f"{char * function.nin}->{char}"), arrays, _walk(arrays))

    def _add_product(self, x: Any, matrix: Any, out: Any) -> None:
        arrays, char = (x, matrix, out), out.dtype.char
        if any(array.ndim != 2 or array.dtype.char != char for array in arrays) or char not in "fd":
            raise _NoLoop
        if np.may_share_memory(x, out) or np.may_share_memory(matrix, out):
            raise _NoLoop
        strides = [0, 0, 0, *x.strides, *matrix.strides, *out.strides]
        self._append(_inner(np.matmul, f"{char}{char}->{char}"), arrays, _Walk([1, *x.shape, out.shape[1]], strides))

    def _add_centred(self, source: Any, zero_point: Any, target: Any) -> None:
        if not isinstance(zero_point, np.generic) or zero_point.dtype != target.dtype:
            raise _NoLoop
        self._convert(source, int(zero_point), target)

    def _convert(self, source: Any, zero_point: int, target: Any) -> None:
        if not isinstance(source, np.ndarray) or source.dtype.char not in "BbHhfd" or target.dtype.char not in "fd":
            raise _NoLoop
        self._add_own("nnb_loop_centre", source, target, self._centre(zero_point, source))

    def _centre(self, zero_point: int, source: Array) -> CData:
        centre = ffi.new("nnb_centre *", {"zero_point": zero_point, "type": source.dtype.char.encode()})
        self._kept.append(centre)
        return centre

    def _add_own(self, name: str, source: Array, target: Array, data: CData) -> None:
        is_dense = source.flags.c_contiguous and target.flags.c_contiguous and source.shape == target.shape
        if not is_dense or target.size > _AT_ONCE or np.may_share_memory(source, target):
            raise _NoLoop
        walk = _Walk([target.size], [source.itemsize, target.itemsize])
        self._append((ffi.addressof(lib, name), data), [source, target], walk)

    def _append(self, loop: tuple[CData, CData], arrays: Sequence[Array], walk: _Walk) -> None:
        if not all(array.flags.aligned and array.dtype.isnative for array in arrays):
            raise _NoLoop
        self._kept += arrays
        function, data = ffi.cast(_FUNCTION, loop[0]), ffi.cast("void *", loop[1])
        args = [ffi.cast("char *", _address(array)) for array in arrays]
        self._list.append({"function": function, "data": data, "args": args, **asdict(walk)})


@cache
def _inner(function: np.ufunc, types: str) -> tuple[CData, CData]:
    """Return the inner loop of a ufunc for these types, and its data.

    NumPy's C interface has the tables of them in each ufunc: three ints and one unused, the functions, their data, the
    number of functions, the name, the types. All that can be compared is.
    """
    start = id(function) + object.__basicsize__
    numbers, table, count = (ffi.cast(kind, start + at) for kind, at in (("int *", 0), ("char ***", 16), ("int *", 32)))
    said = (function.nin, function.nout, function.nargs, function.ntypes)
    if (numbers[0], numbers[1], numbers[2], count[0]) != said or types not in function.types:
        raise _NoLoop
    which, codes = function.types.index(types), bytes(np.dtype(char).num for char in types.replace("->", ""))
    name, known = ffi.cast("char *", table[3]), ffi.cast("char *", table[4])
    if ffi.string(name) != function.__name__.encode() or ffi.unpack(known + which * len(codes), len(codes)) != codes:
        raise _NoLoop
    return table[0][which], table[1][which] if table[1] else ffi.NULL


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _is_same(a: Array, b: Array) -> bool:
    return (_address(a), a.shape, a.strides) == (_address(b), b.shape, b.strides)


def _walk(arrays: Sequence[Array]) -> _Walk:
    """Return how one loop, called again and again, goes over arrays that are broadcast to the last one's shape."""
    shape = arrays[-1].shape
    try:
        strides = [np.broadcast_to(array, shape).strides for array in arrays]
    except ValueError:
        raise _NoLoop from None
    dims: list[tuple[int, list[int]]] = []  # the innermost first
    for axis, count in reversed(list(enumerate(shape))):
        steps = [of_array[axis] for of_array in strides]
        if dims and all(step == dims[-1][0] * inner for step, inner in zip(steps, dims[-1][1], strict=True)):
            dims[-1] = dims[-1][0] * count, dims[-1][1]
        elif count != 1:
            dims.append((count, steps))
    if len(dims) > 2:
        raise _NoLoop
    (count, inner), (times, hops) = dims + [(1, [0] * len(arrays))] * (2 - len(dims))
    return _Walk([count], inner, times, hops)
