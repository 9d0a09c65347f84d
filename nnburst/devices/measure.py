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
from ..errors import DeadObject, MissedDeadline, NNBurstError, ResourceExhausted
from ..memory import Memory
from ..model import (
    NEVER,
    Array,
    Capabilities,
    DataLocation,
    Model,
    ModelBuilder,
    OperandType,
    PerformanceInfo,
    Request,
    RequestArgument,
)
from .interfaces import Device

_log = logging.getLogger(__name__)
_ROWS, _COLUMNS = 32, 128
_RUNS = 5
_TOLERANCE = 0.05
"""Of the largest value; half precision has to pass."""
_PASSING = (DeadObject, MissedDeadline, ResourceExhausted)
"""Failures that say nothing of the device: they are not kept."""
_known: dict[bytes, Capabilities] = {}
_decoder = msgspec.json.Decoder(Capabilities)


def measured_capabilities(device: Device) -> Capabilities:
    """Return a device's capabilities with times that were measured on this machine, in units of NumPy's.

    They are measured once for each build of a device, in some ten milliseconds, and kept in the user's state home.
    Types that were not measured have what the device claims.
    """
    key = hashlib.sha256(f"{device.name}\0{device.version_string}\0{os.cpu_count()}\0".encode() + device.cache_epoch)
    digest = key.digest()
    found = _known.get(digest) or _stored(digest)
    if found is None:
        found, passing = _measured(device)
        if passing:  # measured again when it is asked for next
            return found
        with contextlib.suppress(OSError, NNBurstError):  # kept for this process only
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
    _log.info("%s takes %s", device.name, {code.name: times[code] for code in _CASES})
    right = not any(map(math.isnan, times.values()))
    known = {
        code: PerformanceInfo(times.get(code, claim.exec_time) if right else NEVER, claim.power_usage)
        for code, claim in claims.operand_performance
    }
    found = msgspec.structs.replace(
        claims,
        relaxed_tensor=known.get(OperandType.TENSOR_FLOAT32, claims.relaxed_tensor),
        operand_performance=tuple(sorted(known.items(), key=lambda pair: pair[0])),
    )
    return found, passing


def _store(digest: bytes, text: bytes) -> None:
    path = _file(digest)
    path.parent.parent.parent.mkdir(parents=True, exist_ok=True)
    for directory in (path.parent.parent, path.parent):  # of this user alone: the trust store is there, too
        directory.mkdir(mode=0o700, exist_ok=True)
    write_blob_file(path, text)


def _time(device: Device, model: Model, x: Array, expected: Callable[[], Array]) -> float:
    """The time of a model on a device over that of NumPy; `NEVER` if it fails, not a number if it is wrong."""
    wanted = expected()
    baseline = _best(expected)
    places = [DataLocation(0, 0, x.nbytes), DataLocation(0, -(-x.nbytes // 64) * 64, wanted.nbytes)]
    try:
        with (
            contextlib.closing(device.prepare_model(model)) as prepared,
            Memory.ashmem(places[1].offset + wanted.nbytes, "nnburst-measure") as memory,
            ExecutionBurstController.create(prepared) as burst,
        ):
            memory.write(x)
            arguments = [RequestArgument(location=place) for place in places]
            bound = burst.bind(Request((arguments[0],), (arguments[1],), (memory,)))
            bound.timeout = 1.0
            bound.run()
            found = memory.read(wanted.dtype, wanted.shape, places[1].offset).astype(np.float64)
            if not np.allclose(found, wanted, rtol=0, atol=_TOLERANCE * float(np.abs(wanted).max())):
                return math.nan
            return max(_best(bound.run) / baseline, 1e-6)
    except _PASSING:
        raise
    except NNBurstError as error:
        _log.info("%s was not measured: %s", device.name, error)
        return NEVER


def _best(work: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(_RUNS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def _product(code: OperandType, dtype: Any, scale: float = 0.0) -> tuple[Model, Array, Callable[[], Array]]:
    """FULLY_CONNECTED of small whole numbers: exact in every type."""
    b = ModelBuilder()
    rng = np.random.default_rng(3)
    x, w = (rng.integers(0, 3, (rows, _COLUMNS)) for rows in (_ROWS, _COLUMNS))
    bias = np.zeros(_COLUMNS, np.int32 if scale else dtype)
    product = b.fully_connected(
        b.input("x", code, x.shape, scale=scale),
        b.constant(w.astype(dtype), code, scale=scale),
        b.constant(bias, OperandType.TENSOR_INT32 if scale else code, scale=scale * scale),
        scale=2 * scale or None,
    )
    b.output("y", product)
    left, right = x.astype(np.float32), w.astype(np.float32).T.copy()

    def expected() -> Array:
        found = left @ right
        return (np.clip(np.rint(found * scale / 2), 0, 255) if scale else found).astype(dtype)

    return b.build(), x.astype(dtype), expected


def _sum() -> tuple[Model, Array, Callable[[], Array]]:
    b = ModelBuilder()
    x = np.arange(1 << 14, dtype=np.int32)
    code = OperandType.TENSOR_INT32
    b.output("y", b.add(b.input("x", code, x.shape), b.constant(x)))
    return b.build(), x, lambda: x + x


_T = OperandType
_CASES: dict[OperandType, Callable[[], tuple[Model, Array, Callable[[], Array]]]] = {
    _T.TENSOR_FLOAT32: lambda: _product(_T.TENSOR_FLOAT32, np.float32),
    _T.TENSOR_FLOAT16: lambda: _product(_T.TENSOR_FLOAT16, np.float16),
    _T.TENSOR_QUANT8_ASYMM: lambda: _product(_T.TENSOR_QUANT8_ASYMM, np.uint8, 1.0),
    _T.TENSOR_INT32: _sum,
}
