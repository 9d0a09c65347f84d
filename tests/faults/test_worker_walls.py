"""A worker of a shared service that its models have taken over: what it holds, what it reaches, what it may tell."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec.inspect
import numpy as np
import pytest

import nnburst
from nnburst._core._nnburst import lib
from nnburst.service.process.workers import Worker
from nnburst.service.wire.protocol import CALLS, EndNotice, Side, encode
from support import wire_page
from support.hostile import Values, encoded
from support.intruder import attack, attack_with, hostile_service
from support.models import relu
from support.processes import no_more_files, wait_gone, worker_of, workers_of
from support.services import Shared, header, save_scaling, shared_service
from support.waiting import until
from support.ways_out import REFUSALS, build, names, needs_compiler, needs_walls

pytestmark = pytest.mark.check

X = {"x": np.ones((1, 4), np.float32)}


@pytest.mark.representative
@needs_walls
@needs_compiler
def test_every_way_out_is_refused_in_a_worker(tmp_path: Path) -> None:
    def attempt(*ways: int) -> list[int]:
        return [library.try_way(way) for way in ways]  # type: ignore[name-defined]  # noqa: F821

    place = build(tmp_path)
    setup = f"import ctypes\nlibrary = ctypes.CDLL({str(place / 'code' / 'ways_out.so')!r})\n"
    setup += f"library.begin({str(place)!r}.encode(), {os.getpid()})\n"
    with hostile_service(place, attempt, setup=setup) as shared:
        found = dict(zip(names(), attack(shared.address, *range(len(names()))), strict=True))
    assert {way: errno.errorcode.get(why, "open") for way, why in found.items() if why not in REFUSALS} == {}


# ---- descriptors -----------------------------------------------------------------------------------------------------


def unknown_descriptors(pid: int, model: Path) -> list[str]:
    """Return those of a process of which it is not known what they are for."""
    known = {
        r"/dev/null": os.O_RDONLY,
        r"pipe:\[\d+\]": os.O_WRONLY,  # the log
        r"anon_inode:\[pidfd\]": os.O_RDWR,  # of its broker and clients: no call takes one that does more than wait
        r"anon_inode:\[eventfd\]": os.O_RDWR,
        r"/memfd:nnburst[-\w]* \(deleted\)": os.O_RDWR,  # queues, pools, the page of statistics
        rf"/proc/{pid}": os.O_PATH,
        re.escape(str(model)): os.O_RDONLY,  # which its client has sent
    }
    with open("/proc/net/unix") as table:
        rows = [row for row in map(str.split, table) if row[4] in ("0001", "0005") and row[5] == "03"]
    connected = {row[6] for row in rows}  # streams and packets in sequence, which take no address with a message
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            flags = int(Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8)
        except FileNotFoundError:  # it has just been closed
            continue
        mode = flags & (os.O_ACCMODE | os.O_PATH)
        is_known = any(re.fullmatch(what, link) and mode == how for what, how in known.items())
        if not is_known and link.removeprefix("socket:[").removesuffix("]") not in connected:
            found.append(f"{fd}: {link} {flags:o}")
    return found


def test_each_descriptor_of_a_worker_is_known(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")
    model = Path(save_scaling(tmp_path / "scaling.onnx", 2.0))
    devices = ("--device", "nnburst-reference", "--device", "nnburst-onnxruntime")
    with shared_service(tmp_path, *devices, "--model", f"named={model}") as shared, contextlib.ExitStack() as stack:
        service = stack.enter_context(nnburst.connect(shared.address))
        cached = {"cache_dir": tmp_path / "cache"}
        sessions = [
            stack.enter_context(service.session(what, **more))  # type: ignore[arg-type]
            for what, more in ((relu((1, 4)), cached), (model, cached), (model, {}), ("named", {}))
        ]
        for session in sessions:
            session.run(None, {session.get_inputs()[0].name: X["x"]})
        for worker in {*map(worker_of, sessions)}:
            unknown = partial(unknown_descriptors, worker, model)
            until(lambda: not unknown(), unknown)  # noqa: B023 (what is open for a moment only is none of these)
        assert unknown_descriptors(shared.pid, model), "the broker's, which lead everywhere, are"


# ---- what the kernel counts for each user ----------------------------------------------------------------------------

SAME = """
from nnburst.devices.function import Tensor, declare
@declare(inputs=[Tensor('x', 'float32', (1, 4))], outputs=[Tensor('y', 'float32', (1, 4))])
def same(x): return x
"""


def test_worker_has_a_part_of_what_the_kernel_counts_for_its_user(shared: Shared) -> None:
    with nnburst.connect(shared.address) as service:
        processes = shared.pid, shared.worker, own_worker(shared, service)
        for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_SIGPENDING):
            broker, named, own = (resource.prlimit(pid, which) for pid in processes)
            assert broker[0] >= 2 * named[0] >= 4 * own[0] > 0
            assert (named[0], own[0]) == (named[1], own[1]), "it may raise it"


@needs_walls
def test_descriptors_that_a_worker_keeps_in_flight_leave_room_for_the_broker_and_others(tmp_path: Path) -> None:
    def fill() -> list[int]:
        while True:
            ours, theirs = socket.socketpair()  # type: ignore[name-defined]  # noqa: F821
            ours.setblocking(False)
            kept.extend((ours, theirs))  # type: ignore[name-defined]  # noqa: F821
            try:
                while True:
                    kept[0] += socket.send_fds(ours, [b"x"], [0] * 100)  # type: ignore[name-defined]  # noqa: F821
            except BlockingIOError:
                pass
            except OSError as error:
                return [error.errno, 100 * kept[0]]  # type: ignore[name-defined]  # noqa: F821

    def limited() -> None:  # as an ordinary user's
        resource.setrlimit(resource.RLIMIT_NOFILE, (4000, 4000))
        lib.nnb_capabilities_drop()

    (tmp_path / "functions.py").write_text(SAME)
    target, setup = f"{tmp_path}/functions.py:same", "import socket\nkept = [0]"
    with hostile_service(tmp_path, fill, target, setup=setup, preexec_fn=limited) as shared:
        with nnburst.connect(shared.address) as service:
            why, in_flight = attack_with(service)
            assert why == errno.ETOOMANYREFS
            assert 0 < in_flight <= 1000 + 100
            with nnburst.connect(shared.address) as other, other.session("same") as session:
                session.run(None, X)


# ---- what it tells its broker ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    def send(broker: int, *messages: str) -> None:
        for fd in range(3, 64):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:  # type: ignore[name-defined]  # noqa: F821
                peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # type: ignore[name-defined]  # noqa: F821
                if int.from_bytes(peer[:4], "little") == broker:
                    for message in messages:
                        sock.send(bytes.fromhex(message))

    with tempfile.TemporaryDirectory(prefix="nnburst-") as place:
        (Path(place) / "functions.py").write_text(SAME)
        function, before = f"{place}/functions.py:same", "from nnburst._core import backoff; backoff._FIRST = 0.0"
        with hostile_service(Path(place), send, function, setup="import socket", before=before) as shared:
            yield shared  # whose workers die again and again


def own_worker(shared: Shared, service: nnburst.Service) -> int:
    """Return the process of this user's models, which a connection keeps."""
    attack_with(service, 0)
    (worker,) = until(lambda: workers_of(shared.pid) - {shared.worker})
    return int(worker)


