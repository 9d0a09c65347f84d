"""REQ-MEM-051 … 055 and 102 … 107: every kind of memory, on every device, with and without a burst."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst import Memory, Model, ModelBuilder
from nnburst.burst import ExecutionBurstController
from nnburst.devices import Device
from nnburst.errors import ErrorStatus, InvalidArgument
from nnburst.memory import FORMATS, ImageLayout
from nnburst.memory.kinds import PROT_READ, PROT_WRITE
from nnburst.model import Request
from nnburst.model.types import DataLocation
from support import images
from support.memory_kinds import ADDEND, COUNT, KINDS, NBYTES, argument, sum_model, sum_request
from support.samples import WAYS, T, execute

pytestmark = pytest.mark.parametrize("way", WAYS)

GIB4 = 1 << 32


def maps_of(name: str, pid: int | str = "self") -> list[str]:
    """Rights of the mappings whose file has a name."""
    with open(f"/proc/{pid}/maps") as file:
        return [line.split()[1] for line in file if name in line]


# -- each kind ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_REQ_MEM_033_055_103_every_kind_shows_what_is_written_later(device: Device, way: str, kind: str) -> None:
    """The request is bound once, every run fetches the input anew."""
    prepared = device.prepare_model(sum_model())
    make, mappable = KINDS[kind]
    with make(2 * NBYTES) as memory, ExecutionBurstController.create(prepared) as burst:
        assert memory.mappable is mappable
        request = sum_request(memory)
        run = burst.bind(request).run if way == "burst" else lambda: prepared.execute_synchronously(request)
        for value in range(3):
            memory.write(np.full(COUNT, value, np.float32))
            run()
            assert memory.read(np.float32, (COUNT,), NBYTES).tolist() == (ADDEND + value).tolist()


def weights_model(pool: Memory, offsets: tuple[int, int]) -> Model:
    """y = (x + a) + b with both constants in one pool."""
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (COUNT,))
    first, second = (b.constant(np.zeros(COUNT, np.float32)) for _ in range(2))
    b.output("y", b.add(b.add(x, first), second))
    model = b.build()
    operands = list(model.main.operands)
    places = iter(offsets)
    for index, operand in enumerate(operands):
        if operand.location.length == NBYTES:
            operands[index] = replace(operand, location=DataLocation(0, next(places), NBYTES))
    return replace(model, main=replace(model.main, operands=tuple(operands)), pools=(pool,))


@pytest.mark.parametrize("kind", KINDS)
def test_REQ_MEM_051_052_weights_in_memory_of_every_kind(device: Device, way: str, kind: str) -> None:
    offsets = (20, 20 + NBYTES + 180)
    with KINDS[kind][0](4096) as weights, Memory.ashmem(2 * NBYTES) as memory:
        for factor, at in enumerate(offsets, 1):
            weights.write(ADDEND * factor, at)
        model = weights_model(weights, offsets)
        assert device.get_supported_operations(model) == (True, True)
        prepared = device.prepare_model(model)
        weights.write(np.zeros(1024, np.float32))  # copied when prepared: nobody sees this
    with Memory.ashmem(2 * NBYTES) as memory:
        assert execute(prepared, sum_request(memory), way).status is ErrorStatus.NONE
        assert memory.read(np.float32, (COUNT,), NBYTES).tolist() == (ADDEND * 3).tolist()


def test_REQ_MEM_051_weights_from_a_plain_file_opened_for_reading(device: Device, way: str, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    raw = np.zeros(600, np.uint8)
    raw[20 : 20 + NBYTES] = ADDEND.view(np.uint8)
    raw[300 : 300 + NBYTES] = (ADDEND * 10).view(np.uint8)
    path.write_bytes(raw.tobytes())
    with open(path, "rb") as file, Memory.mmap_fd(file.fileno(), 600, prot=PROT_READ) as weights:
        prepared = device.prepare_model(weights_model(weights, (20, 300)))
    path.unlink()
    with Memory.ashmem(2 * NBYTES) as memory:
        assert execute(prepared, sum_request(memory), way).status is ErrorStatus.NONE
        assert memory.read(np.float32, (COUNT,), NBYTES).tolist() == (ADDEND * 11).tolist()


def test_REQ_MEM_053_shared_memory_with_gaps_and_a_misaligned_region(device: Device, way: str) -> None:
    before = maps_of("memfd:nnburst-lonely")
    with (
        Memory.ashmem(2048, "nnburst-lonely") as weights,
        Memory.ashmem(2048, "nnburst-lonely") as source,
        Memory.ashmem(2048, "nnburst-lonely") as target,
    ):
        weights.write(ADDEND, 98)
        weights.write(ADDEND, 98 + NBYTES)
        prepared = device.prepare_model(weights_model(weights, (98, 98 + NBYTES)))
        source.write(np.ones(COUNT, np.float32), 21)
        with Memory.mmap_fd(source.fds[0], 1024, prot=PROT_READ) as read_only:
            request = Request((argument(21),), (argument(33, pool=1),), (read_only, target))
            assert execute(prepared, request, way).status is ErrorStatus.NONE
        assert target.read(np.float32, (COUNT,), 33).tolist() == (ADDEND * 2 + 1).tolist()
        prepared.close()
    assert maps_of("memfd:nnburst-lonely") == before


def test_REQ_MEM_054_scratch_beyond_all_memory_fails_and_leaks_nothing(device: Device, way: str) -> None:
    b = ModelBuilder()
    width = 1 << 24
    x = b.input("x", T.TENSOR_FLOAT32, (1, 1, width, 1))
    # One row of windows would take 512 TiB, more than there are addresses: no machine tries to serve it.
    b.output("y", b.conv_2d(x, np.ones((1, 1024, 8192, 1), np.float32), padding="same"))
    prepared = device.prepare_model(b.build())
    size = 4 * width
    with Memory.ashmem(2 * size, "nnburst-large") as memory:
        outcome = execute(prepared, Request((argument(0, size),), (argument(size, size),), (memory,)), way)
        assert outcome.status in (ErrorStatus.GENERAL_FAILURE, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT)
        assert outcome.shapes == ()
    del memory
    prepared.close()
    assert maps_of("memfd:nnburst-large") == []


# -- images ---------------------------------------------------------------------------------------------------------


def image_model(shape: tuple[int, ...]) -> Model:
    """y is x, but at least 100."""
    b = ModelBuilder()
    b.output("y", b.relu(b.input("x", T.TENSOR_QUANT8_ASYMM, shape, scale=0.5, zero_point=100)))
    return b.build()


@pytest.mark.parametrize(("width", "height"), [(8, 6), (7, 5)])
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("name", [name for name in FORMATS if images.BYTES.get(name, 1) == 1])
def test_images_are_inputs_and_outputs_as_a_whole(
    device: Device, way: str, name: str, tight: bool, width: int, height: int
) -> None:
    pitch = width * len(images.CHANNELS.get(name, "Y")) * images.BYTES.get(name, 1) if tight else 0
    with (
        Memory.hardware_buffer(width, height, name, layers=2, pitch=pitch) as frame,
        Memory.hardware_buffer(width, height, name, layers=2, pitch=pitch) as result,
    ):
        layout = frame.image
        assert layout is not None
        assert layout.is_tensor is (tight and name not in ("BGR", "BGRA"))
        prepared = device.prepare_model(image_model(layout.shape))
        raw = np.random.default_rng(5).bytes(frame.span)
        os.pwrite(frame.fds[0], raw, 0)
        values = np.array(images.decode(name, layout, raw), np.uint8).reshape(layout.shape)
        expected = np.maximum(values, 100)
        request = Request((argument(0, 0),), (argument(0, 0, 1),), (frame, result))
        assert execute(prepared, request, way).status is ErrorStatus.NONE
        written = os.pread(result.fds[0], result.span, 0)
        assert images.decode(name, layout, written) == expected.reshape(-1).tolist()
        for bad in (argument(0, values.nbytes), argument(1, 0), argument(0, 0, dims=(*layout.shape[:3], 5))):
            outcome = execute(prepared, replace(request, inputs=(bad,)), way)
            assert outcome.status is ErrorStatus.INVALID_ARGUMENT
        with Memory.hardware_buffer(width, height + 2, name, layers=2) as larger:
            outcome = execute(prepared, replace(request, pools=(larger, result)), way)
            assert outcome.status is ErrorStatus.INVALID_ARGUMENT
        for same in ((0, 0), (1, 1)):
            overlapping = replace(request, pools=tuple((frame, result)[i] for i in same))
            assert execute(prepared, overlapping, way).status is ErrorStatus.INVALID_ARGUMENT


def test_planes_and_frames_of_one_ring_are_told_apart(device: Device, way: str) -> None:
    """Frames of a camera lie behind each other in one object; each, and each plane of it, has its own bytes only."""
    size = 16 * 4 * 3 // 2
    b = ModelBuilder()
    luma = b.input("luma", T.TENSOR_QUANT8_ASYMM, (1, 4, 16, 1), scale=1.0, zero_point=0)
    chroma = b.input("chroma", T.TENSOR_QUANT8_ASYMM, (1, 2, 8, 2), scale=1.0, zero_point=0)
    b.output("y", b.relu(luma))
    b.output("c", b.relu(chroma))
    prepared = device.prepare_model(b.build())
    raw = np.random.default_rng(2).integers(0, 256, 3 * size, np.uint8)
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(Memory.ashmem(3 * size))
        ring.write(raw)
        frames = []
        for slot in range(3):
            planes = ((slot * size, 16), (slot * size + 64, 16))
            layout = ImageLayout(16, 4, FORMATS["NV12"].fourcc, planes)
            frames.append(stack.enter_context(Memory.from_image(ring.fds[0], layout)))
        pools = tuple(stack.enter_context(frames[slot].plane_memory(i)) for slot in (1, 2) for i in (0, 1))
        arguments = tuple(argument(0, 0, i) for i in range(4))
        request = Request(arguments[:2], arguments[2:], pools)
        assert execute(prepared, request, way).status is ErrorStatus.NONE
        now = ring.read(np.uint8, (3, size))
        assert now[:2].tobytes() == raw[: 2 * size].tobytes()
        assert now[2].tobytes() == now[1].tobytes()
        into_itself = replace(request, pools=(*pools[:2], pools[2], pools[1]))
        assert execute(prepared, into_itself, way).status is ErrorStatus.INVALID_ARGUMENT


def test_image_that_was_exported_for_reading_is_an_input_only(device: Device, way: str) -> None:
    prepared = device.prepare_model(image_model((1, 4, 8, 1)))
    for pitch in (8, 16):
        with Memory.hardware_buffer(8, 4, "GRAY8", pitch=pitch) as frame, Memory.ashmem(32) as target:
            assert frame.image is not None
            values = np.arange(90, 122, dtype=np.uint8)
            frame.write(values)
            fd = os.open(f"/proc/self/fd/{frame.fds[0]}", os.O_RDONLY)
            try:
                image = Memory.from_image(fd, frame.image, prot=PROT_READ)
            finally:
                os.close(fd)
            with image:
                (pixels,) = image.planes()
                assert not pixels.flags.writeable
                request = Request((argument(0, 0),), (argument(0, 32, 1),), (image, target))
                assert execute(prepared, request, way).status is ErrorStatus.NONE
                assert target.read(np.uint8, (32,)).tolist() == np.maximum(values, 100).tolist()
                written = Request((argument(0, 32, 1),), (argument(0, 0),), (image, target))
                assert execute(prepared, written, way).status is ErrorStatus.INVALID_ARGUMENT


def test_float_images_and_images_beyond_their_object(device: Device, way: str) -> None:
    shape = (1, 4, 4, 4)
    b = ModelBuilder()
    b.output("y", b.relu(b.input("x", T.TENSOR_FLOAT16, shape)))
    prepared = device.prepare_model(b.build())
    values = np.linspace(-1, 1, 64).astype(np.float16).reshape(shape)
    with Memory.hardware_buffer(4, 4, "FP16") as frame, Memory.ashmem(128) as target:
        frame.write(values)
        request = Request((argument(0, 0),), (argument(0, 128, 1),), (frame, target))
        assert execute(prepared, request, way).status is ErrorStatus.NONE
        np.testing.assert_array_equal(target.read(np.float16, shape), np.maximum(values, 0))
        assert frame.image is not None
        pitch = frame.image.planes[0][1]
        with Memory.from_image(frame.fds[0], replace(frame.image, planes=((1 << 20, pitch),))) as odd:
            outcome = execute(prepared, replace(request, pools=(odd, target)), way)
            assert outcome.status is ErrorStatus.GENERAL_FAILURE


def test_REQ_MEM_059_an_image_is_never_a_constant(device: Device, way: str) -> None:
    with Memory.hardware_buffer(16, 16, "RGBA") as image:
        for call in (device.prepare_model, device.get_supported_operations):
            with pytest.raises(InvalidArgument):
                call(replace(sum_model(), pools=(image,)))


# -- rights and objects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "prot"),
    [("input", 0), ("input", PROT_WRITE), ("output", 0), ("output", PROT_READ), ("output", PROT_WRITE)],
)
@pytest.mark.parametrize("kind", ["sealed", "file"])
def test_REQ_MEM_104_rights_that_do_not_cover_the_use(
    device: Device, way: str, kind: str, place: str, prot: int
) -> None:
    prepared = device.prepare_model(sum_model())
    with Memory.ashmem(NBYTES) as good, tempfile.TemporaryFile() as file:
        file.truncate(NBYTES)
        fd = good.fds[0] if kind == "sealed" else file.fileno()
        with Memory.mmap_fd(fd, NBYTES, prot=prot) as bad, Memory.ashmem(NBYTES) as other:
            pools = (bad, other) if place == "input" else (other, bad)
            outcome = execute(prepared, Request((argument(),), (argument(pool=1),), pools), way)
            assert outcome.status is ErrorStatus.INVALID_ARGUMENT


def _pipe(path: Path) -> int:
    os.mkfifo(path / "pipe")
    return os.open(path / "pipe", os.O_RDWR)


def _written_only(path: Path) -> int:
    fd = os.open(path / "file", os.O_WRONLY | os.O_CREAT)
    os.ftruncate(fd, 1 << 16)
    return fd


NO_MEMORY: dict[str, Callable[[Path], int]] = {
    "directory": lambda path: os.open(path, os.O_RDONLY),
    "pipe": _pipe,
    "socket": lambda path: socket.socket(socket.AF_UNIX).detach(),
    "eventfd": lambda path: os.eventfd(0),
    "device": lambda path: os.open("/dev/zero", os.O_RDWR),
    "path": lambda path: os.open(path, os.O_PATH),
    "write-only": _written_only,
    "file of the kernel": lambda path: os.open("/proc/self/status", os.O_RDONLY),
}


@pytest.mark.parametrize("what", NO_MEMORY)
def test_REQ_MEM_104_what_cannot_be_mapped_is_a_general_failure(
    device: Device, way: str, what: str, tmp_path: Path
) -> None:
    model = sum_model()
    prepared = device.prepare_model(model)
    fd = NO_MEMORY[what](tmp_path)
    with Memory.mmap_fd(fd, 4 * NBYTES) as odd, Memory.ashmem(2 * NBYTES) as memory:
        os.close(fd)
        request = sum_request(memory)
        for pools in ((odd,), (memory, odd)):
            outcome = execute(prepared, replace(request, pools=pools), way)
            assert (outcome.status, outcome.shapes) == (ErrorStatus.GENERAL_FAILURE, ())
        assert device.get_supported_operations(replace(model, pools=(odd,))) == (False,)
        assert execute(prepared, request, way).status is ErrorStatus.NONE


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_APPEND], ids=["read-only", "appending"])
def test_REQ_MEM_104_outputs_where_nothing_can_be_written(device: Device, way: str, flags: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * NBYTES))
    fd = os.open(path, flags)
    prepared = device.prepare_model(sum_model())
    with Memory.mmap_fd(fd, 2 * NBYTES) as memory:
        os.close(fd)
        assert execute(prepared, sum_request(memory), way).status is ErrorStatus.GENERAL_FAILURE
    assert path.stat().st_size == 2 * NBYTES


# -- 64 bits ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sparse(kind: str, size: int) -> Iterator[Memory]:
    if kind == "ashmem":
        with Memory.ashmem(size) as memory:
            yield memory
        return
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.truncate(size)
        with Memory.mmap_fd(file.fileno(), size) as memory:
            yield memory


@pytest.mark.parametrize("kind", ["ashmem", "file"])
@pytest.mark.parametrize("base", [GIB4 - NBYTES, GIB4 - 8, GIB4, GIB4 + 12])
def test_REQ_MEM_105_sparse_pools_beyond_4_gib(device: Device, way: str, kind: str, base: int) -> None:
    prepared = device.prepare_model(sum_model())
    with sparse(kind, GIB4 + 4096) as memory:
        memory.write(np.full(COUNT, 3, np.float32), base)
        if way == "sync":
            assert execute(prepared, sum_request(memory, base), way).status is ErrorStatus.NONE
            assert memory.read(np.float32, (COUNT,), base + NBYTES).tolist() == (ADDEND + 3).tolist()
            return
        # A packet of a burst has 32 bits for an offset: a part of the pool is a pool of its own.
        if base + NBYTES >= GIB4:
            with ExecutionBurstController.create(prepared) as burst, pytest.raises(InvalidArgument, match="mmap_fd"):
                burst.compute(sum_request(memory, base))
        with Memory.mmap_fd(memory.fds[0], 2 * NBYTES, offset=base) as part:
            assert execute(prepared, sum_request(part), way).status is ErrorStatus.NONE
        assert memory.read(np.float32, (COUNT,), base + NBYTES).tolist() == (ADDEND + 3).tolist()


@pytest.mark.parametrize("offset", [GIB4 - NBYTES + 1, GIB4, 2 * GIB4 - NBYTES, 2**63 - NBYTES, 2**64 - NBYTES])
def test_REQ_MEM_105_ends_that_wrap_in_32_or_64_bits_are_out_of_bounds(device: Device, way: str, offset: int) -> None:
    prepared = device.prepare_model(sum_model())
    with sparse("ashmem", GIB4) as memory:
        for request in (
            Request((argument(offset),), (argument(),), (memory,)),
            Request((argument(),), (argument(offset),), (memory,)),
        ):
            assert execute(prepared, request, way).status is ErrorStatus.INVALID_ARGUMENT


# -- overlap and lengths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ashmem", "mmap_fd of a file", "posix_shm"])
def test_REQ_MEM_106_outputs_overlap_nothing_also_through_two_descriptors(device: Device, way: str, kind: str) -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_FLOAT32, (COUNT,))
    b.output("y", b.add(x, ADDEND))
    b.output("z", b.mul(x, ADDEND))
    model = b.build()
    with KINDS[kind][0](4 * NBYTES) as memory:
        with Memory.mmap_fd(memory.fds[0], 4 * NBYTES - 16, offset=memory.offset + 16) as twin:
            model = replace(model, pools=(memory,), main=_constants_at(model, 0))
            prepared = device.prepare_model(model)

            def status(x: int, y: int, z: int, y_pool: int = 0) -> ErrorStatus:
                places = (argument(y, pool=y_pool), argument(z))
                return execute(prepared, Request((argument(x),), places, (memory, twin)), way).status

            n = NBYTES
            assert status(n, 2 * n, 3 * n) is ErrorStatus.NONE
            assert status(0, 2 * n, 3 * n) is ErrorStatus.NONE, "inputs and constants may overlap"
            assert status(n, 2 * n - 16, 3 * n, 1) is ErrorStatus.NONE
            for bad in (
                (n, 2 * n, 3 * n - 1, 0),  # output and output
                (n, 2 * n, 2 * n, 0),
                (n, 2 * n - 1, 3 * n, 0),  # output and input
                (n, n - 1, 2 * n, 0),  # output, constant and input
                (3 * n, n - 4, 2 * n, 0),  # output and constant
                (n, 3 * n - 20, 3 * n, 1),  # through the twin
                (n, n, 3 * n, 1),
            ):
                assert status(*bad) is ErrorStatus.INVALID_ARGUMENT, bad


def _constants_at(model: Model, offset: int):  # type: ignore[no-untyped-def]
    operands = tuple(
        replace(operand, location=DataLocation(0, offset, NBYTES)) if operand.location.length == NBYTES else operand
        for operand in model.main.operands
    )
    return replace(model.main, operands=operands)


def test_REQ_MEM_107_lengths_that_contradict_dimensions(device: Device, way: str) -> None:
    b = ModelBuilder()
    x, y = b.input("x", T.TENSOR_FLOAT32, (0, 4)), b.input("y", T.TENSOR_FLOAT32, (1, 4))
    b.output("z", b.add(x, y, activation=b.input("act", T.INT32, ()), dimensions=(0, 4)))
    prepared = device.prepare_model(b.build())
    with Memory.ashmem(512) as memory:
        good = Request(
            (argument(0, 32, dims=(2, 4)), argument(64, 16), argument(128, 4)), (argument(192, 32),), (memory,)
        )
        assert execute(prepared, good, way).status is ErrorStatus.NONE
        x_ok, y_ok, act_ok = good.inputs
        for inputs in (
            (argument(0, 31, dims=(2, 4)), y_ok, act_ok),
            (argument(0, 33, dims=(2, 4)), y_ok, act_ok),
            (argument(0, 0, dims=(2, 4)), y_ok, act_ok),
            (argument(0, 0), y_ok, act_ok),
            (argument(0, 32), y_ok, act_ok),
            (argument(0, 32, dims=(0, 4)), y_ok, act_ok),
            (argument(0, 32, dims=(2, 0)), y_ok, act_ok),
            (argument(0, 32, dims=(2, 2, 2)), y_ok, act_ok),
            (argument(0, 24, dims=(2, 3)), y_ok, act_ok),
            (x_ok, argument(64, 0), act_ok),
            (x_ok, y_ok, argument(128, 4, dims=(1,))),
            (x_ok, y_ok, argument(128, 8)),
        ):
            assert execute(prepared, replace(good, inputs=inputs), way).status is ErrorStatus.INVALID_ARGUMENT
        for output in (argument(192, 0), argument(192, 28, dims=(2, 4)), argument(480, 33)):
            outcome = execute(prepared, replace(good, outputs=(output,)), way)
            assert outcome.status is ErrorStatus.INVALID_ARGUMENT
