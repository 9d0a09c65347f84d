"""Conversion of queues, requests and results between Python and the C endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core._nnburst import ffi, lib
from .._core.errno import check
from ..errors import ErrorStatus, InvalidArgument, OutputShape
from ..fmq.descriptor import Flavour
from ..model.running import ExecutionResult, consistent_result
from ..model.types import UINT64_MAX, DataLocation, Request, RequestArgument, Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._core._nnburst import CData
    from ..fmq.descriptor import MQDescriptor

_UINT32_MAX = 2**32 - 1


def open_channels(request: MQDescriptor, result: MQDescriptor, *, reset: bool) -> tuple[CData, CData]:
    """Open both channels of a burst for a C endpoint, which then owns them.

    Args:
        request, result: Descriptors of synchronized queues of 24-byte datums with an event word, in sealed memory.
        reset: True to empty the queues, as the server does before the client may send.

    Raises:
        InvalidArgument: A descriptor describes another kind of queue.
    """
    request_queue = _open_channel(request, "request channel", reset)
    try:
        return request_queue, _open_channel(result, "result channel", reset)
    except BaseException:
        lib.nnb_mq_close(request_queue)
        raise


def _open_channel(descriptor: MQDescriptor, what: str, reset: bool) -> CData:
    if descriptor.flags != Flavour.SYNCHRONIZED:
        raise InvalidArgument(f"{what}: flavour {descriptor.flags}; burst channels are synchronized queues")
    grantors, fds, quantum = descriptor.grantors, descriptor.fds, descriptor.quantum
    if len(grantors) < 4:
        raise InvalidArgument(f"{what}: no event word; create the queue with one")
    if quantum != lib.NNB_DATUM_SIZE:
        raise InvalidArgument(f"{what}: quantum {quantum}; datums are {lib.NNB_DATUM_SIZE} bytes")
    options = lib.NNB_MQ_EXCLUSIVE | lib.NNB_MQ_SEALED | (lib.NNB_MQ_RESET if reset else 0)
    out = ffi.new("nnb_mq **")
    regions, numbers = ffi.new("nnb_grantor[]", grantors), ffi.new("int[]", fds)
    check(lib.nnb_mq_open(out, regions, len(grantors), numbers, len(fds), quantum, Flavour.SYNCHRONIZED, options), what)
    queue: CData = out[0]
    return queue


# ---- requests -------------------------------------------------------------------------------------------------


_BEYOND = "; share the part beyond 4 GiB as a pool of its own, with Memory.mmap_fd and its offset"


def _u32(value: int, what: str, hint: str = "") -> int:
    if not 0 <= value <= _UINT32_MAX:
        raise InvalidArgument(f"{what} is {value}; a burst carries numbers up to {_UINT32_MAX}{hint}")
    return value


def c_request(request: Request, slots: Sequence[int], *, measure: bool) -> tuple[CData, list[object]]:
    """Return a C request and objects to keep alive with it. Raises `InvalidArgument` for numbers beyond 32 bits."""
    arguments = (*request.inputs, *request.outputs)
    rows = ffi.new("nnb_argument[]", max(len(arguments), 1))
    dims: list[int] = []
    for i, argument in enumerate(arguments):
        kind, index = ("input", i) if i < len(request.inputs) else ("output", i - len(request.inputs))
        row, where = rows[i], argument.location
        row.has_no_value = argument.has_no_value
        row.pool_index = _u32(where.pool_index, f"{kind} {index}: pool index")
        row.offset = _u32(where.offset, f"{kind} {index}: offset", _BEYOND)
        row.length = _u32(where.length, f"{kind} {index}: length")
        row.rank = len(argument.dimensions)
        row.first_dim = len(dims)
        dims.extend(_u32(d, f"{kind} {index}: dimension") for d in argument.dimensions)
    out = ffi.new("nnb_request *")
    c_dims = ffi.new("uint32_t[]", dims or [0])
    c_pools = ffi.new("int32_t[]", list(slots) or [0])
    out.n_inputs, out.n_outputs = len(request.inputs), len(request.outputs)
    out.n_pools, out.n_dims = len(slots), len(dims)
    out.arguments, out.dims, out.pools = rows, c_dims, c_pools
    out.measure = measure
    return out, [rows, c_dims, c_pools]


def python_request(raw: CData) -> tuple[Request, list[int], bool]:
    """Return (request without pools, slots, measure) from a decoded packet."""
    dims: list[int] = ffi.unpack(raw.dims, raw.n_dims) if raw.n_dims else []
    arguments = []
    for i in range(raw.n_inputs + raw.n_outputs):
        row = raw.arguments[i]
        arguments.append(
            RequestArgument(
                bool(row.has_no_value),
                DataLocation(row.pool_index, row.offset, row.length),
                tuple(dims[row.first_dim : row.first_dim + row.rank]),
            )
        )
    slots: list[int] = ffi.unpack(raw.pools, raw.n_pools) if raw.n_pools else []
    return Request(tuple(arguments[: raw.n_inputs]), tuple(arguments[raw.n_inputs :])), slots, bool(raw.measure)


# ---- results --------------------------------------------------------------------------------------------------


def c_result(result: ExecutionResult) -> tuple[CData, list[object]]:
    """Return a C result and objects to keep alive with it."""
    status, shapes, timing = result
    out = ffi.new("nnb_result *")
    rows = ffi.new("nnb_shape[]", max(len(shapes), 1))
    dims: list[int] = []
    for row, shape in zip(rows, shapes, strict=False):
        row.is_sufficient = shape.is_sufficient
        row.rank = len(shape.dimensions)
        row.first_dim = len(dims)
        dims.extend(shape.dimensions)
    c_dims = ffi.new("uint32_t[]", dims or [0])
    out.status = int(status)
    out.n_shapes, out.n_dims = len(shapes), len(dims)
    out.shapes, out.dims = rows, c_dims
    for field in ("time_on_device", "time_in_driver"):
        micros = getattr(timing, field)
        setattr(out, field, UINT64_MAX if micros is None else min(micros, UINT64_MAX))
    return out, [rows, c_dims]


def python_result(raw: CData) -> ExecutionResult:
    """Return a result's status, shapes and timing, without parts that contradict the status."""
    shapes: tuple[OutputShape, ...] = ()
    if raw.n_shapes:
        dims: list[int] = ffi.unpack(raw.dims, raw.n_dims) if raw.n_dims else []
        rows = [raw.shapes[i] for i in range(raw.n_shapes)]
        shapes = tuple(
            OutputShape(tuple(dims[r.first_dim : r.first_dim + r.rank]), bool(r.is_sufficient)) for r in rows
        )
    times = (None if micros == UINT64_MAX else micros for micros in (raw.time_on_device, raw.time_in_driver))
    return consistent_result(ErrorStatus(raw.status), shapes, Timing(*times))
