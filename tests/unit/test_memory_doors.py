"""Ways in and out of a pool without a copy, named memory, blobs and images."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nnburst import Memory
from nnburst._core._nnburst import lib
from nnburst.errors import BadState, InvalidArgument
from nnburst.memory import FORMATS, ImageLayout, descriptor
from nnburst.memory.descriptor import examine
from nnburst.memory.image import check_layout
from nnburst.memory.kinds import PROT_READ
from nnburst.memory.staging import open_request
from nnburst.model import Request
from nnburst.model.types import DataLocation, RequestArgument
from nnburst.testing import assert_nothing_left
from support import images
from support.processes import mappings

PAGE = mmap.PAGESIZE
NAME = f"nnburst-doors-{os.getpid()}"


@pytest.fixture
def read_only() -> Iterator[Memory]:
    with Memory.ashmem(64) as whole, Memory.mmap_fd(whole.fds[0], 64, prot=PROT_READ) as memory:
        whole.array("u1", (64,))[:] = 7
        yield memory


DOORS = {"array": lambda memory: memory.array("u1", (memory.size,)), "buffer": lambda memory: memory.buffer}
if sys.version_info >= (3, 12):
    DOORS["memoryview"] = memoryview


@pytest.mark.parametrize("door", DOORS)
def test_REQ_MEM_116_views_share_the_bytes_and_outlive_the_pool(door: str) -> None:
    memory = Memory.ashmem(3 * PAGE, "nnburst-door")
    assert mappings("memfd:nnburst-door") == 0, "not mapped before it is looked at"
    own = memory.array("u1", (3 * PAGE,))
    view = DOORS[door](memory)
    own[5] = 9
    assert view[5] == 9
    if np.asarray(view).flags.writeable:
        np.asarray(view)[6] = 8
        assert own[6] == 8
    memory.close()
    memory.close()
    del memory, own
    gc.collect()
    assert view[5] == 9
    assert mappings("memfd:nnburst-door") == 1
    del view
    gc.collect()
    assert mappings("memfd:nnburst-door") == 0


@pytest.mark.parametrize("door", DOORS)
def test_REQ_MEM_116_read_only_pools_export_read_only(read_only: Memory, door: str) -> None:
    view = DOORS[door](read_only)
    assert view[0] == 7
    assert not np.asarray(view).flags.writeable
    with pytest.raises((TypeError, ValueError)):
        view[0] = 1
    with pytest.raises(ValueError):
        np.asarray(view).flags.writeable = True


@pytest.mark.parametrize("door", DOORS)
def test_doors_of_a_closed_pool_are_closed(door: str) -> None:
    memory = Memory.ashmem(64)
    memory.close()
    with pytest.raises(BadState):
        DOORS[door](memory)


# -- named -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["posix_ipc", "/dev/shm"])
def test_named_memory_is_created_attached_and_unlinked(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "posix_ipc":
        pytest.importorskip("posix_ipc", reason="has no wheel for this Python")
    else:
        monkeypatch.setattr("nnburst._core.shm.posix_ipc", None)
    with Memory.posix_shm(NAME, 5000) as made:
        try:
            assert os.stat(f"/dev/shm/{NAME}").st_mode & 0o777 == 0o600
            with Memory.posix_shm("/" + NAME) as found:
                assert (found.size, found.identity) == (5000, made.identity)
                made.write(b"\x07", 4999)
                assert found.read("u1", (1,), 4999)[0] == 7
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


def test_named_memory_has_its_pages_before_anyone_writes() -> None:
    with Memory.posix_shm(NAME, (3 << 20) + 5) as memory:
        Memory.unlink_posix_shm(NAME)
        assert os.fstat(memory.fds[0]).st_blocks * 512 > 3 << 20


FULL = """
import os, resource, signal
from types import SimpleNamespace
import numpy as np
import pytest
from nnburst.errors import GeneralFailure, ResourceExhausted
from nnburst import Memory
from nnburst.memory import named

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
MIB = 1 << 20
for attempt in ("known before", "found while its pages are reserved"):
    with pytest.raises(ResourceExhausted, match="of 4,194,304 bytes does not fit into /dev/shm, where 2,097,152 are"):
        Memory.posix_shm("ring", 4 * MIB)
    assert os.listdir("/dev/shm") == [] and not named.made
    named.os = SimpleNamespace(**vars(os))
    named.os.fstatvfs = lambda fd: SimpleNamespace(f_blocks=0, f_bavail=2, f_frsize=MIB)  # as without a limit
