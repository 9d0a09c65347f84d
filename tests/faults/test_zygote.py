"""The zygote: what its children inherit, what they do not, and everything that goes wrong on the way."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst._core.leaving import LEAVING
from nnburst.devices.interfaces import CacheFiles, CompileJob
from nnburst.errors import DeadObject, DeviceUnavailable, MissedDeadline
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.process import forked
from nnburst.service.process.launch import start_child
from nnburst.testing import inject
from support.models import tiny_model
from support.processes import Client, descriptors, stop, wait_gone
from support.waiting import PATIENCE, Background, until

pytestmark = pytest.mark.check

_FIRST_RUN = """
import sys
import numpy as np
from nnburst.service.process import zygote

zygote._load(sys.argv[1], True)
loaded = set(sys.modules)
from support.models import relu
import nnburst

with nnburst.in_process(devices=[sys.argv[1]]) as service, service.session(relu()) as session:
    session.run(None, {"x": np.zeros(4, np.float32)})
rooms = ("encodings", "nnburst.burst", "nnburst.cache", "nnburst.memory", "nnburst.service", "nnburst.watch")
clients = "nnburst.burst.client", "nnburst.burst.stats"
later = (name for name in sys.modules.keys() - loaded if not name.startswith(clients))
print(sorted(name for name in later if name.startswith(rooms)))
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test has a zygote of its own."""
    forked.end()
    yield
    forked.end()


def zygote() -> int:
    """Its process id."""
    assert forked.current is not None
    return forked.current.process.pid


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def status(pid: int, name: str) -> str:
    """A line of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(name + ":"))


def child() -> ServiceConnection:
    return start_child(["nnburst-noop"])


def test_services_are_forked_from_one_process_without_threads() -> None:
    with child() as a, child() as b:
        assert parent(a.pid) == parent(b.pid) == zygote()
        assert len(os.listdir(f"/proc/{zygote()}/task")) == 1


@pytest.mark.parametrize("device", ["nnburst-reference", "nnburst-onnxruntime"])
def test_zygote_has_imported_all_that_the_first_run_of_a_service_takes(device: str) -> None:
    if device == "nnburst-onnxruntime":
        pytest.importorskip("onnxruntime")
    command = [sys.executable, "-c", _FIRST_RUN, device]
    env = {**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parents[1])}
    assert subprocess.check_output(command, env=env, text=True, timeout=PATIENCE) == "[]\n"


def test_zygote_with_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for _ in range(2):
        with child() as service:
            assert parent(service.pid) == os.getpid()


@pytest.mark.parametrize("warm", [False, True])
def test_onnxruntime_is_loaded_without_a_thread(warm: bool) -> None:
    pytest.importorskip("onnxruntime")
    with start_child(["nnburst-onnxruntime"], warm=warm) as service:
        assert parent(service.pid) == zygote()
        loaded = "libonnxruntime" in Path(f"/proc/{zygote()}/maps").read_text()
        assert loaded is warm
        assert len(os.listdir(f"/proc/{zygote()}/task")) == 1


def test_zygote_imports_for_later_services_what_some_models_need() -> None:
    pytest.importorskip("onnxruntime")
    with start_child(["nnburst-onnxruntime"], warm=True) as first:
        assert "onnx_cpp2py_export" not in Path(f"/proc/{first.pid}/maps").read_text()
        until(lambda: "onnx_cpp2py_export" in Path(f"/proc/{zygote()}/maps").read_text())
        with start_child(["nnburst-onnxruntime"], warm=True) as second:
            assert parent(second.pid) == zygote()
            assert "onnx_cpp2py_export" in Path(f"/proc/{second.pid}/maps").read_text()


def test_service_with_an_environment_is_started_afresh() -> None:
    with start_child(["nnburst-noop"], env=dict(os.environ)) as service:
        assert parent(service.pid) == os.getpid()
    assert forked.current is None


def test_service_with_a_device_of_the_program_is_started_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halves.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    with start_child(["nnburst-noop", "nnburst-function:call=halves:half"]) as service:
        assert parent(service.pid) == os.getpid()
    assert forked.current is None


FUNCTION = """
from nnburst.devices.function import Tensor, declare

@declare(inputs=[Tensor("x", "float32", (4,))], outputs=[Tensor("y", "float32", (4,))])
def half(x):
    return x / 2
"""


