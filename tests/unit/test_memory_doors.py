"""Ways in and out of a pool without a copy, named memory, blobs and images."""

from __future__ import annotations

import fcntl
import gc
import glob
import mmap
import os
import pickle
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst.errors import BadState, GeneralFailure, InvalidArgument
from nnburst.memory import BACKINGS, FORMATS, PROT_READ, ImageLayout, Memory, backings, check_layout
from nnburst.testing import assert_nothing_left

PAGE = mmap.PAGESIZE
NAME = f"nnburst-doors-{os.getpid()}"


@pytest.fixture
def read_only() -> Iterator[Memory]:
    with Memory.ashmem(64) as whole, Memory.mmap_fd(whole.fds[0], 64, prot=PROT_READ) as memory:
        whole.array("u1", (64,))[:] = 7
        yield memory


def mapped(name: str) -> int:
    with open("/proc/self/maps") as file:
        return sum(name in line for line in file)


DOORS = {
    "array": lambda memory: memory.array("u1", (memory.size,)),
    "buffer": lambda memory: memory.buffer,
    "asarray": np.asarray,
    "dlpack": np.from_dlpack,
}
if sys.version_info >= (3, 12):
    DOORS["memoryview"] = memoryview


@pytest.mark.parametrize("door", DOORS)
def test_REQ_MEM_116_views_share_the_bytes_and_outlive_the_pool(door: str) -> None:
    memory = Memory.ashmem(3 * PAGE, "nnburst-door")
    own = memory.array("u1", (3 * PAGE,))
    view = DOORS[door](memory)
    own[5] = 9
    assert view[5] == 9
    if np.asarray(view).flags.writeable:
        np.asarray(view)[6] = 8
        assert own[6] == 8
    memory.close()
    del memory, own
    gc.collect()
    assert view[5] == 9
    assert mapped("memfd:nnburst-door") == 1
    del view
    gc.collect()
    assert mapped("memfd:nnburst-door") == 0


@pytest.mark.parametrize("door", [door for door in DOORS if door != "dlpack"])
def test_REQ_MEM_116_read_only_pools_export_read_only(read_only: Memory, door: str) -> None:
    view = DOORS[door](read_only)
    assert view[0] == 7
    assert not np.asarray(view).flags.writeable
    with pytest.raises((TypeError, ValueError)):
        view[0] = 1


def test_REQ_MEM_116_dlpack_of_a_read_only_pool_is_read_only_or_refused(read_only: Memory) -> None:
    with pytest.raises(BufferError):
        read_only.__dlpack__()  # the old protocol cannot say that nobody may write
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        view = np.from_dlpack(read_only)
        assert view[0] == 7
        assert not view.flags.writeable
    assert read_only.__dlpack_device__() == (1, 0)


def test_asarray_with_a_dtype_copies_or_refuses() -> None:
    with Memory.ashmem(4) as memory:
        wide = np.array(memory, dtype=np.int32)
        assert wide.shape == (4,)
        with pytest.raises(ValueError, match="array"):
            memory.__array__(np.int32, copy=False)
        copied = memory.__array__(copy=True)
        copied[0] = 1
        assert memory.buffer[0] == 0


@pytest.mark.parametrize("door", DOORS)
def test_doors_of_a_closed_pool_are_closed(door: str) -> None:
    memory = Memory.ashmem(64)
    memory.close()
    with pytest.raises(BadState):
        DOORS[door](memory)


# -- sources -----------------------------------------------------------------------------------------------------------


def test_shared_memory_of_multiprocessing_is_a_source_without_a_copy() -> None:
    shared = shared_memory.SharedMemory(create=True, size=PAGE, name=f"{NAME}-mp")
    try:
        with Memory.from_shared_memory(shared) as memory:
            assert (memory.kind, memory.size, memory.mappable) == ("posix_shm", shared.size, False)
            shared.buf[3] = 5
            assert memory.buffer[3] == 5
            assert memory.read("u1", (1,), 3)[0] == 5
            shared.close()
            assert memory.read("u1", (1,), 3)[0] == 5
        with pytest.raises(InvalidArgument, match="closed"):
            Memory.from_shared_memory(shared)
    finally:
        shared.unlink()


