"""What a process of a user's models takes: limits by the kernel, its groups, and the broker that looks at it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import nnburst
from nnburst.errors import DeadObject, NNBurstError, ResourceExhausted
from nnburst.service.host.quotas import PER_USER
from nnburst.service.process import limited_log, workers
from nnburst.service.process.cgroup import NICENESS
from nnburst.service.process.workers import Isolation, Worker, WorkerPool
from nnburst.watch.usage import usage_of
from support.models import relu
from support.processes import worker_of, workers_of
from support.services import Shared, run_command, shared_service
from support.users import as_root
from support.waiting import until

pytestmark = pytest.mark.check

X = {"x": np.ones((1, 4), np.float32)}
FUNCTIONS = """
import os, sys
import numpy as np
from nnburst.devices.function import Tensor, declare

@declare(inputs=[Tensor('n', 'int64', ())], outputs=[Tensor('y', 'int64', ())])
def chatter(n):
    os.write(2, b'\\x1b[2Jcleared\\n')
    for number in range(int(n)):
        print('chatter', number)
    sys.stdout.flush()
    return n
"""


@pytest.mark.representative
def test_process_of_a_users_models_may_open_so_many_descriptors(start: Callable[..., Shared]) -> None:
    shared = start("--quota", "user.process_fds=200")
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        limits = "Max open files +200 +200 "
        assert re.search(limits, Path(f"/proc/{worker_of(session)}/limits").read_text())
        assert not re.search(limits, Path(f"/proc/{service.pid}/limits").read_text())


def test_process_with_too_many_threads_ends_and_its_clients_know_why(start: Callable[..., Shared]) -> None:
    shared = start("--quota", "user.process_threads=2")
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        ended = worker_of(session)
        with pytest.raises(DeadObject, match=r"has \d+ threads, and may have 2 \(.*--quota user\.process_threads=N\)"):
            until(lambda: not session.run(None, X), "it may have more")
        nnburst.connect(shared.address).close()
        until(lambda: not Path(f"/proc/{ended}").exists())
    assert "and may have 2" in shared.log.read_text()


def test_flood_of_lines_does_not_fill_the_log(start: Callable[..., Shared], tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    shared = start(f"{tmp_path}/functions.py:chatter", "--quota", "user.log_lines=20")
    with nnburst.connect(shared.address) as service, service.session("chatter") as session:
        session.run(None, {"n": np.array(30_000)})
    shared.end()
    log = shared.log.read_text()
    assert "\x1b" not in log
    assert log.splitlines().count(" [2Jcleared") == 1
    left_out = re.findall(r"^(\d+) lines from the worker of all users \(process \d+\), like those before,", log, re.M)
    assert 10 < log.count("chatter ") <= 20 * (len(left_out) + 1)  # of each period
    assert sum(map(int, left_out)) + log.count("chatter ") >= 30_000


NOTED = """
import time
from types import SimpleNamespace
from nnburst._core import backoff
from nnburst.service.process import workers

def note(seconds):
    with open({file!r}, "a") as file:
        print(seconds, file=file)

