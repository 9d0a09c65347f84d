"""Pools of every kind, and a model that is easy to check, for the REQ-MEM tests."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator

import numpy as np

from nnburst import Memory, Model, ModelBuilder, OperandType
from nnburst.model import Request
from nnburst.model.types import DataLocation, RequestArgument

COUNT = 64
"""Number of elements in each tensor of `sum_model`."""
NBYTES = 4 * COUNT
Pool = contextlib.AbstractContextManager[Memory]
ADDEND = np.arange(COUNT, dtype=np.float32)


def sum_model() -> Model:
    """Return y = x + [0, 1, 2, ...]. The constant is so large that it gets a pool."""
    b = ModelBuilder()
    b.output("y", b.add(b.input("x", OperandType.TENSOR_FLOAT32, (COUNT,)), ADDEND))
    return b.build()


def argument(offset: int = 0, length: int = NBYTES, pool: int = 0, dims: tuple[int, ...] = ()) -> RequestArgument:
    return RequestArgument(location=DataLocation(pool, offset, length), dimensions=dims)


def sum_request(memory: Memory, base: int = 0) -> Request:
    """Return a request with x at offset `base`, and y behind x."""
    return Request((argument(base),), (argument(base + NBYTES),), (memory,))


@contextlib.contextmanager
def ashmem(size: int) -> Iterator[Memory]:
    with Memory.ashmem(size, "nnburst-kinds") as memory:
        yield memory


@contextlib.contextmanager
def part_of_sealed(size: int) -> Iterator[Memory]:
    with Memory.ashmem(size + 100) as whole, Memory.mmap_fd(whole.fds[0], size, offset=36) as memory:
        yield memory


@contextlib.contextmanager
def regular_file(size: int, direct: bool = False) -> Iterator[Memory]:
    with tempfile.NamedTemporaryFile(prefix="nnburst-kinds-", dir="/var/tmp") as file:
        file.truncate(size + 5000)
        with Memory.mmap_fd(file.fileno(), size, offset=4196, direct=direct) as memory:
            yield memory


@contextlib.contextmanager
def unsealed_memfd(size: int) -> Iterator[Memory]:
    fd = os.memfd_create("nnburst-kinds", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    with Memory.mmap_fd(fd, size) as memory:
        os.close(fd)
        yield memory


@contextlib.contextmanager
def posix_shm(size: int) -> Iterator[Memory]:
    name = f"nnburst-test-{os.getpid()}"
    with Memory.posix_shm(name, size) as memory:
        Memory.unlink_posix_shm(name)
        yield memory


@contextlib.contextmanager
def blob(size: int) -> Iterator[Memory]:
    with Memory.hardware_buffer_blob(size) as memory:
        yield memory


KINDS: dict[str, tuple[Callable[[int], Pool], bool]] = {
    "ashmem": (ashmem, True),
    "mmap_fd of sealed": (part_of_sealed, True),
    "mmap_fd of a file": (regular_file, False),
    "mmap_fd, direct": (lambda size: regular_file(size, direct=True), True),
    "unsealed memfd": (unsealed_memfd, False),
    "posix_shm": (posix_shm, False),
    "blob": (blob, True),
}
"""By kind of pool: a function that makes a pool, and True if a device maps the pool."""