with Memory.posix_shm("ring", 2 * MIB) as ring:
    ring.array("u1", (2 * MIB,))[:] = 1
os.truncate("/dev/shm/ring", 4 * MIB)  # as a program does that reserves nothing
ones = np.ones(MIB, np.uint8)
with Memory.posix_shm("ring") as ring:
    with pytest.raises(ResourceExhausted, match="No space left"):
        ring.write(ones, 3 * MIB)
    child = os.fork()
    if not child:
        ring.array("u1", (MIB,), 3 * MIB)[:] = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGBUS, "a lost write was hidden"
with Memory.posix_shm("ring", direct=True) as ring, pytest.raises(GeneralFailure, match="file system is too full"):
    ring.write(ones, 3 * MIB)
print("all was refused")
"""


def test_named_memory_larger_than_its_file_system_is_refused_and_no_write_is_lost_in_silence() -> None:
    mounted = 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$0" -c "$1"'
    for option in ("-m", "-Urm"):  # of root, of others
        if subprocess.run(["unshare", option, "true"], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip("this process may not make a mount namespace")
    line = ["unshare", option, "sh", "-c", mounted, sys.executable, FULL]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "all was refused\n"), done.stderr


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


def test_blob_is_memory_of_a_fixed_size() -> None:
    with Memory.hardware_buffer_blob(5000) as memory:
        assert (memory.kind, memory.size, memory.mappable) == ("hardware_buffer_blob", 5000, True)
        with pytest.raises(OSError):
            os.ftruncate(memory.fds[0], 0)
    with pytest.raises(InvalidArgument):
        Memory.hardware_buffer_blob(0)


# -- images ------------------------------------------------------------------------------------------------------------


def stored(layout: ImageLayout, raw: bytes, unsealed: bool) -> Memory:
    """An image in an object of those bytes, which a device maps, or copies because it could be truncated."""
    with Memory.ashmem(len(raw)) as sealed:
        fd = os.memfd_create("nnburst-image") if unsealed else os.dup(sealed.fds[0])
    os.pwrite(fd, raw, 0)
    try:
        return Memory.from_image(fd, layout)
    finally:
        os.close(fd)


unsealed_or_not = pytest.mark.parametrize("unsealed", [False, True], ids=["mapped", "staged"])


@unsealed_or_not
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_images_are_the_tensors_that_a_loop_over_their_pixels_gives(
    name: str, unsealed: bool, data: st.DataObject
) -> None:
    layout = data.draw(images.layouts(name))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    raw = rng.bytes(layout.start + layout.span + data.draw(st.integers(0, 2)))
    with stored(layout, raw, unsealed) as memory:
        assert memory.mappable is not unsealed
        tensor = memory.read(layout.dtype, layout.shape)
        assert images.bits(tensor) == images.decode(name, layout, raw)
        assert tensor.nbytes == layout.tight_size
        where, step = list(images.places(name, layout)), tensor.itemsize
        in_order = where == list(range(where[0], where[0] + len(where) * step, step))
        assert layout.is_tensor is in_order
        seen = [number for plane in memory.planes() for number in images.bits(np.ascontiguousarray(plane))]
        assert sorted(seen) == sorted(images.decode(name, layout, raw))
        memory.write(tensor)
        assert os.pread(memory.fds[0], len(raw), 0) == raw, "what was read is what is written"
        other = np.frombuffer(rng.bytes(tensor.nbytes), tensor.dtype).reshape(tensor.shape)
        memory.write(other)
        now = os.pread(memory.fds[0], len(raw), 0)
        assert images.decode(name, layout, now) == images.bits(other)
        pixels = images.pixel_bytes(name, layout)
        assert all(now[i] == raw[i] for i in range(len(raw)) if i not in pixels), "gaps are left alone"


@pytest.mark.parametrize("name", images.PLANES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_planes_are_images_of_their_own(name: str, data: st.DataObject) -> None:
    layout = data.draw(images.layouts(name))
    raw = np.random.default_rng(3).bytes(layout.start + layout.span)
    with stored(layout, raw, data.draw(st.booleans())) as memory:
        found = []
        for index in range(images.PLANES[name]):
            with memory.plane_memory(index) as plane:
                alone = plane.image
                assert alone is not None
                assert plane.offset == layout.planes[index][0], "the planes before it are not counted, read or mapped"
                assert alone.shape[-1] == (2 if images.PLANES[name] == 2 and index else 1)
                found.append(plane.read(alone.dtype, alone.shape).reshape(layout.layers, -1))
        assert images.bits(np.concatenate(found, axis=1)) == images.decode(name, layout, raw)
        for index in (-1, images.PLANES[name], "Y"):
            with pytest.raises(InvalidArgument, match="plane"):
                memory.plane_memory(index)  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_image_whose_bytes_are_the_tensor_is_no_copy(name: str, side: str) -> None:
    """A device works on the image's own bytes if nothing lies between them and their order is that of the tensor."""
    for width, extra in ((8, 0), (7, 0), (8, 1)):
        row = width * len(images.CHANNELS.get(name, "Y")) * images.BYTES.get(name, 1)
        with Memory.hardware_buffer(width, 4, name, pitch=row + extra) as memory:
            whole = RequestArgument(location=DataLocation(0, 0, 0))
            inputs, outputs = ((whole,), ()) if side == "input" else ((), (whole,))
            opened = open_request(Request(inputs, outputs, (memory,)))
            copied = extra > 0 or name in ("BGR", "BGRA")
            assert opened.is_direct is not copied
            layout = memory.image
            assert layout is not None
            seen = opened.request.pools[1].array(layout.dtype, layout.shape)  # type: ignore[union-attr]
            assert seen.flags.writeable is (side == "output" or copied)
            memory.write(np.full(layout.shape, 248, layout.dtype))
            assert (seen[0, 0, 0, 0] == 248) is not copied


