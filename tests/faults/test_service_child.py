"""A service child: start, orderly end, and everything that goes wrong on the way."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from fault_support import ROOT, WATCHDOG, Client, Steps, request_on, tiny_model, wait_gone

from nnburst.errors import BadState, DeviceUnavailable, ErrorStatus, InvalidArgument, MissedDeadline
from nnburst.memory import Memory
from nnburst.service import _launch, start_child


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path)


def test_a_child_runs_a_model_and_is_reaped() -> None:
    with start_child() as service, Memory.ashmem(512) as pool:
        pid = service.pid
        assert pid != os.getpid()
        assert service.alive
        assert [device.name for device in service.devices] == ["nnburst-reference"]
        device = service.devices[0]
        model = tiny_model()
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


def test_several_children_are_independent() -> None:
    with start_child(["nnburst-noop"]) as a, start_child(["nnburst-noop", "nnburst-reference"]) as b:
        assert a.pid != b.pid
        assert len(b.devices) == 2
        a.close()
        b.devices[0].prepare_model(tiny_model())


def test_an_unknown_device_is_said_with_the_child_s_own_words() -> None:
    with pytest.raises(DeviceUnavailable, match=r"status 1 .*\n.*no device 'no-such'"):
        start_child(["no-such"])


def test_no_device_at_all_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument):
        start_child([])


def test_a_child_that_crashes_on_the_way_is_said(steps: Steps) -> None:
    (steps.directory / "sitecustomize.py").write_text(
        "import os, sys\nsys.stderr.write('aargh')\nos.kill(os.getpid(), 6)"
    )
    env = {**os.environ, "PYTHONPATH": str(steps.directory)}
    with pytest.raises(DeviceUnavailable, match=r"status -6 .*\n.*aargh"):
        start_child(env=env)


def test_a_child_that_takes_too_long_is_ended(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "_EXIT_TIMEOUT", 0.05)
    (steps.directory / "sitecustomize.py").write_text("import threading\nthreading.Event().wait()")
    env = {**os.environ, "PYTHONPATH": str(steps.directory)}
    with pytest.raises(MissedDeadline, match=r"did not start within 0\.05 s"):
        start_child(env=env, timeout=0.05)


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "3"}])
def test_numeric_libraries_get_one_thread_unless_the_user_says_otherwise(given: dict[str, str]) -> None:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if name not in names} | given
    with start_child(["nnburst-noop"], env=env) as service:
        there = dict(
            part.split("=", 1) for part in Path(f"/proc/{service.pid}/environ").read_text().split("\0") if part
        )
    assert {name: there[name] for name in names if name in there} == (given or dict.fromkeys(names, "1"))


def test_ctrl_c_in_the_terminal_does_not_reach_the_child() -> None:
    with start_child(["nnburst-noop"]) as service:
        assert os.getsid(service.pid) != os.getsid(0)
        os.kill(service.pid, signal.SIGINT)
        service.devices[0].prepare_model(tiny_model())


def test_the_child_inherits_nothing_but_its_socket() -> None:
    secret = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(secret, True)
    with start_child(["nnburst-noop"]) as service:
        links = [os.readlink(f"/proc/{service.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{service.pid}/fd")]
    os.close(secret)
    assert links.count("/dev/null") <= 3  # stdin, and stdout and stderr under some test runners
    assert not any("child-stderr" in link for link in links)


def test_a_service_that_is_dropped_ends() -> None:
    service = start_child(["nnburst-noop"])
    pidfd = os.pidfd_open(service.pid)
    del service
    gc.collect()
    wait_gone(pidfd)


def test_a_service_closed_in_a_forked_child_goes_on_in_the_parent() -> None:
    with start_child(["nnburst-noop"]) as service:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with pytest.raises(BadState, match="fork"):
                    service.devices[0].prepare_model(tiny_model())
                assert not service.alive
                service.close()
                del service
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert service.alive
        service.devices[0].prepare_model(tiny_model())


LEAVES = {
    "without close": "",
    "by an exception": "raise SystemExit(0)",
    "in a forked child first": "import os\nif os.fork() == 0: raise SystemExit(0)\nos.wait()",
    "with a waiting thread": (
        "import threading\n"
        "threading.Thread(target=service.devices[0].prepare_model, args=(tiny_model(),), daemon=True).start()\n"
        "steps_wait()"
    ),
}


@pytest.mark.parametrize("how", LEAVES)
def test_a_client_that_just_ends_takes_its_service_along(how: str, steps: Steps) -> None:
    program = (
        "import sys, os\nfrom fault_support import tiny_model\nfrom nnburst.service import start_child\n"
        "def steps_wait(): open(os.environ['NNBURST_TEST_FIFO'], 'rb').read(1)\n"
        f"service = start_child(['test-hooks'])\nprint(service.pid, flush=True)\nsys.stdin.read()\n{LEAVES[how]}\n"
    )
    client = Client(program, steps.env("prepare"))
    assert client.process.stdin is not None
    client.process.stdin.close()
    assert client.finish() == 0
    wait_gone(client.pidfds[0])


def test_a_child_whose_parent_is_another_process_does_not_serve() -> None:
    import socket

    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        command = [
            sys.executable,
            _launch._BOOTSTRAP,
            "--socket",
            str(b.fileno()),
            "--parent",
            "1",
            "nnburst-noop",
        ]
        done = subprocess.run(
            command, pass_fds=[b.fileno()], timeout=WATCHDOG, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
        )
    assert done.returncode == 0


def test_no_thread_is_left_after_close() -> None:
    before = set(threading.enumerate())
    service = start_child(["nnburst-noop"])
    assert set(threading.enumerate()) > before
    service.close()
    assert set(threading.enumerate()) == before
