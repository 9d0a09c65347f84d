"""How fast a device is, found out by running something on it.

What a device says of itself cannot be compared with what another one says. So the runtime runs a few small models on
each, through the interface that it will use, checks the results, and keeps the times. A device whose results are wrong
is fast for nothing: it is preferred for no type at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..blobs.file import write_blob_file
from ..burst import ExecutionBurstController
from ..cache import default_state_directory
from ..cache.files import make_directories
from ..errors import DeadObject, MissedDeadline, NNBurstError, ResourceExhausted
from ..memory import Memory
from ..model import (
    NEVER,
    Array,
    Capabilities,
    DataLocation,
    Model,
    ModelBuilder,
    Operand,
    OperandType,
    PerformanceInfo,
    Request,
    RequestArgument,
    operation_work,
)
from .interfaces import Device

_log = logging.getLogger(__name__)
_SIDE, _DEPTH, _UNITS = 16, 32, 64
_SMALL = 4
"""Operations of a model that takes as long as its operations, not as their work."""
_BURSTS, _RUNS = 3, 10
"""Both ends of one burst may be on one processor."""
_SECONDS = 0.003
"""Of runs: more than `_RUNS` of small models, for the machine may be busy."""
_BUSY = 2
"""Programs that would run on each processor: then nothing is known of how fast a device is."""
_TOLERANCE = 0.05
"""Of the largest value; half precision has to pass."""
_PASSING = (DeadObject, MissedDeadline, ResourceExhausted)
"""Failures that say nothing of the device: they are not kept."""
_known: dict[bytes, Capabilities] = {}
_decoder = msgspec.json.Decoder(Capabilities)


def measured_capabilities(device: Device) -> Capabilities:
    """Return a device's capabilities with times that were measured on this machine, in nanoseconds.

    A type's time is that of a multiplication and addition, as `operation_work` counts them; what an operation takes in
    any case is measured apart. It is done once for each build of a device, in some ten milliseconds, and kept in the
    user's state home, unless the machine was busy. Types that were not measured have what the device claims.
    """
    key = hashlib.sha256(f"{device.name}\0{device.version_string}\0{os.cpu_count()}\0".encode() + device.cache_epoch)
    digest = key.digest()
    found = _known.get(digest) or _stored(digest)
    if found is None:
        found, passing = _measured(device)
        if passing:  # measured again when it is asked for next
            return found
        with contextlib.suppress(OSError, NNBurstError):  # kept for this process only
            if os.getloadavg()[0] <= _BUSY * (os.cpu_count() or 1):
                _store(digest, msgspec.json.encode(found))
    _known[digest] = found
    return found


def _file(digest: bytes) -> Path:
    return default_state_directory() / "measured" / f"{digest.hex()}.json"


def _stored(digest: bytes) -> Capabilities | None:
    try:
        return _decoder.decode(_file(digest).read_bytes())
    except (OSError, msgspec.MsgspecError, NNBurstError):  # not there, or not ours to read
        return None


def _measured(device: Device) -> tuple[Capabilities, bool]:
    """Return what was measured, and whether something failed that need not fail next time."""
    claims = device.capabilities
    times: dict[int, float] = {}
    passing = False
    for code, make in _CASES.items():
        try:
            times[code] = _time(device, *make())
        except _PASSING as error:
            _log.info("%s was not measured: %s", device.name, error)
            times[code], passing = NEVER, True
    small = times.pop(OperandType.FLOAT32) / _SMALL
    _log.info("%s takes %s, an operation %s", device.name, times, small)
    right = not any(map(math.isnan, (small, *times.values())))
    known = {
        code: PerformanceInfo(times.get(code, claim.exec_time) if right else NEVER, claim.power_usage)
        for code, claim in claims.operand_performance
    }
    found = msgspec.structs.replace(
        claims,
        relaxed_tensor=known.get(OperandType.TENSOR_FLOAT32, claims.relaxed_tensor),
        operand_performance=tuple(sorted(known.items(), key=lambda pair: pair[0])),
        operation_time=small if right and small < NEVER / _SMALL else 0.0,
    )
    return found, passing


def _store(digest: bytes, text: bytes) -> None:
    path = _file(digest)
    make_directories(path.parent)
    write_blob_file(path, text)


def _time(device: Device, model: Model, x: Array, wanted: Array, work: float) -> float:
    """Nanoseconds that a model takes for a unit of work; `NEVER` if it fails, not a number if it is wrong."""
    places = [DataLocation(0, 0, x.nbytes), DataLocation(0, -(-x.nbytes // 64) * 64, wanted.nbytes)]
    try:
        with (
            contextlib.closing(device.prepare_model(model)) as prepared,
            Memory.ashmem(places[1].offset + wanted.nbytes, "nnburst-measure") as memory,
        ):
            memory.write(x)
            arguments = [RequestArgument(location=place) for place in places]
            request, best = Request((arguments[0],), (arguments[1],), (memory,)), math.inf
            for _ in range(_BURSTS):
                with ExecutionBurstController.create(prepared) as burst:
                    bound = burst.bind(request)
                    bound.timeout = 1.0
                    bound.run()
                    found = memory.read(wanted.dtype, wanted.shape, places[1].offset).astype(np.float64)
                    if not np.allclose(found, wanted, rtol=0, atol=_TOLERANCE * float(np.abs(wanted).max())):
                        return math.nan
                    best = min(best, _best(bound.run))
            return max(best * 1e9 / work, 1e-6)
    except _PASSING:
        raise
    except NNBurstError as error:
        _log.info("%s was not measured: %s", device.name, error)
        return NEVER


def _best(work: Callable[[], object]) -> float:
    best = math.inf
    runs, began = 0, time.perf_counter()
    while runs < _RUNS or time.perf_counter() < began + _SECONDS:
        started = time.perf_counter()
        work()
        best, runs = min(best, time.perf_counter() - started), runs + 1
    return best


def _case(b: ModelBuilder, x: Array, wanted: Array) -> tuple[Model, Array, Array, float]:
    model = b.build()
    return model, x, wanted, sum(operation_work(model.main, each) for each in model.main.operations)


def _network(code: OperandType, dtype: Any, scale: float = 0.0) -> tuple[Model, Array, Array, float]:
    """A depthwise convolution and a matrix product of small whole numbers: exact in every type."""
    b, rng, size = ModelBuilder(), np.random.default_rng(3), _SIDE - 2
    x, taps = rng.integers(0, 3, (1, _SIDE, _SIDE, _DEPTH)), rng.integers(0, 2, (1, 3, 3, _DEPTH))
    matrix = rng.integers(0, 2, (_UNITS, _DEPTH))

    def constant(values: Array) -> Operand:
        return b.constant(values.astype(dtype), code, scale=scale)

    def bias(count: int) -> Operand:
        zeros = np.zeros(count, np.int32 if scale else dtype)
        return b.constant(zeros, OperandType.TENSOR_INT32 if scale else code, scale=scale * scale)

    image = b.input("x", code, x.shape, scale=scale)
    sums = b.depthwise_conv_2d(image, constant(taps), bias(_DEPTH), scale=scale or None)
    rows = b.reshape(sums, (size * size, _DEPTH))
    b.output("y", b.fully_connected(rows, constant(matrix), bias(_UNITS), scale=4 * scale or None))
    seen = sum(x[0, i : i + size, j : j + size] * taps[0, i, j] for i in range(3) for j in range(3))
    found = np.reshape(seen, (-1, _DEPTH)) @ matrix.T
    return _case(b, x.astype(dtype), (np.clip(np.rint(found / 4), 0, 255) if scale else found).astype(dtype))


def _sum() -> tuple[Model, Array, Array, float]:
    b = ModelBuilder()
    x = np.arange(1 << 14, dtype=np.int32)
    b.output("y", b.add(b.input("x", OperandType.TENSOR_INT32, x.shape), b.constant(x)))
    return _case(b, x, x + x)


def _small() -> tuple[Model, Array, Array, float]:
    b, ones = ModelBuilder(), np.ones((_DEPTH, _DEPTH), np.float32)
    x = np.ones((1, _DEPTH), np.float32)
    y = b.input("x", OperandType.TENSOR_FLOAT32, x.shape)
    for _ in range(_SMALL):
        y = b.fully_connected(y, ones / _DEPTH)
    b.output("y", y)
    return b.build(), x, x, 1.0


_T = OperandType
_CASES: dict[OperandType, Callable[[], tuple[Model, Array, Array, float]]] = {
    _T.FLOAT32: _small,
    _T.TENSOR_FLOAT32: lambda: _network(_T.TENSOR_FLOAT32, np.float32),
    _T.TENSOR_FLOAT16: lambda: _network(_T.TENSOR_FLOAT16, np.float16),
    _T.TENSOR_QUANT8_ASYMM: lambda: _network(_T.TENSOR_QUANT8_ASYMM, np.uint8, 1.0),
    _T.TENSOR_INT32: _sum,
}
"""What is timed for each type; in the place of a scalar, what operations take that do next to nothing."""