ended = backoff.Backoff.begin_pause
backoff.Backoff.begin_pause = lambda pauses, lived: ended(pauses, 0.0)
backoff.time = SimpleNamespace(monotonic=lambda: 0.0)
workers.time = SimpleNamespace(monotonic=time.monotonic, sleep=note)
"""
"""Has a broker write down how long it would wait before a start, as if no process lived for a while."""


def noted_in(directory: Path) -> str:
    return f"exec({NOTED.format(file=str(directory / 'pauses'))!r})"


def noted(directory: Path) -> list[float]:
    return [float(seconds) for seconds in (directory / "pauses").read_text().split()]


def die(session: nnburst.Session) -> None:
    os.kill(worker_of(session), signal.SIGKILL)
    with pytest.raises(DeadObject):
        until(lambda: not session.run(None, X))


def test_users_whose_process_dies_again_and_again_wait_longer_each_time(
    start: Callable[..., Shared], tmp_path: Path
) -> None:
    with nnburst.connect(start(before=noted_in(tmp_path)).address) as service:
        for _ in range(5):
            with service.session(relu((1, 4))) as session:
                die(session)
    assert noted(tmp_path) == [0, 0.1, 0.2, 0.4, 0.8]


def test_connection_that_ends_well_does_not_spare_its_user_the_wait_for_those_that_die(
    start: Callable[..., Shared], tmp_path: Path
) -> None:
    shared = start("--isolate", "connection", before=noted_in(tmp_path))
    with nnburst.connect(shared.address) as first:
        for _ in range(3):
            with nnburst.connect(shared.address) as service, service.session(relu((1, 4))):
                pass
            until(lambda: workers_of(shared.pid) == {first.pid})
            with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
                die(session)
    assert noted(tmp_path) == [0, 0, 0.1, 0.1, 0.2, 0.2]


@pytest.mark.parametrize("home", ["shared", "own"])
def test_session_that_restarts_waits_while_its_process_dies_again_and_again(
    start: Callable[..., Shared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    pauses: list[float] = []
    still = SimpleNamespace(monotonic=lambda: 1000.0, sleep=pauses.append)
    monkeypatch.setattr("nnburst.runtime.service.time", still)
    monkeypatch.setattr("nnburst._core.backoff.time", still)
    if home == "shared":
        opened = nnburst.connect(start(before=noted_in(tmp_path)).address)
    else:
        opened = nnburst.launch(devices=["nnburst-reference"])
    with opened as service, service.session(relu((1, 4)), on_death="restart") as session:
        for number in range(5):
            os.kill(worker_of(session), signal.SIGKILL)
            while len(session.restarts) == number:
                with contextlib.suppress(DeadObject):
                    session.run(None, X)
    assert (pauses if home == "own" else noted(tmp_path)) == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6])


def test_pipe_of_the_log_that_another_process_keeps_is_read_no_more_once_the_worker_has_ended(
    start: Callable[..., Shared],
) -> None:
    shared = start()

    def held_by_the_broker() -> Counter[str]:
        return Counter({kind: len(os.listdir(f"/proc/{shared.pid}/{kind}")) for kind in ("task", "fd")})

    with nnburst.connect(shared.address) as service:
        before = held_by_the_broker()
        with service.session(relu((1, 4))) as session, contextlib.suppress(DeadObject):
            worker = worker_of(session)
            with open(f"/proc/{worker}/fd/2", "wb", buffering=0) as kept:  # as a client to which it was sent
                kept.write(b"last words")
                os.kill(worker, signal.SIGKILL)
                until(lambda: "last words" in shared.log.read_text())
                until(lambda: held_by_the_broker() <= before, lambda: f"{before} before, now {held_by_the_broker()}")
                with pytest.raises(BrokenPipeError):
                    kept.write(b"more words\n")


# ---- nnburst top -----------------------------------------------------------------------------------------------------


def top(*which: str) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = json.loads(run_command("top", "--once", "--json", *which).stdout)
    return reports


def threads_of(pid: int) -> int:
    usage = usage_of(pid)
    assert usage is not None
    return usage.threads


def test_top_shows_what_each_process_and_each_client_takes_and_may_take(start: Callable[..., Shared]) -> None:
    shared = start("--quota", "user.process_fds=300", "--quota", "fds=500")
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        session.run(None, X)
        own = worker_of(session)
        until(lambda: top(str(own))[0]["process"]["threads"] == threads_of(own), "other threads are shown")
        reports = {each["pid"]: each for each in top(str(own), str(service.pid))}
        assert reports.keys() == {own, service.pid}, "the broker is no service"
        process, (client,) = reports[own]["process"], reports[own]["clients"]
        most = {name: process[f"most_{name}"] for name in ("fds", "threads", "log_lines", "bytes")}
        assert most == {"fds": 300, "threads": 8192, "log_lines": 100, "bytes": 0}
        assert process["bytes"] > 1 << 20
        assert (client["client_pid"], client["client_uid"]) == (os.getpid(), os.geteuid())
        assert 0 < client["fds"] < client["most_fds"] == 500
        assert client["bytes"] > 0
        assert reports[service.pid]["process"]["most_fds"] == 0, "it is not one user's"
        session.close()
        until(lambda: top(str(own))[0]["clients"][0]["bytes"] == 0, "what was given back counts")
        table = run_command("top", "--once", str(own)).stdout
        assert re.search(rf"of user {os.geteuid()} \({own}\) .* / 8,192 .* / 300 .*\(100 in 10 s\)", table), table
    until(lambda: not top(str(own))[0]["clients"], "who has gone is shown")


def test_lines_of_the_log_are_counted_where_a_model_cannot_change_it(
    start: Callable[..., Shared], tmp_path: Path
) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    shared = start(f"{tmp_path}/functions.py:chatter")
    with nnburst.connect(shared.address) as service, service.session("chatter") as session:
        session.run(None, {"n": np.array(2000)})
        until(lambda: top(str(service.pid))[0]["process"]["log_lines"] >= 2001)


# ---- in process ------------------------------------------------------------------------------------------------------


@pytest.mark.representative
def test_process_that_cannot_be_looked_at_is_looked_at_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "own_groups", lambda: None)
    service = Mock(pid=os.getpid())
    pool = WorkerPool(Mock(), lambda *_, **__: service, "name", [], False, lambda _: None, Isolation.USER, {})
    watched = pool._all[7] = Worker(pool, 7)
    watched.service, watched.clients = service, {1: Mock()}
    looks: list[int] = []
    monkeypatch.setattr(workers, "usage_of", looks.append)
    now = time.monotonic()
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(2):
        assert pool.look() > now, "its broker looks without pause"
    now = pool.look()
    pool.look()
    assert looks == [service.pid] * 2
    pool.close()


@pytest.mark.representative
def test_output_without_an_end_of_line_is_cut_into_lines_as_it_comes() -> None:
    said = 2 * limited_log._BYTES + 5
    reading, writing = os.pipe()
    pidfd = os.pidfd_open(os.getpid())
    with open(reading, "rb", 0), open(pidfd, "rb", 0):
        with open(writing, "wb", 0) as file:
            assert file.write(b"x" * said) == said
        assert list(map(len, limited_log._lines(reading, pidfd))) == [limited_log._BYTES, limited_log._BYTES, 5]


@pytest.mark.representative
def test_process_that_has_ended_has_so_many_last_words() -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(["true"])
    with open(reading, "rb", 0), open(os.pidfd_open(process.pid), "rb", 0) as pidfd, open(writing, "wb", 0) as other:
        process.wait()
        fcntl.fcntl(other, fcntl.F_SETPIPE_SZ, 4 * limited_log._LAST_WORDS)
        other.write(b"x\n" * 2 * limited_log._LAST_WORDS)  # and it goes on
        read = 2 * len(list(limited_log._lines(reading, pidfd.fileno())))
    assert limited_log._LAST_WORDS <= read < limited_log._LAST_WORDS + limited_log._BYTES


@pytest.mark.representative
def test_worker_that_cannot_be_watched_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    gone: list[str] = []
    row = SimpleNamespace(count=lambda name, n: None, close=lambda: gone.append("row"))
    service = SimpleNamespace(pid=os.getpid(), close=lambda: gone.append("process"))
    page = SimpleNamespace(open=lambda *_, **__: row)
    pool: Any = SimpleNamespace(broker=None, groups=None, quotas=PER_USER, page=page, start=lambda *_, **__: service)
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch, pytest.raises(ResourceExhausted):
        patch.setattr(os, "pidfd_open", refuse)
        Worker(pool, 7).launch([], [])
    assert gone == ["row", "process"]
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.representative
def test_usage_is_what_the_kernel_counts() -> None:
    begin = usage_of(os.getpid())
    assert begin is not None
    held, fds = bytearray(64 << 20), [os.dup(0) for _ in range(10)]
    until(lambda: (now := usage_of(os.getpid())) and now.processor_ns > begin.processor_ns + 20_000_000)
    now = usage_of(os.getpid())
    assert now is not None
    assert len(held) // 2 < now.bytes - begin.bytes
    assert now.fds == begin.fds + len(fds)
    assert now.threads == len(os.listdir("/proc/self/task"))
    for fd in fds:
        os.close(fd)
    assert usage_of(2**22 + 1) is None


# ---- groups of the kernel's ----------------------------------------------------------------------------------------


@pytest.fixture
def delegated() -> Iterator[Path]:
    """A group that is nobody's yet, marked as by a service manager."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    node = next((Path(place) / f"nnburst-{os.getpid()}" for _, place, kind, *_ in mounts if kind == "cgroup2"), None)
    if node is None:
        pytest.skip("needs a cgroup v2 hierarchy")
    try:
        node.mkdir()
        os.setxattr(node, "user.delegate", b"1")
    except OSError as error:
        with contextlib.suppress(OSError):
            node.rmdir()
        pytest.skip(f"needs a cgroup v2 hierarchy that it may write: {error}")
    try:
        yield node
    finally:
        for group in [*filter(Path.is_dir, node.iterdir()), node]:
            until(lambda: is_removed(group), f"{group} is not empty")  # noqa: B023


