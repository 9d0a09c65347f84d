"""A shared service gives each user a process for the models that it brings: what one does to it, others do not feel."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import Mock

import numpy as np
import pytest

import nnburst
from nnburst.errors import DeadObject, DeviceUnavailable, InvalidArgument
from nnburst.service.client.connection import ServiceConnection, connect_to
from nnburst.service.process import workers
from nnburst.service.process.discovery import dial
from nnburst.service.process.workers import Isolation, WorkerPool
from nnburst.service.wire import protocol
from support.intruder import attack, hostile_service
from support.models import relu
from support.processes import (
    children,
    command_of,
    no_more_files,
    open_files,
    stop,
    stopped,
    wait_gone,
    worker_of,
    workers_of,
)
from support.services import COMMAND, RawConnection, Shared, header, run_command, save_scaling
from support.users import GUEST, as_root, as_user
from support.waiting import PATIENCE, Background, until
from support.ways_out import needs_walls

pytestmark = pytest.mark.check

X = {"x": np.ones((1, 4), np.float32)}


def test_models_of_a_client_run_in_another_process_than_named_ones(start: Callable[..., Shared]) -> None:
    shared = start()
    with nnburst.connect(shared.address) as service, nnburst.connect(shared.address) as other:
        assert workers_of(shared.pid) == {service.pid}, "a worker was started before it is needed"
        with service.session(relu((1, 4))) as session, other.session(relu((1, 4))) as same_user:
            assert session.run(None, X)[0].tolist() == [[1.0] * 4]
            own = worker_of(session)
            assert own == worker_of(same_user) != service.pid == other.pid
            assert workers_of(shared.pid) == {service.pid, own}


def test_each_connection_has_a_process_of_its_own_if_that_is_asked(start: Callable[..., Shared]) -> None:
    shared = start("--isolate", "connection")
    with nnburst.connect(shared.address) as service, nnburst.connect(shared.address) as other:
        with (
            service.session(relu((1, 4))) as one,
            service.session(relu((1, 4))) as two,
            other.session(relu((1, 4))) as a,
        ):
            assert worker_of(one) == worker_of(two)
            assert len({service.pid, worker_of(one), worker_of(a)}) == 3
        shared_one = service.pid
    until(lambda: workers_of(shared.pid) == {shared_one}, "a worker without its connection stays")


@pytest.mark.representative
def test_files_that_change_while_a_successor_reads_them_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "own_groups", lambda: None)
    broker, service, jobs = Mock(), Mock(pid=os.getpid()), SimpleQueue[Callable[[], None]]()
    broker.post = jobs.put
    pool = WorkerPool(broker, lambda *_, **__: service, "name", [], True, lambda _: None, Isolation.NONE, {})
    (first,) = pool
    assert not broker.reload_models.called
    pool.retire(first)
    jobs.get(timeout=PATIENCE)()
    assert broker.reload_models.call_count == 1
    pool.close()


def test_limit_of_processors_is_refused_where_the_kernel_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for groups in None, Mock(held={"memory"}):
        monkeypatch.setattr(workers, "own_groups", lambda groups=groups: groups)
        with pytest.raises(DeviceUnavailable, match=r"--quota user.processors: .*\(Delegate=yes"):
            WorkerPool(Mock(), Mock(), "name", [], True, Mock(), Isolation.USER, {"processors": 1})


def test_all_models_share_a_process_without_isolation(start: Callable[..., Shared]) -> None:
    shared = start("--isolate", "none")
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        assert worker_of(session) == service.pid
        assert workers_of(shared.pid) == {service.pid}


@pytest.mark.representative
def test_killed_worker_takes_the_models_of_its_user_alone(start: Callable[..., Shared], tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(
        "from nnburst.devices.function import Tensor, declare\n"
        "@declare(inputs=[Tensor('x', 'float32', (1, 4))], outputs=[Tensor('y', 'float32', (1, 4))])\n"
        "def same(x): return x\n"
    )
    shared = start(f"{tmp_path}/functions.py:same")
    with nnburst.connect(shared.address) as service, service.session("same") as named:
        with service.session(relu((1, 4))) as lost, service.session(relu((1, 4)), on_death="restart", retry=3) as kept:
            first = worker_of(lost)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(DeadObject, match=rf"the worker of user \d+ \(process {first}\):.*SIGKILL") as death:
                until(lambda: not lost.run(None, X))  # on a CPU of its own it may answer once more
            assert "the service ended: " in str(death.value)
            assert kept.run(None, X)[0].tolist() == [[1.0] * 4]
            assert named.run(None, X)[0].tolist() == [[1.0] * 4]
        with service.session(relu((1, 4))) as again:
            assert worker_of(again) != first
    assert "was killed by SIGKILL" in shared.log.read_text()


def test_killed_worker_of_named_models_is_started_again(start: Callable[..., Shared]) -> None:
    shared = start()
    with nnburst.connect(shared.address) as service:
        first = service.pid
        os.kill(first, signal.SIGKILL)
        with pytest.raises(DeadObject, match=r"the worker of all users .* was killed by SIGKILL"):
            until(lambda: service.session(relu((1, 4))).close(), "it lives")
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        assert service.pid != first
        session.run(None, X)


def test_idle_worker_ends_and_another_one_serves_the_next_model(start: Callable[..., Shared]) -> None:
    shared = start(before="from nnburst.service.process import workers; workers._IDLE = 0.1")
    with nnburst.connect(shared.address) as service:
        with nnburst.connect(shared.address) as first, first.session(relu((1, 4))) as session:
            ended = worker_of(session)
        until(lambda: ended not in workers_of(shared.pid), "it stays")
        with service.session(relu((1, 4))) as session:
            assert worker_of(session) != ended


def test_killed_broker_leaves_nothing(start: Callable[..., Shared]) -> None:
    shared = start()
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        workers = {os.pidfd_open(pid) for pid in workers_of(shared.pid)}
        assert len(workers) == 2
        shared.process.kill()
        shared.process.wait()
        for worker in workers:
            wait_gone(worker)
        with pytest.raises(DeadObject):
            session.run(None, X)


def test_client_that_does_not_ask_for_a_process_of_its_own_has_no_models_compiled(shared: Shared) -> None:
    sock = dial(shared.address, PATIENCE)
    with ServiceConnection(sock) as service, pytest.raises(DeviceUnavailable, match="in a process of its user's"):
        service.devices[0].prepare_model(relu((1, 4)))


def test_orders_of_a_broker_are_refused_to_clients(shared: Shared) -> None:
    with connect_to(shared.address) as service:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, pytest.raises(InvalidArgument, match="only the broker"):
            service.connection.call(protocol.TakeClient(1, has_pidfd=False), [theirs.fileno()])


@pytest.mark.parametrize("isolation", ["user", "none"])
def test_first_message_that_is_no_hello_costs_its_sender_the_connection_and_no_worker_anything(
    start: Callable[..., Shared], isolation: str
) -> None:
    before = "from nnburst.service.process import broker; broker.LEAVING = 0.1"  # for one that does not go
    shared = start("--isolate", isolation, before=before)
    for sent in b"", b"x", b"\0" * 8, b"\0" * 8 + b"\xff" * 4000, b"\0" * 60_000:
        with stopped(shared.worker), dial(shared.address, PATIENCE) as sock:
            sock.setblocking(True)
            sock.settimeout(PATIENCE)
            sock.send(sent)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1 << 16):
                    pass
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        session.run(None, X)


@pytest.mark.parametrize("own", [True, False])
def test_hello_with_descriptors_is_refused_and_they_are_kept_nowhere(shared: Shared, own: bool) -> None:
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        session.run(None, X)
        pids = {shared.pid, *workers_of(shared.pid)}
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with open(reading, "rb", buffering=0) as held, RawConnection(shared) as sock:
            sock.send(header(1, n_fds=1), protocol.encode(protocol.Hello(protocol.VERSION, 1, own=own)), [writing])
            os.close(writing)
            assert b"hello needs 0 descriptors, 1 came" in sock.answer()
            assert sock.answer() == b""
            until(lambda: held.read() == b"", "a process keeps the descriptor")
        assert workers_of(shared.pid) | {shared.pid} == pids
        session.run(None, X)


def test_closed_connection_does_not_count_although_its_worker_has_not_noticed(start: Callable[..., Shared]) -> None:
    shared = start("--quota", "user.connections=1")
    (worker,) = workers_of(shared.pid)
    try:
        with RawConnection(shared) as first:
            first.greet()
            os.kill(worker, signal.SIGSTOP)
            before = open_files(shared.pid)
        with RawConnection(shared) as second:
            until(lambda: open_files(shared.pid) - before, "it is not accepted")
            os.kill(worker, signal.SIGCONT)
            second.greet()
    finally:
        os.kill(worker, signal.SIGCONT)


def test_broker_without_descriptors_serves_again_when_it_has_some(start: Callable[..., Shared]) -> None:
    shared = start()
    with no_more_files(shared.pid), dial(shared.address, PATIENCE):
        until(lambda: "no connection can be taken" in shared.log.read_text(), "it took it")
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        session.run(None, X)


def test_worker_that_does_not_answer_holds_up_neither_reloads_nor_the_end(
    start: Callable[..., Shared], tmp_path: Path
) -> None:
    save_scaling(tmp_path / "scale.onnx", 2.0)
    before = "from nnburst.service.process import launch; launch._END_OF_A_WORKER = 0.1"
    shared = start("--device", "nnburst-onnxruntime", "--model", f"scale={tmp_path}/scale.onnx", before=before)
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        os.kill(service.pid, signal.SIGSTOP)
        for _ in range(3):
            shared.process.send_signal(signal.SIGHUP)
        with dial(shared.address, PATIENCE) as sock, ServiceConnection(sock, own=True) as own:
            assert own.pid == worker_of(session)
        shared.process.terminate()
        assert shared.process.wait(PATIENCE) == 0


def test_user_whose_model_takes_too_much_memory_has_an_error_and_others_go_on(start: Callable[..., Shared]) -> None:
    shared = start("--quota", f"user.process_bytes={512 << 20}")
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        limits = Path(f"/proc/{worker_of(session)}/limits").read_text()
        assert re.search(rf"Max data size\s+{512 << 20}\s+{512 << 20}", limits)
        assert re.search(r"Max data size\s+unlimited", Path(f"/proc/{service.pid}/limits").read_text())
        b = nnburst.ModelBuilder()
        x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 1, 1, 4))
        b.output("y", b.reduce_sum(b.tile(x, np.array([1, 1, 1 << 13, 1 << 14], np.int32)), [1, 2, 3]))  # 2 GiB
        with pytest.raises(nnburst.NNBurstError), service.session(b.build()) as greedy:
            greedy.run(None, {"x": np.ones((1, 1, 1, 4), np.float32)})
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        session.run(None, X)


# ---- two users -------------------------------------------------------------------------------------------------------


def own_worker(address: str) -> str:
    with nnburst.connect(address) as service, service.session(relu((1, 4))) as session:
        session.run(None, X)
        return str(worker_of(session))


@as_root
@needs_walls
def test_model_of_the_operator_does_not_reach_the_trust_store_of_another_user(open_to_guests: Path) -> None:
    def reaches(directory: str) -> list[str]:
        with contextlib.suppress(OSError):
            os.listdir(directory)
            os.close(os.open(f"{directory}/forged", os.O_CREAT | os.O_WRONLY, 0o600))
            return [directory]
        return []

    with hostile_service(open_to_guests, reaches, "--allow-uid", str(GUEST)) as shared:
        base = str(open_to_guests / "state")
        as_user(GUEST, lambda: str(attack(shared.address, base)))
        (theirs,) = {str(path) for path in open_to_guests.glob(f"**/*user-{GUEST}")}
        assert attack(shared.address, base) == [base]
        assert attack(shared.address, theirs) == []


@needs_walls
def test_datagram_socket_of_a_client_sends_to_paths_alone(open_to_guests: Path) -> None:
    def send(*addresses: str) -> list[int]:
        errors = []
        for address in addresses:
            try:
                outside.sendto(b"x", address)  # type: ignore[name-defined]  # noqa: F821
                errors.append(0)
            except OSError as error:
                errors.append(error.errno or -1)
        return errors

    setup = "import socket\noutside = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)  # as one that a client sends\n"
    path, abstract = f"{open_to_guests}/datagrams", f"\0{open_to_guests}"
    with contextlib.ExitStack() as stack:
        for address in (path, abstract):
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(address)
        shared = stack.enter_context(hostile_service(open_to_guests, send, setup=setup))
        assert attack(shared.address, abstract, path) == [errno.EPERM, 0]


def kick_user(address: str, user: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "kick", address, "--user", user]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_user_who_is_kicked_loses_connections_and_process_and_may_come_again(start: Callable[..., Shared]) -> None:
    shared, uid = start(), os.geteuid()
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        own = os.pidfd_open(worker_of(session))
        stop(worker_of(session))  # it cannot end by itself, as one that is idle does
        done = kick_user(shared.address, str(uid))
        assert done.stdout == f"ended 2 connections of user {uid} to {shared.address}\n", done.stderr
        wait_gone(own)
        with pytest.raises(DeadObject, match=rf"for user {uid} alone, by order of user {uid}"):
            session.run(None, X)
        with pytest.raises(DeadObject):
            service.session(relu((1, 4)))
    own_worker(shared.address)


def test_user_who_is_kicked_while_the_process_starts_leaves_none(start: Callable[..., Shared]) -> None:
    shared, uid = start(), os.geteuid()
    (zygote,) = (pid for pid in children(shared.pid) if b".zygote\0" in command_of(pid))
    with stopped(zygote), dial(shared.address, PATIENCE) as sock:
        opening = Background(lambda: ServiceConnection(sock, own=True))
        said = until(lambda: kick_user(shared.address, str(uid)).stdout, "it is no client")  # it may not have come yet
        assert said == f"ended 1 connection of user {uid} to {shared.address}\n"
        opened = opening.result()
        assert isinstance(opened, DeadObject | DeviceUnavailable) or until(lambda: not opened.alive, "it is connected")
    shared_one, own = shared.worker, int(own_worker(shared.address))
    until(lambda: workers_of(shared.pid) <= {shared_one, own}, "the one that was starting stays")


@pytest.mark.parametrize("hangup", [signal.SIG_DFL, signal.SIG_IGN], ids=["", "nohup"])
def test_process_of_a_user_is_forked(start: Callable[..., Shared], hangup: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, hangup)  # which the service inherits
    try:
        shared = start()
    finally:
        signal.signal(signal.SIGHUP, before)
    (zygote,) = (pid for pid in children(shared.pid) if b".zygote\0" in command_of(pid))
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        assert worker_of(session) in children(zygote)


def test_kick_asks_for_one_whom_it_can_find(shared: Shared) -> None:
    for options, said in (
        (("--user", "no-such-user"), "has no such user"),
        (("--user", str(1 << 32)), "has no such user"),
        (("--user", str(GUEST)), f"user {GUEST} is no client"),
        ((str(os.getppid()),), f"process {os.getppid()} is no client"),
        ((), "the id of a process, or --user"),
        (("--user", "root", "1"), "the id of a process, or --user"),
    ):
        assert said in run_command("kick", shared.address, *options).output