WRONG = {
    "nothing": b"",
    "half a header": b"x" * 4,
    "no message": header(1) + b"\xff" * 90,
    "descriptors that do not come": header(1, n_fds=3) + encode(EndNotice(reason="x")),
    "no kind": header(1, kind=77) + encode(EndNotice(reason="x")),
    "a call of clients": header(1) + encoded({"call": "hello", "version": 1, "pid": 1}),
    "its end": header(0) + encode(EndNotice(reason="x")),
}


@pytest.mark.parametrize("message", WRONG)
def test_worker_that_tells_its_broker_nonsense_is_ended_and_others_go_on(shared: Shared, message: str) -> None:
    with nnburst.connect(shared.address) as service, service.session("same") as session:
        session.run(None, X)
        worker = os.pidfd_open(own_worker(shared, service))
        with contextlib.suppress(nnburst.NNBurstError, AssertionError):  # it may be ended before it answers
            attack_with(service, shared.pid, WRONG[message].hex())
        wait_gone(worker)
        session.run(None, X)


def test_worker_that_talks_without_pause_ends_each_of_its_clients_once() -> None:
    jobs: list[Callable[[], None]] = []
    ended: dict[int, str] = {}
    broker: Any = SimpleNamespace(post=jobs.append, end_client=lambda client, reason: ended.update({client: reason}))
    worker = Worker(cast("Any", SimpleNamespace(broker=broker)), 7)
    worker.clients = cast("Any", {1: 1, 2: 2})
    for n in range(1000):
        worker.remove_client(1 + n, f"reason {n}")
        worker.remove_client(1, f"reason {n}")
    assert len(jobs) == 2
    for job in jobs:
        job()
    assert ended == {1: "reason 0", 2: "reason 1"}
    assert not worker.clients


def test_client_for_whom_its_worker_has_no_descriptors_is_told_and_the_others_go_on(shared: Shared) -> None:
    def is_told() -> bool:  # or not, if the worker has just closed some, of the client before
        with no_more_files(shared.worker):
            session.run(None, X)
            try:
                nnburst.connect(shared.address).close()
            except nnburst.NNBurstError as error:
                return f"pid {shared.worker}) has as many open files" in str(error)
        return False

    with nnburst.connect(shared.address) as service, service.session("same") as session:
        session.run(None, X)
        until(is_told)
    assert re.search(rf"process {os.getpid()} of user {os.getuid()} is refused: .*open files", shared.log.read_text())
    nnburst.connect(shared.address).close()


def test_broker_survives_whatever_a_worker_may_call(shared: Shared) -> None:
    def served() -> bool:
        with contextlib.suppress(nnburst.NNBurstError):  # of the last worker, which is just ending
            attack(shared.address, 0)
            return True
        return False

    dice = random.Random(25)
    calls = [msgspec.inspect.type_info(wire_page.struct(call.name)) for call in CALLS if call.side is Side.CLIENT]
    with nnburst.connect(shared.address) as service, service.session("same") as session:
        for _ in range(3):
            messages: list[str] = []
            while len(messages) < 40:
                with contextlib.suppress(OverflowError):
                    body = encoded(Values(dice).of(dice.choice(calls)))
                    messages += [(header(dice.choice([0, 7])) + body).hex()] * (len(body) < 150)
            with contextlib.suppress(nnburst.NNBurstError, AssertionError):
                attack(shared.address, shared.pid, *messages)
            session.run(None, X)
    until(served, "no worker serves its user again")