@pytest.mark.parametrize("pitch", [8, 16], ids=["in place", "copied"])
def test_image_in_a_dma_buf_is_used_between_begin_and_end(monkeypatch: pytest.MonkeyPatch, pitch: int) -> None:
    """The kernel may not make any here: a memfd that is told to be one stands for it, and says what it was asked."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("nnburst.memory.memory.examine", lambda fd: replace(examine(fd), dma_buf=True))
    monkeypatch.setattr(fcntl, "ioctl", lambda fd, code, flags: asked.append((code, int.from_bytes(flags, "little"))))
    whole = RequestArgument(location=DataLocation(0, 0, 0))
    begin_and_end = {True: [(0x40086200, 1), (0x40086200, 5)], False: [(0x40086200, 3), (0x40086200, 7)]}
    for is_input, expected in begin_and_end.items():
        with Memory.hardware_buffer(8, 4, "NV12", pitch=pitch) as memory:
            opened = open_request(Request((whole,), (), (memory,)) if is_input else Request((), (whole,), (memory,)))
            assert asked == []
            opened.before_run()
            assert asked == expected[: (2 if pitch > 8 else 1) if is_input else 0 if pitch > 8 else 1]
            opened.after_run(True)
            assert asked == expected
        asked.clear()


def test_sizes_are_those_that_v4l2_gives() -> None:
    """(width, height, bytes per line) and what a driver answers: bytes per line of each plane, bytes of the tensor."""
    for name, asked, pitches, nbytes in (
        ("NV12", (640, 480, 640), (640, 640), 460800),
        ("NV21", (642, 482, 704), (704, 704), 642 * 482 * 3 // 2),
        ("NV12", (7, 5, 8), (8, 8), 35 + 2 * 4 * 3),
        ("NV12", (7, 5, 7), (7, 8), 35 + 2 * 4 * 3),
        ("I420", (640, 480, 640), (640, 320, 320), 460800),
        ("YV12", (7, 5, 8), (8, 4, 4), 35 + 2 * 4 * 3),
        ("P010", (640, 480, 1280), (1280, 1280), 921600),
        ("P010", (1, 1, 2), (2, 4), 2 + 4),
    ):
        width, height, pitch = asked
        with Memory.hardware_buffer(width, height, name, pitch=pitch) as memory:
            layout = memory.image
            assert layout is not None
            assert tuple(step for _, step in layout.planes) == pitches
            assert layout.tight_size == nbytes


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
        {"fourcc": -1},
        {"fourcc": int.from_bytes(b"YUYV", "little")},
    ],
    ids=str,
)
def test_layouts_that_contradict_themselves_are_refused(change: dict[str, Any]) -> None:
    good = ImageLayout(8, 4, FORMATS["RGB"].fourcc, ((0, 64),), 2, 256)
    check_layout(good)
    with pytest.raises(InvalidArgument):
        check_layout(replace(good, **change))


def test_planes_that_overlap_or_are_too_short_are_refused() -> None:
    for name, width, height, planes in (
        ("NV12", 8, 4, ((0, 8), (31, 8))),
        ("NV12", 7, 4, ((0, 7), (28, 7))),  # four pairs in a row
        ("I420", 8, 4, ((0, 8), (32, 4), (39, 4))),
        ("I420", 8, 4, ((0, 8), (32, 4))),
        ("P010", 8, 4, ((0, 16), (64, 15))),
        ("P010", 8, 4, ((0, 15), (64, 16))),
        ("I420", 8, 4, ((0, 8), (32, 4), (35, 4))),
        ("I420", 8, 4, ((0, 0), (32, 4), (40, 4))),
        ("I420", 9, 4, ((0, 9), (36, 4), (44, 4))),
    ):
        with pytest.raises(InvalidArgument, match=r"plane begins|its pitch is|has 3 planes"):
            check_layout(ImageLayout(width, height, FORMATS[name].fourcc, planes))
    with pytest.raises(InvalidArgument, match="unknown"):
        Memory.hardware_buffer(8, 4, "CMYK")
    for wrong in ({"width": "8"}, {"planes": ((0,),)}, {"planes": 5}, {"planes": ((0.5, 8),)}, {"layers": None}):
        good = {"width": 8, "height": 4, "fourcc": FORMATS["GRAY8"].fourcc, "planes": ((0, 8),)}
        with pytest.raises(InvalidArgument, match="layout of an image: Expected"):
            Memory.from_image(0, ImageLayout(**good | wrong))  # type: ignore[arg-type]


def test_an_image_has_no_addressable_bytes_and_pickles() -> None:
    with Memory.hardware_buffer(8, 4, "RGB") as memory:
        assert memory.size == 0
        for look in (lambda: memory.buffer, lambda: memory.array("u1", (1,)), lambda: memory.read("u1", (1,))):
            with pytest.raises(InvalidArgument):
                look()
        assert pickle.loads(pickle.dumps(memory.handle)) == memory.handle


def test_ctrl_c_right_after_the_call_that_maps_leaves_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    def map_and_interrupt(*arguments: Any) -> None:
        assert lib.nnb_map(*arguments) == 0
        raise KeyboardInterrupt

    interrupted = SimpleNamespace(nnb_map=map_and_interrupt, nnb_unmap=lib.nnb_unmap)
    with Memory.ashmem(8, "nnburst-interrupted") as memory:
        monkeypatch.setattr(descriptor, "lib", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.array(np.uint8, (8,))
        gc.collect()  # the traceback has the mapping
        assert mappings("memfd:nnburst-interrupted") == 0