@pytest.mark.parametrize("offset", [0, PAGE])
@pytest.mark.parametrize("access", [mmap.ACCESS_WRITE, mmap.ACCESS_READ])
def test_mmap_is_a_source_with_its_offset_and_rights(offset: int, access: int) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * PAGE)
        with mmap.mmap(file.fileno(), PAGE, access=access, offset=offset) as source:
            with Memory.from_mmap(source) as memory:
                os.pwrite(file.fileno(), b"abc", offset)
                assert (memory.offset, memory.size) == (offset, PAGE)
                assert bytes(memory.buffer[:3]) == b"abc"
                assert memory.buffer.readonly == (access == mmap.ACCESS_READ)


def test_mmap_is_told_from_another_object_of_the_same_name() -> None:
    fds = [os.memfd_create("twin", 0) for _ in range(2)]
    for fd, content in zip(fds, (b"one", b"two"), strict=True):
        os.ftruncate(fd, PAGE)
        os.pwrite(fd, content, 0)
    for fd, content in zip(fds, (b"one", b"two"), strict=True):
        with mmap.mmap(fd, PAGE) as source, Memory.from_mmap(source) as memory:
            assert bytes(memory.buffer[:3]) == content
    for fd in fds:
        os.close(fd)


def test_mmap_that_nobody_else_could_see_is_no_source() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        with mmap.mmap(file.fileno(), PAGE, access=mmap.ACCESS_COPY) as private:
            with pytest.raises(InvalidArgument, match="private"):
                Memory.from_mmap(private)
    with mmap.mmap(-1, PAGE) as anonymous, pytest.raises(InvalidArgument):
        Memory.from_mmap(anonymous)
    with pytest.raises(InvalidArgument):
        Memory.from_mmap(anonymous)


def test_an_array_in_a_pool_is_a_source_and_any_other_is_not() -> None:
    with Memory.ashmem(4096) as pool:
        part = pool.array(np.float32, (8, 4), 64)[2:4]
        with Memory.from_dlpack(part) as memory:
            part[:] = 3
            assert (memory.offset, memory.size) == (64 + 32, 32)
            assert memory.array(np.float32, (8,)).tolist() == [3.0] * 8
        for wrong in (part[:, ::2], np.zeros(8), part[:0], "no array"):
            with pytest.raises(InvalidArgument):
                Memory.from_dlpack(wrong)
    with pytest.raises(InvalidArgument, match="open pool"):
        Memory.from_dlpack(part)


def test_array_in_a_pool_that_begins_within_its_object_is_found_behind_that() -> None:
    with Memory.ashmem(3 * PAGE) as whole, Memory.mmap_fd(whole.fds[0], 2 * PAGE, offset=PAGE) as pool:
        part = pool.array(np.uint8, (16,), PAGE)
        with Memory.from_dlpack(part) as memory:
            part[:] = 7
            assert memory.offset == 2 * PAGE
            assert memory.array(np.uint8, (16,)).tolist() == [7] * 16


# -- named -------------------------------------------------------------------------------------------------------------


def test_named_memory_is_created_attached_and_unlinked() -> None:
    with Memory.posix_shm(NAME, 5000) as made:
        try:
            assert os.stat(f"/dev/shm/{NAME}").st_mode & 0o777 == 0o600
            with Memory.posix_shm("/" + NAME) as found:
                assert (found.size, found.identity) == (5000, made.identity)
                made.write(b"\x07", 4999)
                assert found.read("u1", (1,), 4999)[0] == 7
                assert not found.sealed
                assert not found.mappable, "it cannot be sealed"
            with pytest.raises(InvalidArgument, match="exists"):
                Memory.posix_shm(NAME, 10)
        finally:
            Memory.unlink_posix_shm(NAME)
        assert made.read("u1", (1,), 4999)[0] == 7
    for call in (Memory.posix_shm, Memory.unlink_posix_shm):
        with pytest.raises(InvalidArgument, match="does not exist"):
            call(NAME)
    for name in ("", "/", "a/b", "x" * 300, "a\0b"):
        with pytest.raises(InvalidArgument):
            Memory.posix_shm(name, 10)


# -- blobs -------------------------------------------------------------------------------------------------------------


