"""What the process of a user's models takes is limited by the kernel, or by the broker that looks at it."""

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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import nnburst
from nnburst.errors import DeadObject, ResourceExhausted
from nnburst.service.host.quotas import PER_USER
from nnburst.service.process import limited_log, workers
from nnburst.service.process.workers import Isolation, Worker, WorkerPool
from nnburst.watch.usage import usage_of
from support.models import relu
from support.processes import worker_of, workers_of
from support.services import Shared, run_command
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
    shared = start("--quota", "user.process_fds=300")
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        limits = "Max open files +300 +300 "
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

ended = backoff.Backoff.ended
backoff.Backoff.ended = lambda pauses, lived: ended(pauses, 0.0)
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
    start: Callable[..., Shared],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    home: str,
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
