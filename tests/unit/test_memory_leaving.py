"""Memory that is closed too early, is not to be had, or belongs to a request that failed."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import nnburst
from nnburst import Memory, Model, ModelBuilder, OperandType
from nnburst.burst import ExecutionBurstController
from nnburst.errors import BadState, GeneralFailure
from nnburst.memory.staging import open_request
from nnburst.model import Request
from nnburst.model.types import DataLocation, RequestArgument

NBYTES = 256


def model() -> Model:
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (1, 64))
    b.output("y", b.fully_connected(x, np.eye(64, dtype=np.float32)))
    return b.build()


def at(pool: int, offset: int = 0) -> tuple[RequestArgument, ...]:
    return (RequestArgument(location=DataLocation(pool, offset, NBYTES)),)


@pytest.fixture(params=["in_process", "launch"])
def service(request: pytest.FixtureRequest) -> Iterator[nnburst.Service]:
    with getattr(nnburst, request.param)(devices=["nnburst-reference"]) as service:
        yield service


WAYS: dict[str, Callable[[nnburst.Execution, nnburst.nnapi.Burst], object]] = {
    "compute": lambda execution, burst: execution.compute(),
    "start": lambda execution, burst: execution.start_compute().wait(),
    "burst": lambda execution, burst: execution.burst_compute(burst),
}


@pytest.mark.parametrize("which", ["input", "output"])
@pytest.mark.parametrize("way", WAYS)
def test_memory_closed_before_the_run_is_named_by_its_argument(service: nnburst.Service, way: str, which: str) -> None:
    with nnburst.nnapi.Compilation(model(), service.devices) as compilation:
        compilation.finish()
        with nnburst.nnapi.Burst(compilation) as burst, Memory.ashmem(NBYTES) as x, Memory.ashmem(NBYTES) as y:
            execution = nnburst.nnapi.Execution(compilation)
            execution.set_input_from_memory(0, x, offset=0, length=NBYTES)
            execution.set_output_from_memory(0, y, offset=0, length=NBYTES)
            (x if which == "input" else y).close()
            with pytest.raises(BadState, match=rf"the memory of {which} 0 is closed: Memory\('ashmem', size={NBYTES}"):
                WAYS[way](execution, burst)


def test_memory_closed_between_bind_and_the_first_run_is_named(service: nnburst.Service) -> None:
    prepared = service.devices[0].prepare_model(model())
    with ExecutionBurstController.create(prepared) as burst, Memory.ashmem(NBYTES) as x, Memory.ashmem(NBYTES) as y:
        bound = burst.bind(Request(at(0), at(1), (x, y)))
        y.close()
        with pytest.raises(BadState, match="the memory of output 0 is closed"):
            bound.run()
        with pytest.raises(BadState, match="the memory of output 0 is closed"):
            burst.bind(Request(at(0), at(1), (x, y)))
    with pytest.raises(BadState, match=r"Memory\('ashmem'.*is closed; keep a memory open"):
        y._check_usable()
    prepared.close()


NO_MEMORY = """
import resource, sys, tempfile
import numpy as np
from nnburst.errors import ResourceExhausted
from nnburst import Memory
from nnburst.memory.staging import open_request
from nnburst.model import Request
from nnburst.model.types import DataLocation, RequestArgument

size = 1 << 30
pool, file = Memory.ashmem(size), tempfile.TemporaryFile(dir="/var/tmp")
file.truncate(size)
plain = Memory.mmap_fd(file.fileno(), size)
argument = (RequestArgument(location=DataLocation(0, 0, size)),)
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (size >> 1), resource.RLIM_INFINITY))
for name, use in {
    "map": lambda: pool.array(np.uint8, (size,)),
    "read": lambda: plain.read(np.uint8, (size,)),
    "stage": lambda: open_request(Request(argument, (), (plain,))),
    "open": lambda: open_request(Request(argument, (), (pool,))),
}.items():
    try:
        use()
    except ResourceExhausted as error:
        print(name, error)
"""


def test_address_space_that_is_full_is_a_typed_error() -> None:
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=60, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["map", "read", "stage", "open"]
    assert "1073741824 bytes" in done.stdout


def test_pools_of_a_request_that_cannot_be_opened_go_without_the_collector() -> None:
    pool = Memory.ashmem(2 * NBYTES)
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        short = Memory.mmap_fd(file.fileno(), NBYTES)
    kept = weakref.ref(pool)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(GeneralFailure):
            open_request(Request(at(0), at(0, NBYTES), (pool, short)))
        del pool
        assert kept() is None
    finally:
        gc.enable()
    short.close()