@pytest.fixture
def grouped(delegated: Path, tmp_path: Path) -> Iterator[Callable[..., Shared]]:
    def enter() -> None:
        (delegated / "cgroup.procs").write_text(str(os.getpid()))

    with contextlib.ExitStack() as stack:
        options = "--device", "nnburst-reference"
        yield lambda *more: stack.enter_context(shared_service(tmp_path, *options, *more, preexec_fn=enter))


def is_removed(group: Path) -> bool:
    """Whether it is gone, once its last process is."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def members(group: Path) -> set[int]:
    return {int(line) for line in (group / "cgroup.procs").read_text().split()}


def groups_of(node: Path) -> dict[str, set[int]]:
    found = {}
    for group in filter(Path.is_dir, node.iterdir()):
        with contextlib.suppress(OSError):  # it has just gone with its last process
            found[group.name] = members(group)
    return found


def needs(node: Path, controller: str) -> None:
    if controller not in (node / "cgroup.controllers").read_text().split():
        pytest.skip(f"needs the controller {controller} in cgroup v2")


@as_root
def test_workers_are_in_groups_of_their_users_which_go_with_them(
    grouped: Callable[..., Shared], delegated: Path
) -> None:
    shared = grouped("--isolate", "connection")
    assert shared.ready["accounts"].startswith(f"{delegated} ")
    own = f"user-{os.geteuid()}"
    with nnburst.connect(shared.address) as first, nnburst.connect(shared.address) as second:
        with first.session(relu((1, 4))) as session, second.session(relu((1, 4))) as other:
            workers = {worker_of(session), worker_of(other)}
            groups = groups_of(delegated)
            assert (groups[own], groups["named"]) == (workers, {first.pid})
            assert shared.pid in groups["broker"]
            assert not members(delegated)
            os.kill(worker_of(session), signal.SIGKILL)
            with pytest.raises(DeadObject):
                until(lambda: not session.run(None, X))
            until(lambda: groups_of(delegated)[own] == {worker_of(other)})
            other.run(None, X)
    until(lambda: own not in groups_of(delegated), lambda: f"{groups_of(delegated)}")
    shared.end()
    assert groups_of(delegated) == {"broker": set()}


@as_root
def test_kernel_ends_the_worker_that_takes_too_much_memory_and_its_clients_know_why(
    grouped: Callable[..., Shared], delegated: Path
) -> None:
    needs(delegated, "memory")
    shared = grouped("--quota", f"user.process_bytes={256 << 20}")
    b = nnburst.ModelBuilder()
    x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 4))
    b.output("y", b.tile(x, np.array([1 << 11, 1536], np.int32)))  # 48 MiB
    with nnburst.connect(shared.address) as service:
        with service.session(relu((1, 4))) as session:
            worker = worker_of(session)
            assert (delegated / f"user-{os.geteuid()}" / "memory.max").read_text().split() == [str(256 << 20)]
            with pytest.raises(DeadObject, match=r"went over process_bytes"), service.session(b.build()) as greedy:
                executions = [greedy.bind() for _ in range(8)]  # in memory that the worker is the first to use
                for execution in executions:
                    execution.run()
        assert service.alive
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        session.run(None, X)
        assert worker_of(session) != worker
    assert "went over process_bytes" in shared.log.read_text()


@as_root
def test_kernel_refuses_threads_that_a_user_may_not_have(grouped: Callable[..., Shared], delegated: Path) -> None:
    needs(delegated, "pids")
    shared = grouped("--quota", "user.process_threads=2")
    with nnburst.connect(shared.address) as service:
        with pytest.raises(NNBurstError) as refused, service.session(relu((1, 4))):
            pass
        assert not isinstance(refused.value, DeadObject)
        assert service.alive


@as_root
def test_kernel_shares_the_processors_by_quota_and_niceness(grouped: Callable[..., Shared], delegated: Path) -> None:
    needs(delegated, "cpu")
    shared = grouped("--quota", "user.processors=1")
    group = delegated / f"user-{os.geteuid()}"
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        assert (group / "cpu.weight.nice").read_text().strip() == str(NICENESS)
        most = "100000" if (os.cpu_count() or 1) > 1 else "max"
        assert (group / "cpu.max").read_text().split() == [most, "100000"]
        session.run(None, X)
