"""Clients that try to hurt a service through memory: it answers with an error, and goes on for everybody else."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst import Memory, Model, ModelBuilder, OperandType, OperationType
from nnburst._core.fds import FdSet
from nnburst.burst import ExecutionBurstController
from nnburst.devices import Device
from nnburst.devices.registry import create_device
from nnburst.errors import BadState, ErrorStatus, NNBurstError
from nnburst.memory import FORMATS, ImageLayout
from nnburst.memory.kinds import MemoryHandle
from nnburst.model import Request
from nnburst.model.types import DataLocation, RequestArgument
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.process.launch import start_child
from support.waiting import meanwhile

COUNT = 1 << 16
NBYTES = 4 * COUNT
T, Op = OperandType, OperationType


def argument(offset: int, length: int, pool: int = 0) -> RequestArgument:
    return RequestArgument(location=DataLocation(pool, offset, length))


def model() -> Model:
    """y = x + 1, 256 KiB."""
    b = ModelBuilder()
    b.output("y", b.add(b.input("x", T.TENSOR_FLOAT32, (COUNT,)), np.ones(1, np.float32)))
    return b.build()


REQUEST = ((argument(0, NBYTES),), (argument(NBYTES, NBYTES),))


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceConnection]:
    connection = start_child(devices=("nnburst-reference",))
    yield connection
    connection.close()


@pytest.fixture(params=["in_process", pytest.param("service", marks=pytest.mark.check)])
def device(request: pytest.FixtureRequest, service: ServiceConnection) -> Iterator[Device]:
    if request.param == "service":
        yield service.devices[0]
        return
    local = create_device("nnburst-reference")
    yield local
    local.close()


@contextlib.contextmanager
def file_pool(direct: bool) -> Iterator[tuple[int, Memory]]:
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.truncate(2 * NBYTES)
        with Memory.mmap_fd(file.fileno(), 2 * NBYTES, direct=direct) as memory:
            yield file.fileno(), memory


def works(run: Callable[[], None], memory: Memory) -> bool:
    memory.write(np.full(COUNT, 4, np.float32))
    run()
    return bool((memory.read(np.float32, (COUNT,), NBYTES) == 5).all())


@contextlib.contextmanager
def ways_to_run(device: Device, memory: Memory, way: str) -> Iterator[Callable[[], None]]:
    """A function that runs the same request again; raises what the run says."""
    prepared = device.prepare_model(model())
    request = Request(*REQUEST, (memory,))
    try:
        if way == "sync":

            def run() -> None:
                status = prepared.execute_synchronously(request)[0]
                if status is not ErrorStatus.NONE:
                    raise NNBurstError(str(status), status=status)

            yield run
            return
        with ExecutionBurstController.create(prepared) as burst:
            yield burst.bind(request).run
    finally:
        prepared.close()


@pytest.mark.parametrize("size", [0, 4096, 2 * NBYTES - 1])
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("way", ["sync", "burst"])
def test_REQ_MEM_102_truncated_between_bind_and_run(device: Device, way: str, direct: bool, size: int) -> None:
    with file_pool(direct) as (fd, memory), ways_to_run(device, memory, way) as run:
        assert works(run, memory)
        os.ftruncate(fd, size)
        for _ in range(2):
            with pytest.raises(NNBurstError) as caught:
                run()
            assert caught.value.status is ErrorStatus.GENERAL_FAILURE
        assert os.fstat(fd).st_size == size, "the service made the file longer"
        with Memory.ashmem(2 * NBYTES) as other, ways_to_run(device, other, way) as bystander:
            assert works(bystander, other)
        os.ftruncate(fd, 2 * NBYTES)
        assert works(run, memory), "what was evicted is mapped anew"


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("way", ["sync", "burst"])
def test_REQ_MEM_102_truncated_during_runs(device: Device, way: str, direct: bool) -> None:
    seen: set[ErrorStatus] = set()
    with file_pool(direct) as (fd, memory), Memory.ashmem(2 * NBYTES) as calm:
        with ways_to_run(device, memory, way) as run, ways_to_run(device, calm, way) as bystander:

            def truncate() -> None:
                os.ftruncate(fd, 8192)
                os.ftruncate(fd, 2 * NBYTES)

            with meanwhile(truncate):
                for i in range(150):
                    try:
                        run()
                        seen.add(ErrorStatus.NONE)
                    except NNBurstError as error:
                        seen.add(error.status)
                    if i % 50 == 0:
                        assert works(bystander, calm)
            assert seen <= {ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE}
            os.ftruncate(fd, 2 * NBYTES)
            with contextlib.suppress(NNBurstError):
                run()  # may find the faults of before
            assert works(run, memory)


@pytest.mark.check
@pytest.mark.parametrize("way", ["sync", "burst"])
def test_REQ_MEM_114_control_values_rewritten_during_runs(device: Device, way: str) -> None:
    """Shapes, sizes and codes that a client rewrites at any moment never lead out of bounds."""
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (4, 16))
    begin, size = b.input("begin", T.TENSOR_INT32, (2,)), b.input("size", T.TENSOR_INT32, (2,))
    part = b.slice(x, begin, size, dimensions=(0, 0))
    b.output("y", b.reshape(part, b.input("shape", T.TENSOR_INT32, (2,)), dimensions=(0, 0)))
    prepared = device.prepare_model(b.build())
    with Memory.ashmem(4096) as memory:
        memory.array(np.float32, (64,))[:] = np.arange(64)
        control = memory.array(np.int32, (6,), 256)
        good = [0, 0, 4, 16, 16, 4]
        bad = [
            [3, 15, 1, 1, 1, 1],
            [0, 0, 1 << 30, 16, -1, 4],
            [-5, -5, 9, 99, 1 << 20, 1 << 20],
            [0, 0, -1, -1, 64, -1],
        ]
        request = Request(
            (argument(0, 256), argument(256, 8), argument(264, 8), argument(272, 8)), (argument(512, 256),), (memory,)
        )

        dice = np.random.default_rng(1)

        def scribble() -> None:
            for values in bad:
                control[dice.integers(6)] = values[dice.integers(6)]
                control[:] = values
            control[:] = good

        burst = ExecutionBurstController.create(prepared) if way == "burst" else None

        def run() -> Any:
            if burst is None:
                return prepared.execute_synchronously(request)[0]
            try:
                return burst.compute(request)[0]
            except NNBurstError as error:
                return error.status

        with meanwhile(scribble):
            seen = {run() for _ in range(400)}
        assert seen <= {
            ErrorStatus.NONE,
            ErrorStatus.GENERAL_FAILURE,
            ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
            ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
        }
        control[:] = good
        assert run() is ErrorStatus.NONE
        assert memory.array(np.float32, (64,), 512).tolist() == list(range(64))
        if burst is not None:
            burst.close()


def maps_of_service(service: ServiceConnection, name: str) -> list[str]:
    with open(f"/proc/{service.pid}/maps") as file:
        return [line.split()[1] for line in file if name in line]


def test_the_service_maps_inputs_read_only_and_unsealed_files_not_at_all(service: ServiceConnection) -> None:
    prepared = service.devices[0].prepare_model(model())
    with (
        Memory.ashmem(NBYTES, "nnburst-input") as source,
        Memory.ashmem(NBYTES, "nnburst-output") as target,
        tempfile.NamedTemporaryFile(prefix="nnburst-staged", dir="/var/tmp") as file,
    ):
        file.truncate(2 * NBYTES)
        with ExecutionBurstController.create(prepared) as burst:
            arguments = (argument(0, NBYTES),), (argument(0, NBYTES, 1),)
            assert burst.compute(Request(*arguments, (source, target)))[0] is ErrorStatus.NONE
            assert maps_of_service(service, "nnburst-input") == ["r--s"]
            assert maps_of_service(service, "nnburst-output") == ["rw-s"]
            with Memory.mmap_fd(file.fileno(), 2 * NBYTES) as staged:
                assert burst.compute(Request(*REQUEST, (staged,)))[0] is ErrorStatus.NONE
                assert maps_of_service(service, "nnburst-staged") == []
            with Memory.mmap_fd(file.fileno(), 2 * NBYTES, direct=True) as direct:
                assert burst.compute(Request(*REQUEST, (direct,)))[0] is ErrorStatus.NONE
                assert maps_of_service(service, "nnburst-staged") == ["rw-s"]


# -- images -----------------------------------------------------------------------------------------------------------

I420 = ImageLayout(8, 4, FORMATS["I420"].fourcc, ((0, 8), (32, 4), (40, 4)))
NO_IMAGE = {
    "one plane": {"planes": ((0, 8),)},
    "offset that wraps": {"planes": ((0, 8), (2**64 - 8, 4), (40, 4))},
    "too wide": {"width": 1 << 31},
    "stride that wraps": {"layers": 2, "layer_stride": 2**63},
}
"""What contradicts itself in other ways is refused by the same check: `test_memory_doors.py`."""
BEYOND_ITS_OBJECT = {
    "far offset": {"planes": ((0, 8), (32, 4), ((1 << 47) - 1, 4))},
    "long pitch": {"planes": ((64, (1 << 47) - 1), (32, 4), (40, 4))},
    "many layers": {"layers": 1 << 16, "layer_stride": (1 << 47) - 1},
    "last byte": {"planes": ((0, 8), (32, 4), (49, 4))},
}


@pytest.mark.parametrize("unsealed", [False, True], ids=["mapped", "staged"])
@pytest.mark.parametrize("case", [*NO_IMAGE, *BEYOND_ITS_OBJECT])
def test_layout_of_an_image_that_lies_fails_alone(service: ServiceConnection, case: str, unsealed: bool) -> None:
    """The client's own checks are left out: the service has to find it."""
    b = ModelBuilder()
    b.output("y", b.relu(b.input("x", T.TENSOR_QUANT8_ASYMM, (1, 6, 8, 1), scale=1.0, zero_point=0)))
    prepared = service.devices[0].prepare_model(b.build())
    sealed = Memory.ashmem(48)
    fds = FdSet([os.memfd_create("nnburst-lie")] if unsealed else [os.dup(sealed.fds[0])])
    sealed.close()
    os.pwrite(fds.fds[0], bytes(range(48)), 0)
    changes = (NO_IMAGE | BEYOND_ITS_OBJECT)[case]
    lie = Memory(MemoryHandle("hardware_buffer", 0, image=replace(I420, **changes)), fds, 3)
    with lie, Memory.from_image(fds.fds[0], I420) as good, Memory.ashmem(48) as target:

        def statuses(image: Memory) -> set[ErrorStatus]:
            """As an input, then as an output; alone and in a burst."""
            found = set()
            for pools in ((image, target), (target, image)):
                ends = tuple(argument(0, 0 if pool is image else 48, i) for i, pool in enumerate(pools))
                request = Request(ends[:1], ends[1:], pools)
                with ExecutionBurstController.create(prepared) as burst:
                    for run in (prepared.execute_synchronously, burst.compute):
                        try:
                            found.add(run(request)[0])
                        except NNBurstError as error:
                            found.add(error.status)
            return found

        expected = {ErrorStatus.INVALID_ARGUMENT}
        if case in BEYOND_ITS_OBJECT:
            expected = {ErrorStatus.GENERAL_FAILURE, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT}
        assert statuses(lie) <= expected
        assert os.pread(fds.fds[0], 64, 0) == bytes(range(48))
        assert statuses(good) == {ErrorStatus.NONE}
        assert target.read(np.uint8, (48,)).tolist() == list(range(48))


def test_pool_that_is_closed_while_it_is_bound_is_named() -> None:
    """In process, where the listener meets the closed pool first: its status becomes an error that names it."""
    prepared = create_device("nnburst-reference").prepare_model(model())
    with file_pool(False) as (_, memory), ExecutionBurstController.create(prepared) as burst:
        execution = burst.bind(Request(*REQUEST, (memory,)))
        execution.run()
        memory.close()
        with pytest.raises(BadState, match="memory of input 0 is closed"):
            execution.run()