def test_name_that_is_not_removed_is_a_leak_of_the_process_that_made_it() -> None:
    other = Path(f"/dev/shm/{NAME}-nnburst-of-another")
    try:
        with pytest.raises(AssertionError, match=f"left behind: file /dev/shm/{NAME}-left$"):
            with assert_nothing_left(timeout=0):
                other.touch()
                Memory.posix_shm(f"{NAME}-left", PAGE).close()
        Memory.unlink_posix_shm(f"{NAME}-left")
    finally:
        other.unlink()


def test_blob_says_what_it_was_made_from_and_cannot_be_truncated() -> None:
    with Memory.hardware_buffer_blob(5000) as memory:
        assert memory.backing in BACKINGS
        assert (memory.kind, memory.size, memory.mappable) == ("hardware_buffer_blob", 5000, True)
        memory.array("u1", (5000,))[:] = 1
        with pytest.raises(OSError):
            os.ftruncate(memory.fds[0], 0)
        with Memory.from_handle(memory.handle, [os.dup(memory.fds[0])]) as other:
            assert other.backing == memory.backing
            assert other.array("u1", (5000,)).sum() == 5000


def free_huge_pages() -> int:
    with open("/proc/meminfo") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("HugePages_Free:")), 0)


def may_open(path: str) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


AVAILABLE: dict[str, Callable[[], bool]] = {
    "dma-heap": lambda: any(map(may_open, glob.glob("/dev/dma_heap/*"))),
    "udmabuf": lambda: may_open("/dev/udmabuf"),
    "hugetlb": lambda: free_huge_pages() > 0,
    "memfd": lambda: True,
}


@pytest.mark.parametrize("backing", BACKINGS)
def test_a_backing_is_given_exactly_if_the_machine_has_it(backing: str) -> None:
    if not AVAILABLE[backing]():
        with pytest.raises(GeneralFailure, match=rf"no buffer of 5000 bytes could be made \({backing}: "):
            Memory.hardware_buffer_blob(5000, backing=backing)
        return
    with Memory.hardware_buffer_blob(5000, backing=backing) as memory:
        assert (memory.backing, memory.mappable) == (backing, True)
        memory.write(np.ones(5000, np.uint8))
        assert memory.read("u1", (5000,)).sum() == 5000