def test_child_holds_no_descriptor_of_another_one(tmp_path: Path) -> None:
    with contextlib.ExitStack() as opened:
        services = [opened.enter_context(start_child(["nnburst-noop"], log=tmp_path / "log"))]
        services += [opened.enter_context(start_child(["nnburst-noop"], log=tmp_path / "log")) for _ in range(3)]
        until(lambda: len({len(descriptors(service.pid)) for service in services}) == 1, "one has more than another")
        sockets = [{link for link in descriptors(service.pid) if link.startswith("socket:")} for service in services]
        assert not any(a & b for i, a in enumerate(sockets) for b in sockets[:i])
    until(lambda: len(descriptors(zygote())) == 5, "the zygote keeps descriptors")  # 0 to 2, …


def test_child_has_the_variables_of_this_package_as_its_client_has_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with child():
        monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "another one")
        with start_child(["nnburst-reference"]) as service:
            assert parent(service.pid) == zygote()
            job = CompileJob(cache=CacheFiles((os.memfd_create("model"),), (os.memfd_create("data"),), bytes(32)))
            service.devices[0].prepare_model(tiny_model(256), job)
            for fd in job.cache.fds:
                os.close(fd)
    assert (tmp_path / "state").is_dir()


CHANGES: dict[str, Callable[[], object]] = {
    "umask": lambda: os.umask(0o027),
    "limits": lambda: resource.setrlimit(
        resource.RLIMIT_STACK, (5 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1])
    ),
    "ignored signals": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "processors": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "directory": lambda: os.chdir("/proc"),
    "niceness": lambda: os.nice(1),
}


@pytest.mark.representative
@pytest.mark.parametrize("what", CHANGES)
def test_client_that_has_changed_does_not_stand_as_before(what: str) -> None:
    if what == "processors" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is nothing to change")
    pid = os.fork()
    if pid == 0:
        before = forked._inherited_state()
        CHANGES[what]()
        os._exit(forked._inherited_state() == before)
    assert os.waitpid(pid, 0)[1] == 0


def test_service_has_the_signals_blocked_that_the_thread_has_which_starts_it() -> None:
    with child() as before:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            with child() as service:
                assert parent(service.pid) == zygote() == parent(before.pid)
                assert int(status(service.pid, "SigBlk"), 16) >> (signal.SIGUSR2 - 1) & 1
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


def test_client_that_has_changed_gets_services_that_stand_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with child() as before:
        old = os.umask(0o027)
        try:
            with child() as service:
                assert parent(service.pid) == os.getpid()
                assert status(service.pid, "Umask") == "0027"
        finally:
            os.umask(old)
        with monkeypatch.context() as patch:
            patch.setenv("SOMETHING", "else")
            with child() as service:
                assert parent(service.pid) == os.getpid()
                assert "SOMETHING=else" in Path(f"/proc/{service.pid}/environ").read_text()
        with child() as after:
            assert parent(after.pid) == zygote()
        assert before.devices[0].prepare_model(tiny_model(256))


def test_children_have_random_numbers_of_their_own() -> None:
    """The interpreter seeds its generator when it forks; NumPy's are made when they are first used."""
    with start_child(["nnburst-reference", "nnburst-onnxruntime"], warm=True) as service:
        assert parent(service.pid) == zygote()
        assert "numpy/random/" not in Path(f"/proc/{zygote()}/maps").read_text()


@pytest.mark.parametrize(
    ("how", "said", "kept"),
    [
        ({"exit_on": 1, "exit_status": 7}, "ended with status 7", {"exit_status": 7}),
        ({"crash_on": 1}, "killed by SIGKILL", {"signal": signal.SIGKILL}),
    ],
)
def test_end_of_a_forked_service_is_said(how: dict[str, Any], said: str, kept: dict[str, int]) -> None:
    with start_child(["nnburst-noop"], faults=True) as service:
        assert parent(service.pid) == zygote()
        inject(service, at="prepare", **how)
        with pytest.raises(DeadObject, match=said) as raised:
            service.devices[0].prepare_model(tiny_model(256))
    assert {name: getattr(raised.value, name) for name in kept} == kept


def test_service_that_ends_without_its_zygote_is_dead_for_no_known_reason() -> None:
    with child() as service:
        os.kill(zygote(), signal.SIGKILL)
        assert forked.current is not None
        forked.current.process.wait(PATIENCE)
        assert service.devices[0].prepare_model(tiny_model(256))
        service.kill()
        with pytest.raises(DeadObject, match=r"connection broke|closed the connection|process ended"):
            service.devices[0].prepare_model(tiny_model(256))


