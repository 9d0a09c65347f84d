"""Rows (j): times to compile a model of five million weights, to restore it, and only to read its files."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from nnburst import Model, ModelBuilder, OperandType, launch
from nnburst.cli.bench.rounds import Case, Subject
from nnburst.cli.bench.sampling import time_calls
from nnburst.devices.interfaces import CacheFiles, CompileJob

_REFERENCE = "nnburst-reference"
_WIDTH, _LAYERS = 1600, 2
_WEIGHTS = _WIDTH * _WIDTH * _LAYERS


def _model() -> Model:
    """Return a model of two fully connected layers, whose weights are rearranged when it is compiled."""
    rng, b = np.random.default_rng(0), ModelBuilder()
    y = b.input("x", OperandType.TENSOR_FLOAT32, (1, _WIDTH))
    for _ in range(_LAYERS):
        w = (rng.normal(size=(_WIDTH, _WIDTH)) / 40).astype(np.float32)
        y = b.fully_connected(y, w, activation="relu")
    b.output("y", y)
    return b.build()


@contextmanager
def _own_state(directory: str) -> Iterator[None]:
    """Keep the service's key and trust store out of the user's home."""
    name = "NNBURST_STATE_DIR"
    before = os.environ.get(name)
    os.environ[name] = os.path.join(directory, "state")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _open(what: str) -> Iterator[Subject]:
    model, token = _model(), hashlib.sha256(what.encode()).digest()
    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(prefix="nnburst-bench-"))
        fds = [os.open(os.path.join(directory, kind), os.O_RDWR | os.O_CREAT, 0o600) for kind in ("model", "data")]
        for fd in fds:
            stack.callback(os.close, fd)
        with _own_state(directory):
            service = stack.enter_context(launch(devices=[_REFERENCE]))
            device = service.device(_REFERENCE)
            prepared = device.prepare_model(model, CompileJob(cache=CacheFiles(tuple(fds[:1]), tuple(fds[1:]), token)))
        if prepared.cache_result is None or not prepared.cache_result.saved:
            raise RuntimeError(f"the model was not saved: {prepared.cache_result}")
        prepared.close()

        def restore() -> None:
            device.prepare_model_from_cache(CacheFiles(tuple(fds[:1]), tuple(fds[1:]), token)).close()

        def floor() -> None:
            for fd in fds:
                with mmap.mmap(-1, os.fstat(fd).st_size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                    with suppress(OSError):
                        memory.madvise(mmap.MADV_HUGEPAGE)
                    os.preadv(fd, [memory], 0)

        calls: dict[str, Callable[[], Any]] = {
            "compile": lambda: device.prepare_model(model).close(),
            "hit": restore,
            "floor": floor,
        }
        call = calls[what]
        call()
        yield Subject(partial(time_calls, call), service.pid)


CACHE_CASES: tuple[Case, ...] = tuple(
    Case(f"cache-{what}", "j", title, wait, 4 * _WEIGHTS, partial(_open, what))
    for what, title, wait in (
        ("compile", "prepare_model, 5 million weights", "block"),
        ("hit", "prepare_model_from_cache", "block"),
        ("floor", "read the same bytes into such memory", "-"),
    )
)