def test_a_dma_heap_is_asked_for_whole_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There may be no heap on this machine: a file stands for it, a memfd for what it gives."""
    given, asked = os.memfd_create("dma"), []

    def ioctl(fd: int, code: int, request: bytearray) -> int:
        asked.append((os.readlink(f"/proc/self/fd/{fd}"), code, struct.unpack("=QIIQ", request)))
        request[:] = struct.pack("=QIIQ", 0, given, 0, 0)
        return 0

    (tmp_path / "reserved").touch()
    (tmp_path / "system").touch()
    monkeypatch.setattr(glob, "glob", lambda pattern: [str(tmp_path / "reserved"), str(tmp_path / "system")])
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    before = set(os.listdir("/proc/self/fd"))
    assert backings.allocate(PAGE + 1, "dma-heap") == (given, "dma-heap")
    assert backings.allocate(1, None) == (given, "dma-heap")
    wanted = os.O_RDWR | os.O_CLOEXEC
    assert asked == [(str(tmp_path / "system"), 0xC0184800, (pages, 0, wanted, 0)) for pages in (2 * PAGE, PAGE)]
    assert set(os.listdir("/proc/self/fd")) == before
    os.close(given)


def test_udmabuf_is_given_a_memfd_that_cannot_shrink(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, given, asked = os.open, os.memfd_create("dma"), []
    (tmp_path / "maker").touch()

    def ioctl(fd: int, code: int, request: bytes) -> int:
        memfd, flags, offset, size = struct.unpack("=IIQQ", request)
        asked.append((code, flags, offset, size, os.fstat(memfd).st_size, fcntl.fcntl(memfd, fcntl.F_GET_SEALS)))
        return given

    maker = str(tmp_path / "maker")
    monkeypatch.setattr(os, "open", lambda path, *rest: real(maker if path == "/dev/udmabuf" else path, *rest))
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    before = set(os.listdir("/proc/self/fd"))
    assert backings.allocate(PAGE + 1, "udmabuf") == (given, "udmabuf")
    assert asked == [(0x40187542, 1, 0, 2 * PAGE, 2 * PAGE, fcntl.F_SEAL_SHRINK)]
    assert set(os.listdir("/proc/self/fd")) == before
    os.close(given)


def test_unknown_backings_and_sizes_are_refused() -> None:
    for size, backing in ((10, "gold"), (0, None), (-1, "memfd")):
        with pytest.raises(InvalidArgument):
            Memory.hardware_buffer_blob(size, backing=backing)


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unsealed", [False, True], ids=["mapped", "staged"])
@pytest.mark.parametrize("pitch", [0, 71])
@pytest.mark.parametrize("name", FORMATS)
def test_images_are_tensors_of_r_g_b_and_alpha(name: str, pitch: int, unsealed: bool) -> None:
    with Memory.hardware_buffer(8, 4, name, layers=3, pitch=pitch) as memory:
        if unsealed:
            fd = os.memfd_create("nnburst-image")
            os.ftruncate(fd, memory.span)
            memory = Memory.from_image(fd, memory.image)  # type: ignore[arg-type]
            os.close(fd)
        with memory:
            layout = memory.image
            assert layout is not None
            assert memory.mappable is not unsealed
            planes = memory.planes()
            for plane in planes:
                plane[...] = np.arange(plane.size).reshape(plane.shape) % 251
            tensor = memory.read(layout.dtype, layout.shape)
            if name == "NV12":
                assert tensor.shape == (3, 6, 8, 1)
                np.testing.assert_array_equal(tensor[:, :4], planes[0])
                np.testing.assert_array_equal(tensor[:, 4:].reshape(3, 2, 4, 2), planes[1])
            else:
                order = [2, 1, 0, 3][: planes[0].shape[-1]] if name.startswith("BGR") else slice(None)
                np.testing.assert_array_equal(tensor, planes[0][..., order])
            gaps = memory_bytes(memory)
            memory.write(tensor * 0)
            assert not memory.read(layout.dtype, layout.shape).any()
            memory.write(tensor)
            np.testing.assert_array_equal(memory_bytes(memory), gaps)
            assert layout.tight_size == tensor.nbytes


def memory_bytes(memory: Memory) -> Any:
    raw = os.pread(memory.fds[0], memory.span, 0)
    return np.frombuffer(raw, np.uint8)


@pytest.mark.parametrize(
    "change",
    [
        {"width": 0},
        {"height": 1 << 17},
        {"layers": 0},
        {"planes": ()},
        {"planes": ((0, 23),)},
        {"planes": ((-1, 64),)},
        {"planes": ((0, 64), (512, 64))},
        {"planes": ((0, 1 << 60),)},
        {"layer_stride": 100},
        {"fourcc": 1 << 32},
        {"modifier": -1},
    ],
    ids=str,
)
def test_layouts_that_contradict_themselves_are_refused(change: dict[str, Any]) -> None:
    good = ImageLayout(8, 4, FORMATS["RGB"].fourcc, ((0, 64),), 2, 256)
    check_layout(good)
    with pytest.raises(InvalidArgument):
        check_layout(replace(good, **change))


def test_nv12_needs_even_sides_and_planes_that_do_not_overlap() -> None:
    for width, height in ((7, 4), (8, 5), (7, 5)):
        with pytest.raises(InvalidArgument, match="even"):
            Memory.hardware_buffer(width, height, "NV12")
    with pytest.raises(InvalidArgument, match="plane begins"):
        check_layout(ImageLayout(8, 4, FORMATS["NV12"].fourcc, ((0, 8), (31, 8))))
    with pytest.raises(InvalidArgument, match="unknown"):
        Memory.hardware_buffer(8, 4, "CMYK")


def test_an_image_has_no_addressable_bytes_and_pickles() -> None:
    with Memory.hardware_buffer(8, 4, "RGB") as memory:
        assert memory.size == 0
        for look in (lambda: memory.buffer, lambda: memory.array("u1", (1,)), lambda: memory.read("u1", (1,))):
            with pytest.raises(InvalidArgument):
                look()
        assert pickle.loads(pickle.dumps(memory.handle)) == memory.handle