def test_end_of_a_service_is_said_though_the_zygote_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    ready = forked.wait_readable

    def goes_on(fds: list[int], seconds: float | None) -> set[int]:
        waits.append(seconds)
        os.kill(zygote(), signal.SIGCONT)
        return ready(fds, seconds)

    with child() as service:
        stop(zygote())
        monkeypatch.setattr(forked, "wait_readable", goes_on)
        service.kill()
        with pytest.raises(DeadObject, match="killed by SIGKILL"):
            service.devices[0].prepare_model(tiny_model(256))
    assert waits == [LEAVING]


@pytest.mark.parametrize("env", [None, "own"])
def test_stdout_of_a_service_is_its_stderr(env: str | None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start_child(["nnburst-noop"], env=env and dict(os.environ), log=log) as service:
        assert [os.readlink(f"/proc/{service.pid}/fd/{fd}") for fd in (1, 2)] == [str(log)] * 2


def test_what_a_function_prints_is_in_the_log_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "says.py").write_text(FUNCTION.replace("    return", "    print('hello')\n    return"))
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "log"
    with nnburst.launch(devices=["nnburst-function:call=says:half"], log=log) as service:
        with service.session("half") as session:
            session.run(None, {"x": np.zeros(4, np.float32)})
        assert "hello" in log.read_text()


@pytest.mark.parametrize("env", [None, "own"])
def test_no_descriptor_of_a_service_or_its_client_is_inherited_by_a_program(env: str | None) -> None:
    before = inheritable(os.getpid())
    with start_child(["nnburst-noop"], env=env and dict(os.environ), faults=True) as service:
        assert inheritable(service.pid) == {0, 1, 2}
        assert inheritable(os.getpid()) <= before


def inheritable(pid: int) -> set[int]:
    """The descriptors of a process that another program would have."""
    found = set()
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this loop
            if not int(file.read_text().split("flags:")[1].split()[0], 8) & os.O_CLOEXEC:
                found.add(int(file.name))
    return found


def test_failure_in_a_forked_child_is_said_with_its_own_words() -> None:
    with pytest.raises(DeviceUnavailable, match=r"^the service for nnburst-noop:\S+ did not start:\n.*no option 'no'"):
        start_child(["nnburst-noop:no=option"])
    assert forked.current is not None


@pytest.mark.representative
def test_services_are_started_afresh_once_the_zygote_was_killed() -> None:
    with child() as before:
        os.kill(zygote(), signal.SIGKILL)
        with child() as meanwhile, child() as after:
            assert parent(meanwhile.pid) == parent(after.pid) == os.getpid()
        assert before.devices[0].prepare_model(tiny_model(256))


SABOTAGE = """
import errno, os, resource, signal
fork = os.fork

def refuse(*_):
    raise OSError(errno.ENFILE, "no room")

def sabotaged():
    pid = fork()
    HOW
    return pid

os.fork = sabotaged
"""
AFRESH, FORKED, ORPHANED = "afresh", "forked", "orphaned"


@pytest.mark.parametrize(
    ("how", "made"),
    [
        ("if pid: os.kill(os.getpid(), signal.SIGKILL)", ORPHANED),
        ("files = len(os.listdir('/proc/self/fd')) - 1\n"
         "    if pid: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))", FORKED),
        ("if not pid: resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))", AFRESH),
        ("if not pid: os._exit(3)", AFRESH),
        ("if not pid: os._exit(3)\n    os.waitpid(pid, 0)\n    refuse()", AFRESH),
    ],
)  # fmt: skip
def test_start_that_fails_half_way_in_the_zygote_leaves_one_service(
    how: str, made: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE.replace("HOW", how))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with child() as service:
        if made == ORPHANED:  # the zygote may come to its end only after the service has come to serve
            assert forked.current is not None
            forked.current.process.wait(PATIENCE)
        above = parent(service.pid)
        assert made == (AFRESH if above == os.getpid() else FORKED if above == zygote() else ORPHANED)
        until(lambda: holders(service.pid) == {service.pid}, "its socket is held by another process")
        assert service.devices[0].prepare_model(tiny_model(256))


def holders(pid: int) -> set[int]:
    """The processes that have one of its sockets."""
    sockets = {link for link in descriptors(pid) if link.startswith("socket:")}
    found = set()
    for other in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # of another user, or it has ended
            if sockets.intersection(descriptors(int(other))):
                found.add(int(other))
    return found


