"""Memory pools: views, ownership, hostile handles, truncation, memory that is closed too early or is not to be had."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import Memory, Model, OperandType
from nnburst._core import file_system
from nnburst._core.file_system import REMOTE_FILES, check_file_system
from nnburst.burst import ExecutionBurstController
from nnburst.errors import BadState, GeneralFailure, InvalidArgument, ResourceExhausted
from nnburst.memory import FORMATS, ImageLayout
from nnburst.memory.kinds import PROT_READ, PROT_WRITE, MemoryHandle
from nnburst.memory.staging import open_request
from nnburst.model import Request
from nnburst.model.types import DataLocation, OperandDesc, RequestArgument
from support.models import built, compiled
from support.processes import mappings
from support.waiting import PATIENCE, without_collector

F_GET_SEALS = 1034
PAGE = mmap.PAGESIZE


@pytest.fixture
def file() -> Iterator[Any]:
    with tempfile.TemporaryFile() as f:
        f.truncate(4 * PAGE)
        yield f


def test_ashmem_is_sealed_against_any_change_of_size() -> None:
    with Memory.ashmem(5000) as memory:
        fd = memory.fds[0]
        assert fcntl.fcntl(fd, F_GET_SEALS) & 7 == 7
        assert os.fstat(fd).st_size == 5000
        for size in (0, 10_000):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        assert not os.get_inheritable(fd)


def test_ashmem_starts_zeroed_and_views_share_it() -> None:
    with Memory.ashmem(100) as memory:
        a = memory.array(np.float32, (2, 3), 4)
        assert not a.any()
        a[1, 2] = 1.5
        assert memory.array("f4", (6,), 4)[5] == 1.5
        assert bytes(memory.buffer[24:28]) == np.float32(1.5).tobytes()
        assert memory.array("u1", (0, 7), 100).shape == (0, 7)


def test_closed_pool_is_bad_state() -> None:
    memory = Memory.ashmem(10)
    memory.close()
    for look in (lambda: memory.fds, lambda: memory.identity):
        with pytest.raises(BadState):
            look()
    assert memory.handle == MemoryHandle("ashmem", 10)


def test_mmap_fd_hides_the_page_slop(file: Any) -> None:
    os.pwrite(file.fileno(), b"abcdef", PAGE + 3)
    with Memory.mmap_fd(file.fileno(), 6, offset=PAGE + 3) as memory:
        assert bytes(memory.buffer) == b"abcdef"
        memory.array("u1", (6,))[0] = ord("X")
    assert os.pread(file.fileno(), 6, PAGE + 3) == b"Xbcdef"


def test_mmap_fd_leaves_the_callers_descriptor_alone(file: Any) -> None:
    Memory.mmap_fd(file.fileno(), 10).close()
    os.fstat(file.fileno())


ALL_RIGHTS = PROT_READ | PROT_WRITE
LOOKS: dict[str, tuple[tuple[int, int, int], tuple[Any, tuple[int, ...], int], type[Exception]]] = {
    "more bytes than there are": ((100, 0, ALL_RIGHTS), ("u1", (101,), 0), InvalidArgument),
    "a byte behind the end": ((100, 0, ALL_RIGHTS), ("u1", (1,), 100), InvalidArgument),
    "more elements than there are": ((100, 0, ALL_RIGHTS), ("f8", (13,), 0), InvalidArgument),
    "a byte before the beginning": ((100, 0, ALL_RIGHTS), ("u1", (1,), -1), InvalidArgument),
    "a negative length": ((100, 0, ALL_RIGHTS), ("u1", (-1,), 0), InvalidArgument),
    "objects": ((100, 0, ALL_RIGHTS), ("O", (1,), 0), InvalidArgument),
    "a type that contradicts itself": ((100, 0, ALL_RIGHTS), ([("a", "u1"), ("a", "u1")], (1,), 0), InvalidArgument),
    "no rights": ((10, 0, 0), ("u1", (1,), 0), InvalidArgument),
    "a range beyond the object": ((10, 4 * PAGE - 9, ALL_RIGHTS), ("u1", (1,), 0), GeneralFailure),
}


@pytest.mark.parametrize("what", LOOKS)
def test_view_that_is_refused(file: Any, what: str) -> None:
    (size, offset, prot), view, error = LOOKS[what]
    with Memory.mmap_fd(file.fileno(), size, offset=offset, prot=prot) as memory, pytest.raises(error):
        memory.array(*view)


def test_write_access_to_a_read_only_descriptor_is_a_general_failure_at_the_first_look(file: Any) -> None:
    with open(f"/proc/self/fd/{file.fileno()}", "rb") as f, Memory.mmap_fd(f.fileno(), 10) as memory:
        with pytest.raises(GeneralFailure):
            memory.array("u1", (1,))


@pytest.mark.parametrize("prot", [4, -1, 8 | 1])
def test_unknown_rights_are_refused(file: Any, prot: int) -> None:
    with pytest.raises(InvalidArgument):
        Memory.mmap_fd(file.fileno(), 10, prot=prot)


def test_sizes_and_descriptors_that_do_not_exist_are_refused() -> None:
    for size in (0, -1, 1 << 63):
        with pytest.raises(InvalidArgument):
            Memory.ashmem(size)
    with pytest.raises(InvalidArgument):
        Memory.mmap_fd(3000, 10)


def test_identity_of_memory_that_is_closed_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def closing(fd: int) -> os.stat_result:
        memory.close()
        return fstat(fd)

    memory, fstat = Memory.ashmem(8), os.fstat
    monkeypatch.setattr(os, "fstat", closing)
    with pytest.raises(GeneralFailure, match="Bad file descriptor"):
        memory.identity  # noqa: B018


def test_identity_tells_pools_over_the_same_bytes() -> None:
    with Memory.ashmem(100) as a, Memory.ashmem(100) as b, Memory.mmap_fd(a.fds[0], 100) as again:
        assert a.identity == again.identity != b.identity


# -- handles from a peer ----------------------------------------------------------------------------------------------


def fds_of(memory: Memory) -> list[int]:
    return [os.dup(fd) for fd in memory.fds]


def test_handle_round_trip_shares_the_bytes() -> None:
    with Memory.ashmem(100) as memory, Memory.from_handle(memory.handle, fds_of(memory)) as other:
        memory.array("u1", (1,))[0] = 9
        assert other.array("u1", (1,))[0] == 9
        with Memory.from_handle(memory.handle, fds_of(memory), prot=PROT_READ) as reader:
            assert not reader.array("u1", (1,)).flags.writeable


GOOD = MemoryHandle("ashmem", 100)
PIXEL = ImageLayout(1, 1, FORMATS["GRAY8"].fourcc, ((0, 1),))
HOSTILE = [
    replace(GOOD, kind="hardware_buffer"),
    replace(GOOD, kind="hardware_buffer", size=0),
    replace(GOOD, kind="hardware_buffer_blob", prot=PROT_READ),
    replace(GOOD, kind="posix_shm", offset=1, size=50),
    replace(GOOD, kind="token"),
    replace(GOOD, size=0),
    replace(GOOD, size=-100),
    replace(GOOD, size=1 << 63),
    replace(GOOD, prot=7),
    replace(GOOD, prot=PROT_READ),
    replace(GOOD, offset=1, size=99),
    MemoryHandle("mmap_fd", 100, 3, -1),
    MemoryHandle("hardware_buffer", 0, 7, image=PIXEL),
    MemoryHandle("hardware_buffer", 0, 3, 1, image=PIXEL),
    MemoryHandle("mmap_fd", 100, 3, (1 << 64) - 50),
]


@pytest.mark.parametrize("handle", HOSTILE, ids=str)
def test_hostile_handle_is_refused_and_its_descriptors_closed(handle: MemoryHandle) -> None:
    with Memory.ashmem(100) as memory:
        fds = fds_of(memory)
        with pytest.raises(InvalidArgument):
            Memory.from_handle(handle, fds)
        with pytest.raises(OSError):
            os.fstat(fds[0])


@pytest.mark.parametrize("count", [0, 2])
def test_wrong_number_of_descriptors_is_refused(count: int) -> None:
    with Memory.ashmem(100) as memory, pytest.raises(InvalidArgument):
        Memory.from_handle(GOOD, [os.dup(memory.fds[0]) for _ in range(count)])


@pytest.mark.parametrize("handle", [replace(GOOD, size=101), MemoryHandle("mmap_fd", 100, 3, 1)], ids=str)
def test_handle_that_promises_more_than_there_is_cannot_be_used(handle: MemoryHandle) -> None:
    with Memory.ashmem(100) as memory, Memory.from_handle(handle, fds_of(memory)) as other:
        with pytest.raises(GeneralFailure, match="exceed"):
            other._check_usable()
        with pytest.raises(GeneralFailure):
            other.read("u1", (1,))


@pytest.mark.parametrize("kind", ["ashmem", "mmap_fd", "hardware_buffer_blob", "posix_shm"])
@pytest.mark.parametrize("seals", [0, 2, 4, 6])
def test_REQ_MEM_103_object_that_its_sender_could_truncate_is_copied_and_never_mapped(kind: str, seals: int) -> None:
    fd = os.memfd_create("lonely-pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 100)
    fcntl.fcntl(fd, 1033, seals)
    with Memory.from_handle(MemoryHandle(kind, 100), [fd]) as memory:
        assert not memory.mappable
        memory.write(np.arange(3, dtype=np.int32), 50)
        assert memory.read(np.int32, (3,), 50).tolist() == [0, 1, 2]
        for look in (lambda: memory.array("u1", (1,)), lambda: memory.buffer, lambda: memory._map_for(writable=False)):
            with pytest.raises(GeneralFailure, match="truncate"):
                look()
        assert mappings("memfd:lonely-pool") == 0


def test_REQ_MEM_102_a_copy_never_makes_a_truncated_file_longer(file: Any) -> None:
    with Memory.mmap_fd(file.fileno(), 4 * PAGE) as memory:
        memory.write(np.ones(4 * PAGE, np.uint8))
        file.truncate(PAGE)
        for access in (
            lambda: memory.write(np.frombuffer(b"x", np.uint8), 0),
            lambda: memory.read("u1", (1,)),
            lambda: memory.write(b"x", PAGE),
        ):
            with pytest.raises(GeneralFailure):
                access()
        assert os.fstat(file.fileno()).st_size == PAGE


def test_files_that_no_local_file_system_serves_are_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REMOTE_FILES, raising=False)
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        file.truncate(PAGE)
        monkeypatch.setattr(file_system, "_mount_type", lambda mount: "fuse.slow")
        with Memory.mmap_fd(file.fileno(), PAGE) as memory:
            for use in (
                memory._check_usable,
                lambda: memory.read("u1", (1,)),
                lambda: memory.write(np.frombuffer(b"x", np.uint8)),
            ):
                with pytest.raises(GeneralFailure, match=r"fuse\.slow.*NNBURST_REMOTE_FILES=1"):
                    use()
            monkeypatch.setenv(REMOTE_FILES, "1")
            memory.write(np.frombuffer(b"x", np.uint8))


@pytest.mark.parametrize(
    ("mounted", "magic", "accepted"),
    [
        ("ext4", 0, True),
        ("overlay", 0, True),  # the administrator's own, as in a container
        ("fuse", 0xEF53, False),  # what it says of itself is not asked for
        ("nfs4", 0, False),
        (None, 0xEF53, True),
        (None, 0x444D4142, True),
        (None, 0x794C7630, False),  # somebody else's overlay
        (None, 0x65735546, False),
    ],
)
def test_file_systems_are_accepted_by_a_list_of_those_that_answer(
    monkeypatch: pytest.MonkeyPatch, mounted: str | None, magic: int, accepted: bool
) -> None:
    monkeypatch.delenv(REMOTE_FILES, raising=False)
    monkeypatch.setattr(file_system, "_mount_type", lambda mount: mounted)
    monkeypatch.setattr(file_system, "lib", SimpleNamespace(nnb_fd_filesystem=lambda fd: magic))
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        if accepted:
            check_file_system(file.fileno())
            return
        with pytest.raises(GeneralFailure, match="block this process for ever"):
            check_file_system(file.fileno())


def test_mount_of_a_file_is_found_among_those_of_this_process() -> None:
    with open("/proc/self/status") as file:
        assert file_system._mount_type(file_system._mount_of(file.fileno())) == "proc"
        with pytest.raises(GeneralFailure, match="proc"):
            check_file_system(file.fileno())
    with Memory.ashmem(100) as memory:
        assert file_system._mount_type(file_system._mount_of(memory.fds[0])) is None
        check_file_system(memory.fds[0])
    with pytest.raises(OSError, match="Bad file descriptor"):
        check_file_system(1 << 20)


def test_a_sender_may_ask_for_direct_mapping_and_is_heard_only_if_the_receiver_allows_it() -> None:
    fd = os.memfd_create("lonely-pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * PAGE)
    handle = MemoryHandle("mmap_fd", 2 * PAGE, direct=True)
    careful, bold = Memory.from_handle(handle, [os.dup(fd)]), Memory.from_handle(handle, [fd], allow_direct=True)
    with careful, bold:
        assert (careful.mappable, bold.mappable) == (False, True)
        bold._map_for(writable=False)
        os.ftruncate(fd, PAGE)
        with pytest.raises(GeneralFailure, match="exceed"):
            bold.read("u1", (2 * PAGE,))


def test_more_rights_than_the_sender_gave_are_refused() -> None:
    with Memory.ashmem(100) as memory, pytest.raises(InvalidArgument):
        Memory.from_handle(MemoryHandle("mmap_fd", 100, PROT_READ), fds_of(memory), prot=PROT_READ | PROT_WRITE)


def test_object_that_cannot_be_mapped_is_a_general_failure() -> None:
    with Memory.ashmem(100) as memory:
        reader = os.open(f"/proc/self/fd/{memory.fds[0]}", os.O_RDONLY)
        with Memory.from_handle(memory.handle, [reader]) as other:
            assert other.read("u1", (2,)).tolist() == [0, 0]
            for write in (other._check_writable, lambda: other.write(b"x"), lambda: other.array("u1", (1,))):
                with pytest.raises(GeneralFailure):
                    write()


# -- truncation -------------------------------------------------------------------------------------------------------


def test_truncated_file_reads_as_zeros_and_is_counted_where_a_device_maps_it(file: Any) -> None:
    with Memory.mmap_fd(file.fileno(), 4 * PAGE, direct=True) as memory:
        view = memory._map_for(writable=True).bytes()
        view[:] = 1
        file.truncate(PAGE)
        assert view.sum() == PAGE, "the pages that are left are untouched"
        assert memory.faults == 3
        view[:] = 2
        assert view.sum() == 8 * PAGE
        assert memory.faults == 3


def test_guard_entries_are_given_back(file: Any) -> None:
    for _ in range(5000):  # more than the table has
        with Memory.mmap_fd(file.fileno(), PAGE, direct=True) as memory:
            memory._map_for(writable=False)


def test_too_many_guarded_mappings_are_an_error_not_a_crash(file: Any) -> None:
    pools = []
    try:
        with pytest.raises(ResourceExhausted):
            for _ in range(4097):
                memory = Memory.mmap_fd(file.fileno(), 1, direct=True)
                pools.append(memory)
                memory._map_for(writable=False)
    finally:
        for memory in pools:
            memory.close()


FAULT_ELSEWHERE = """
import ctypes, faulthandler, mmap, os, signal, sys, tempfile
{setup}
from nnburst import Memory
f = tempfile.TemporaryFile(); f.truncate(8192)
memory = Memory.mmap_fd(f.fileno(), 8192, direct=True)
view = memory._map_for(writable=True).bytes()
f.truncate(0)
assert view.sum() == 0 and memory.faults == 2
{fault}
print("survived")
"""
UNGUARDED = """
g = tempfile.TemporaryFile(); g.truncate(4096)
pool = Memory.mmap_fd(g.fileno(), 4096, direct=True)
own = pool.array("u1", (1,)); g.truncate(0)
sys.stdout.flush(); own[0] = 1
"""
FOREIGN = """
g = tempfile.TemporaryFile(); g.truncate(4096)
other = mmap.mmap(g.fileno(), 4096); g.truncate(0)
sys.stdout.flush(); other[0]
"""


IGNORED = "signal.signal(signal.SIGBUS, signal.SIG_IGN)"
LATER = "faulthandler.enable()\n"
SENT = "os.kill(os.getpid(), signal.SIGBUS)"


@pytest.mark.parametrize(
    ("setup", "fault", "told"),
    [
        *[(setup, fault, False) for setup in ("", IGNORED) for fault in (UNGUARDED, FOREIGN)],
        *[(LATER, fault, True) for fault in (UNGUARDED, FOREIGN)],
        *[("", LATER + fault, True) for fault in (UNGUARDED, "signal.raise_signal(signal.SIGBUS)")],
        ("", SENT, False),
    ],
)
def test_fault_outside_of_guarded_memory_still_ends_the_process(setup: str, fault: str, told: bool) -> None:
    program = FAULT_ELSEWHERE.format(setup=setup, fault=fault)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -7, done.stderr
    assert ("Bus error" in done.stderr) is told, "the handler from before us, or after us, was called"


def test_signal_that_was_sent_goes_to_the_program_s_handler() -> None:
    setup = "signal.signal(signal.SIGBUS, lambda *a: print('handled'))"
    program = FAULT_ELSEWHERE.format(setup=setup, fault=SENT)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\nsurvived\n"), done.stderr


HANDLER_AFTER_US = """
import faulthandler, os, signal, sys, tempfile
from nnburst import Memory
f = tempfile.TemporaryFile(); f.truncate(64 * 4096)
memory = Memory.mmap_fd(f.fileno(), 64 * 4096, direct=True)
view = memory._map_for(writable=True).bytes()
view[:] = 1
{before}
faulthandler.enable()
f.truncate(4096)
assert view.sum() == 4096 and memory.faults == 63, memory.faults
f.truncate(0)
assert view.sum() == 0 and memory.faults == 64, memory.faults
view[:] = 2
assert view.sum() == 2 * 64 * 4096
print("survived")
"""


@pytest.mark.parametrize("before", ["", "f.truncate(32 * 4096); view[40 * 4096]; faulthandler.disable()"])
def test_guard_survives_a_handler_that_is_installed_after_it(before: str) -> None:
    program = HANDLER_AFTER_US.format(before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


# -- processes --------------------------------------------------------------------------------------------------------


def _increment(memory: Memory) -> None:
    memory.array("i4", (4,))[:] += 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pool_reaches_multiprocessing_children(method: str) -> None:
    with Memory.ashmem(16) as memory:
        process = multiprocessing.get_context(method).Process(target=_increment, args=(memory,))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0
        process.close()
        assert memory.array("i4", (4,)).tolist() == [1] * 4


# ---- memory that is closed too early, or is not to be had ----------------------------------------------------------


NBYTES = 256


def model() -> Model:
    row = OperandDesc(OperandType.TENSOR_FLOAT32, (1, 64))
    return built([row], lambda b, x: b.fully_connected(x, np.eye(64, dtype=np.float32)))


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
    with compiled(model(), service.devices) as compilation:
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
    with without_collector():
        with contextlib.suppress(GeneralFailure):
            open_request(Request(at(0), at(0, NBYTES), (pool, short)))
        del pool
        assert kept() is None
    short.close()
