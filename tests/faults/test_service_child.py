"""A service child: start, orderly end, and everything that goes wrong on the way."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import Memory
from nnburst.errors import BadState, DeviceUnavailable, ErrorStatus, InvalidArgument, MissedDeadline, ResourceExhausted
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.process.command import BOOTSTRAP
from nnburst.service.process.launch import start_child
from nnburst.service.process.options import ServiceOptions
from nnburst.testing import inject
from support import ROOT
from support.models import request_on, tiny_model
from support.processes import Client, descriptors, no_more_files, stop, wait_gone
from support.waiting import PATIENCE


def test_a_child_runs_a_model_and_is_reaped() -> None:
    with start_child() as service, Memory.ashmem(512) as pool:
        pid = service.pid
        assert pid != os.getpid()
        assert service.alive
        assert [device.name for device in service.devices] == ["nnburst-reference"]
        device = service.devices[0]
        model = tiny_model(256)
        assert device.get_supported_operations(model) == (True,)
        pool.array(np.float32, (64,))[:] = 1
        with device.prepare_model(model) as prepared:  # type: ignore[attr-defined]
            assert prepared.execute_synchronously(request_on(pool))[0] is ErrorStatus.NONE
        assert np.array_equal(pool.array(np.float32, (64,), 256), np.arange(64) + 1)
    assert not service.alive
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    service.close()
    with pytest.raises(BadState):
        device.prepare_model(model)


@pytest.mark.check
def test_an_unknown_device_is_said_with_the_child_s_own_words() -> None:
    with pytest.raises(DeviceUnavailable, match=r"^the service for no-such did not start:\n.*no device 'no-such'"):
        start_child(["no-such"])


def test_no_device_at_all_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument):
        start_child([])


def test_a_child_that_crashes_on_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nsys.stderr.write('aargh\\n')\nos.kill(os.getpid(), 6)")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(DeviceUnavailable, match=r"killed by SIGABRT:\n.*aargh"):
        start_child(env=env)


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnburst.service.connection.transport.LEAVING", 0.05)
    (tmp_path / "sitecustomize.py").write_text("import threading\nthreading.Event().wait()")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(MissedDeadline, match=r"did not start within 0\.05 s"):
        start_child(env=env, timeout=0.05)


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    return dict(part.split("=", 1) for part in Path(f"/proc/{pid}/environ").read_text().split("\0") if part)


@pytest.mark.check
def test_telemetry_of_a_library_is_off_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    for env, value in ((None, "1"), (dict(os.environ), "1"), (os.environ | {"ORT_DISABLE_TELEMETRY": "0"}, "0")):
        with start_child(["nnburst-noop"], env=env) as service:
            assert environment(service.pid)["ORT_DISABLE_TELEMETRY"] == value


WARNING = "WARNING: a fault is injected at prepare: delay"
INFO = "INFO: a fault is ordered at prepare: delay"


def make_it_log(service: ServiceConnection) -> None:
    """A line at each of two levels."""
    inject(service, at="prepare", delay=0.0)
    service.devices[0].prepare_model(tiny_model(256))


@pytest.mark.parametrize(
    ("level", "logged"), [(None, {WARNING}), ("Info", {WARNING, INFO}), (10, {WARNING, INFO}), ("error", set())]
)
def test_log_goes_to_the_file_from_the_level_on(level: Any, logged: set[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    options = {} if level is None else {"log_level": level}
    with start_child(["nnburst-noop"], faults=True, log=log, **options) as service:
        make_it_log(service)
    before, *lines = log.read_text().splitlines()
    assert before == "before"
    said = {line.partition(": ")[2] for line in lines}
    assert {text for text in said if not text.startswith("INFO: sandbox")} == logged


def test_warnings_go_to_the_client_s_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with start_child(["nnburst-noop"], faults=True) as service:
        make_it_log(service)
    assert WARNING in capfd.readouterr().err


@pytest.mark.parametrize("level", ["loud", "", -1, 51, None, 1.5])
def test_unknown_log_level_is_an_invalid_argument(level: Any) -> None:
    with pytest.raises(InvalidArgument, match="choose 'debug'"):
        start_child(["nnburst-noop"], log_level=level)


@pytest.mark.parametrize("log", ["/nowhere/log", "/", "a\0b", 1.5])
def test_log_that_cannot_be_written_is_an_invalid_argument(log: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written"):
        start_child(["nnburst-noop"], log=log)


@pytest.mark.check
@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "3"}])
def test_numeric_libraries_get_one_thread_unless_the_user_says_otherwise(given: dict[str, str]) -> None:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if name not in names} | given
    with start_child(["nnburst-noop"], env=env) as service:
        there = environment(service.pid)
    assert {name: there[name] for name in names if name in there} == (given or dict.fromkeys(names, "1"))


@pytest.mark.check
def test_ctrl_c_in_the_terminal_does_not_reach_the_child() -> None:
    with start_child(["nnburst-noop"]) as service:
        assert os.getsid(service.pid) != os.getsid(0)
        os.kill(service.pid, signal.SIGINT)
        service.devices[0].prepare_model(tiny_model(256))


def test_the_child_inherits_nothing_but_its_socket() -> None:
    secret = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(secret, True)
    with start_child(["nnburst-noop"]) as service:
        links = descriptors(service.pid)
    os.close(secret)
    assert links.count("/dev/null") <= 3  # stdin, and stdout and stderr under some test runners
    assert not any("child-stderr" in link for link in links)


def test_a_service_that_is_dropped_ends() -> None:
    service = start_child(["nnburst-noop"])
    pidfd = os.pidfd_open(service.pid)
    del service
    gc.collect()
    wait_gone(pidfd)


LEAVES = {
    "without close": "",
    "by an exception": "raise SystemExit(0)",
    "in a forked child first": "import os\nif os.fork() == 0: raise SystemExit(0)\nos.wait()",
    "with a waiting thread": (
        "import threading\n"
        "threading.Thread(target=service.devices[0].prepare_model, args=(tiny_model(256),), daemon=True).start()\n"
        "fault.wait()"
    ),
}


@pytest.mark.check
@pytest.mark.parametrize("how", LEAVES)
def test_a_client_that_just_ends_takes_its_service_along(how: str) -> None:
    program = (
        "import sys\nfrom support.models import tiny_model\nfrom nnburst.service.process.launch import start_child\n"
        "from nnburst.testing import inject\n"
        "service = start_child(['nnburst-noop'], faults=True)\n"
        "fault = inject(service, at='prepare', freeze='call')\n"
        f"print(service.pid, flush=True)\nsys.stdin.read()\n{LEAVES[how]}\n"
    )
    client = Client(program)
    assert client.finish() == 0
    wait_gone(client.pidfds[0])


@pytest.mark.check
@pytest.mark.parametrize("starter", ["main thread", "thread that has ended"])
def test_a_child_that_is_stopped_goes_with_its_client_that_is_killed(starter: str) -> None:
    start = {
        "main thread": "service = start_child(['nnburst-noop'])",
        "thread that has ended": (
            "from concurrent.futures import ThreadPoolExecutor\n"
            "with ThreadPoolExecutor(1) as pool: service = pool.submit(start_child, ['nnburst-noop']).result()"
        ),
    }[starter]
    program = (
        "import sys\nfrom support.models import tiny_model\nfrom nnburst.service.process.launch import start_child\n"
        f"{start}\nprint(service.pid, flush=True)\n"
        "for line in sys.stdin: print(service.devices[0].status.name, flush=True)\n"
    )
    client = Client(program)
    assert client.process.stdout is not None
    client.say()
    assert client.process.stdout.readline() == "AVAILABLE\n"
    stop(client.pids[0])
    client.process.kill()
    client.finish()
    wait_gone(client.pidfds[0])


def test_a_child_whose_parent_is_another_process_does_not_serve() -> None:
    import socket

    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        options = ServiceOptions(("nnburst-noop",), socket=b.fileno(), parent=1)
        command = [sys.executable, BOOTSTRAP, "nnburst.service.process.child", str(options)]
        done = subprocess.run(
            command, pass_fds=[b.fileno()], timeout=PATIENCE, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
        )
    assert done.returncode == 0


REMEDY = r"RLIMIT_NOFILE where it is started: `ulimit -n`, LimitNOFILE="


@pytest.mark.parametrize("side", ["this process", "the service"])
def test_limit_on_open_files_says_whose_it_is_and_how_to_raise_it(side: str) -> None:
    with nnburst.launch() as service, service.session(tiny_model(256)):
        pid = {"this process": os.getpid(), "the service": service.pid}[side]
        with no_more_files(pid), pytest.raises(ResourceExhausted, match=rf"{side} \(pid {pid}\) has .*{REMEDY}"):
            service.session(tiny_model(256))


def test_limit_on_open_files_of_a_process_that_cannot_start_a_service_is_said() -> None:
    with no_more_files(os.getpid()), pytest.raises(ResourceExhausted, match=rf"\(pid {os.getpid()}\) has .*{REMEDY}"):
        start_child()