def test_start_whose_zygote_is_killed_meanwhile_is_made_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    ready = forked.wait_readable

    def waits(fds: list[int], seconds: float | None) -> set[int]:
        asked.set()
        return ready(fds, seconds)

    with child():  # the kernel has the zygote go on when the thread ends that has started it
        stop(zygote())
        monkeypatch.setattr(forked, "wait_readable", waits)
        starting = Background(child)
        assert asked.wait(PATIENCE)
        os.kill(zygote(), signal.SIGKILL)
        started = starting.result()
    with started as service:
        assert parent(service.pid) == os.getpid()


def test_zygote_that_stands_still_makes_a_start_miss_its_deadline() -> None:
    with child():  # likewise
        stop(zygote())
        with pytest.raises(MissedDeadline, match="did not start within"):
            start_child(["nnburst-noop"], timeout=0.05)
        os.kill(zygote(), signal.SIGCONT)
        with child() as service:
            assert parent(service.pid) == zygote()


@pytest.mark.parametrize("stopped", [(), ("service",), ("zygote",), ("zygote", "service")])
def test_zygote_and_children_go_with_their_client_that_is_killed(stopped: tuple[str, ...]) -> None:
    client = Client(
        "import sys\nfrom nnburst.service.process import forked, launch\n"
        "service = launch.start_child(['nnburst-noop'])\n"
        "print(service.pid, forked.current.process.pid, flush=True)\nsys.stdin.read()\n"
    )
    for pid, name in zip(client.pids, ("service", "zygote"), strict=True):
        if name in stopped:
            stop(pid)
    client.process.kill()
    client.finish()
    for pidfd in client.pidfds:
        wait_gone(pidfd)


def test_zygote_goes_with_its_client_that_ends() -> None:
    client = Client(
        "import sys\nfrom nnburst.service.process import forked, launch\nlaunch.start_child(['nnburst-noop']).close()\n"
        "print(forked.current.process.pid, flush=True)\nsys.stdin.read()\n"
    )
    assert client.finish() == 0
    wait_gone(client.pidfds[0])


def test_forked_client_has_a_zygote_of_its_own_and_no_descriptor_of_its_parent_s_services() -> None:
    before = sorted(descriptors(os.getpid()))
    with child() as service:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                until(lambda: sorted(descriptors(os.getpid())) == before, "copies of its parent's are open")
                with child() as own:
                    assert parent(own.pid) == zygote() != parent(service.pid)
                forked.end()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with child() as another:
            assert parent(another.pid) == parent(service.pid)


def test_many_starts_at_once_share_one_zygote() -> None:
    services = [start.result() for start in [Background(child) for _ in range(50)]]
    assert {parent(service.pid) for service in services} == {zygote()}
    assert len({service.pid for service in services}) == 50
    for service in services:
        service.close()
    until(lambda: len(descriptors(zygote())) == 5, "the zygote keeps descriptors")


@pytest.mark.parametrize("env", ["None", "dict(os.environ)"])
@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_client_without_streams_starts_services(closed: tuple[int, ...], env: str) -> None:
    client = Client(
        f"import os, sys\nfrom nnburst.service.process import launch\nkept = [(os.dup(fd), fd) for fd in {closed}]\n"
        "for _, fd in kept: os.close(fd)\n"
        f"service = launch.start_child(['nnburst-noop'], env={env})\n"
        "for copy, fd in kept: os.dup2(copy, fd)\n"
        "print(service.pid, flush=True)\nsys.stdin.read()\n"
    )
    where = "/dev/null" if 2 in closed else os.readlink("/proc/self/fd/2")
    assert [os.readlink(f"/proc/{client.pids[0]}/fd/{fd}") for fd in range(3)] == ["/dev/null", where, where]
    assert client.finish() == 0
    wait_gone(client.pidfds[0])


def test_stdout_of_a_client_is_not_held_by_its_zygote() -> None:
    client = Client(
        "import os, sys\nfrom nnburst.service.process import forked, launch\n"
        "launch.start_child(['nnburst-noop']).close()\n"
        "print(forked.current.process.pid, flush=True)\nos.close(1)\nsys.stdin.read()\n"
    )
    assert client.process.stdout is not None
    assert client.process.stdout.read() == ""  # the end, though the zygote is there
    assert Path(f"/proc/{client.pids[0]}").exists()
    client.finish()
    wait_gone(client.pidfds[0])
