"""What native code, and a program, inside of a service process can reach: nothing but code, its clients and itself."""

from __future__ import annotations

import errno
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import nnburst
from nnburst import Needs
from nnburst._core.errno import system
from nnburst.errors import DeadObject, DeviceUnavailable, GeneralFailure, InvalidArgument, ResourceExhausted
from nnburst.service.process import forked, sandbox
from support import ROOT
from support.models import relu
from support.processes import of_threads, run_python
from support.users import as_user
from support.ways_out import REFUSALS, build, names, needs_compiler, needs_walls

X = np.zeros(1, np.float32)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def attempts(place: Path) -> Iterator[dict[str, int]]:
    """Try every way in one service, once."""
    with nnburst.launch(devices=[f"nnburst-function:call={place}/code/native.py:attempt"]) as service:
        with service.session("attempt") as session:
            found = {name: int(session.run(None, {"x": np.float32([i])})[0][0]) for i, name in enumerate(names())}
            assert service.alive
        yield found


@needs_walls
@needs_compiler
@pytest.mark.parametrize("way", names())
def test_way_out_is_refused(attempts: dict[str, int], way: str) -> None:
    assert attempts[way] in REFUSALS, errno.errorcode.get(attempts[way], "it is open")


@needs_walls
@needs_compiler
def test_ways_out_leave_nothing(attempts: dict[str, int], place: Path) -> None:
    assert sorted(path.name for path in (place / "private").iterdir()) == ["removed", "secret"]
    assert {path.name for path in (place / "code").iterdir()} - {"__pycache__"} == {
        "module.py", "module.py.link", "native.py", "ways_out.so",
    }  # fmt: skip
    assert (place / "code" / "module.py").read_text() == "x = 1\n"


@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="most ways are closed to an ordinary user anyway")
def test_ways_are_open_without_a_sandbox(tmp_path: Path) -> None:
    place = build(tmp_path / "out")
    with (
        nnburst.launch(devices=[f"nnburst-function:call={place}/code/native.py:attempt"], sandbox="off") as service,
        service.session("attempt") as session,
    ):
        is_open = [
            name for i, name in enumerate(names())
            if int(session.run(None, {"x": np.float32([i])})[0][0]) not in REFUSALS
        ]  # fmt: skip
    assert len(is_open) >= 60


@needs_walls
@needs_compiler
@pytest.mark.parametrize("number", range(6 if os.uname().machine == "x86_64" else 4))
def test_call_that_no_library_makes_ends_the_process(place: Path, number: int) -> None:
    with nnburst.launch(devices=[f"nnburst-function:call={place}/code/native.py:deadly"]) as service:
        with service.session("deadly") as session, pytest.raises(DeadObject) as caught:
            session.run(None, {"x": np.float32([number])})
        assert caught.value.signal in (signal.SIGSYS, signal.SIGSEGV)


# ---- what is in force, and what devices ask for ---------------------------------------------------------------------


def function(place: Path, body: str, needs: str = "") -> str:
    """Write a function and return the device that has it."""
    (place / "asking.py").write_text(
        "import asyncio, os, select, socket, subprocess\n"
        "import numpy as np\n"
        "from nnburst.devices.function import Needs, Tensor, declare\n"
        f"@declare(inputs=[Tensor('x', 'float32', (1,))], outputs=[Tensor('y', 'float32', (1,))]{needs})\n"
        f"def asking(x):\n    {body}\n    return x + 1\n"
    )
    return f"nnburst-function:call={place}/asking.py:asking"


def outcome(device: str, **options: Any) -> str:
    """Return what a run of the function comes to."""
    with nnburst.launch(devices=[device], **options) as service, service.session("asking") as session:
        try:
            return str(session.run(None, {"x": X})[0].tolist())
        except GeneralFailure as error:
            return str(error)


DEEDS: dict[str, tuple[str, str]] = {
    "read": ("open({0!r}).read()", "read=[{0!r}]"),
    "write": ("open({1!r}, 'w').write('x')", "write=[{1!r}]"),
    "program": ("subprocess.run(['/bin/true'], check=True)", "programs=['/bin/true']"),
    "network": ("socket.socket(socket.AF_INET).close()", "network=True"),
}


@pytest.mark.check
@needs_walls
@pytest.mark.parametrize("deed", DEEDS)
def test_function_gets_what_it_says_and_no_more(tmp_path: Path, deed: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "data" / "in").write_text("in")
    paths = str(tmp_path / "data" / "in"), str(tmp_path / "data")
    body, need = (
        text.format(paths[0], paths[1] if text.startswith("write") else f"{paths[1]}/out") for text in DEEDS[deed]
    )
    refused = outcome(function(tmp_path / "code", body))
    assert "PermissionError" in refused
    assert "@declare(needs=Needs(" in refused
    assert outcome(function(tmp_path / "code", body, f", needs=Needs({need})")) == "[1.0]"
    for other, (another, _) in DEEDS.items():
        if other not in (deed, "read" if deed == "write" else deed):
            said = outcome(
                function(tmp_path / "code", another.format(paths[0], f"{paths[1]}/out"), f", needs=Needs({need})")
            )
            assert "PermissionError" in said, (deed, other)
    assert outcome(function(tmp_path / "code", body), sandbox="off") == "[1.0]"


@needs_walls
def test_function_gets_epoll_with_the_network_and_asyncio_does_without(tmp_path: Path) -> None:
    assert outcome(function(tmp_path, "asyncio.run(asyncio.sleep(0))")) == "[1.0]"
    assert "PermissionError" in outcome(function(tmp_path, "select.epoll()"))
    for body in ("socket.getaddrinfo('a.invalid', 1)", "import urllib.request as u; u.urlopen('http://127.0.0.1:1')"):
        assert "@declare(needs=Needs(" in outcome(function(tmp_path, body))
    body = "select.epoll().close(); asyncio.run(asyncio.sleep(0))"
    assert outcome(function(tmp_path, body, ", needs=Needs(network=True)")) == "[1.0]"


@needs_walls
@pytest.mark.parametrize("need", ["read", "write", "programs"])
def test_need_that_is_not_there_is_refused_by_its_path(tmp_path: Path, need: str) -> None:
    device = function(tmp_path, "pass", f", needs=Needs({need}=[{str(tmp_path / 'none')!r}])")
    with pytest.raises(
        DeviceUnavailable, match=f"a device needs {tmp_path}/none, which cannot be opened: No such file"
    ):
        nnburst.launch(devices=[device])


@needs_walls
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
@pytest.mark.parametrize(
    ("kind", "protocol", "allowed"),
    [("STREAM", 0, True), ("STREAM", 6, True), ("STREAM", 262, False), ("STREAM", 132, False), ("DGRAM", 0, True),
     ("DGRAM", 17, True), ("DGRAM", 136, False), ("DGRAM", 1, False), ("DGRAM", 6, False)],
)  # fmt: skip
def test_network_is_tcp_and_udp_only(tmp_path: Path, family: str, kind: str, protocol: int, allowed: bool) -> None:
    body = f"socket.socket(socket.{family}, socket.SOCK_{kind}, {protocol}).close()"
    said = outcome(function(tmp_path, body, ", needs=Needs(network=True)"))
    assert said == "[1.0]" if allowed else "PermissionError" in said


@pytest.mark.check
@needs_walls
def test_library_is_no_program_beside_one_that_may_be_started(tmp_path: Path) -> None:
    with open("/proc/self/maps") as maps:
        library = next(line.split()[-1] for line in maps if re.search(r"/libc[.-]", line))
    if not os.access(library, os.X_OK):
        pytest.skip("the C library is no program here")
    body = f"subprocess.run([{library!r}], check=True)"
    assert "PermissionError" in outcome(function(tmp_path, body, ", needs=Needs(programs=['/bin/true'])"))
    assert outcome(function(tmp_path, body, f", needs=Needs(programs=[{library!r}])")) == "[1.0]"


@pytest.mark.check
@needs_walls
def test_service_says_what_is_in_force(tmp_path: Path) -> None:
    device = function(tmp_path, "pass", f", needs=Needs(read=[{str(tmp_path)!r}])")
    with nnburst.launch(devices=["nnburst-reference", device], sandbox="strict") as service:
        assert service.sandbox is not None
        assert service.sandbox.seccomp
        assert service.sandbox.landlock >= 6
        assert service.sandbox.missing == ()
        assert service.sandbox.granted == (f"nnburst-function reads {tmp_path}",)
        status = Path(f"/proc/{service.pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
        threads = of_threads(service.pid, "status")
        assert len(threads) > 1
        assert all("Seccomp:\t2" in thread for thread in threads)
        assert {held for thread in threads for held in re.findall(r"^Cap[^B]..:\t(\w+)", thread, re.M)} == {"0" * 16}
        assert os.geteuid() or "CapBnd:\t" + "0" * 16 in status
        limits = Path(f"/proc/{service.pid}/limits").read_text()
        assert re.search(r"Max core file size +0 +0 ", limits)
    with nnburst.launch(sandbox="off") as service:
        assert str(service.sandbox) == "off"
        assert "Seccomp:\t0" in Path(f"/proc/{service.pid}/status").read_text()
    with nnburst.in_process() as service:
        assert service.sandbox is None


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'strict', 'on' or 'off'"):
        nnburst.launch(sandbox="yes")


@pytest.mark.parametrize("mode", ["strict", "on", "off"])
def test_session_chooses_the_sandbox_of_its_own_service_only(mode: str) -> None:
    said = f"sandbox='{mode}' needs .* no service="
    with nnburst.in_process() as service, pytest.raises(InvalidArgument, match=said):
        nnburst.Session(relu((8,)), service=service, sandbox=mode)


@pytest.mark.parametrize("need", ["relative/path", "/one/path"])
def test_needs_are_absolute_paths_in_lists(need: str) -> None:
    with pytest.raises(InvalidArgument, match="absolute paths in a list"):
        Needs(read=[need] if need.startswith("rel") else need)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The side of a terminal that sees all, and the one that a program has."""
    ends = os.openpty()
    yield ends
    for fd in ends:
        os.close(fd)


@pytest.mark.check
def test_terminal_of_the_user_cannot_be_read(terminal: tuple[int, int]) -> None:
    """A service has the terminal for its log alone."""
    ours, theirs = terminal
    program = (
        "import nnburst, os\n"
        "with nnburst.launch(devices=['nnburst-noop']) as service:\n"
        "    for fd in (0, 1, 2):\n"
        "        flags = open(f'/proc/{service.pid}/fdinfo/{fd}').read().split()[3]\n"
        "        print(fd, os.readlink(f'/proc/{service.pid}/fd/{fd}'), int(flags, 8) & 3, end=';')\n"
    )
    subprocess.run([sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, check=True)
    said = os.read(ours, 4096).decode().split(";")
    assert said[0] == "0 /dev/null 0"
    assert [line.split()[2] for line in said[1:3]] == ["1", "1"]


@pytest.mark.check
def test_terminal_that_cannot_be_opened_anew_is_let_go_of(terminal: tuple[int, int]) -> None:
    def refuse(path: str, *rest: int) -> int:
        if path.startswith("/proc/self/fd/"):
            raise PermissionError(path)
        return os_open(path, *rest)

    def turn() -> str:
        with patch.object(os, "open", refuse):
            sandbox._turn_terminals_outwards((terminal[1],))
        return os.readlink(f"/proc/self/fd/{terminal[1]}")

    os_open = os.open
    assert as_user(None, turn) == "/dev/null"


# ---- what services call ---------------------------------------------------------------------------------------------

KNOWN_REFUSALS = {"clone3"}
"""The C library asks for `clone3` before `clone`."""

WORK = """
import importlib.util, sys, numpy as np, nnburst
sys.path.insert(0, {tests!r})
from support.models import relu
X = {{"x": np.zeros((1, 4), np.float32)}}
for _ in range(2):
    with nnburst.launch() as service, service.session(relu((1, 4)), cache_dir={cache!r}) as session:
        session.run(None, dict(zip([node.name for node in session.get_inputs()], X.values())))
        session.bind().run()
        list(session.run_many([dict(zip([node.name for node in session.get_inputs()], X.values()))] * 3))
if importlib.util.find_spec("onnxruntime"):
    from support.services import save_scaling
    with nnburst.Session(save_scaling({model!r}, 2.0)) as session:
        session.run(None, {{"x": np.zeros((2, 4), np.float32)}})
"""


@pytest.mark.check
@needs_walls
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not on the PATH")
def test_services_make_no_call_that_is_refused(tmp_path: Path) -> None:
    calls = runpy.run_path(str(ROOT / "packaging" / "calls.py"))
    program = WORK.format(
        tests=str(ROOT / "tests"), cache=str(tmp_path / "cache"), model=str(tmp_path / "scaling.onnx")
    )
    trace = tmp_path / "trace"
    status = calls["trace_command"]([sys.executable, "-c", program], trace)
    if not trace.stat().st_size:
        pytest.skip("nothing can be traced here")
    assert status == 0, "the program has failed, perhaps before it made all calls"
    made, refused = calls["calls_in_sandboxes"](trace.read_text(errors="replace").splitlines())
    assert {"futex", "mmap", "openat"} <= made.keys()
    assert refused.keys() <= KNOWN_REFUSALS
    assert made.keys() - refused.keys() <= set(calls["allowed"]())


# ---- what a program in it sees -------------------------------------------------------------------------------------


NUMBERS = {"memfd_create": 319, "eventfd2": 290, "pidfd_open": 434, "socketpair": 53}
"""Of x86-64."""
LANDLOCK_CREATE_RULESET = 444
"""Of any machine."""

BLOCK = """
import ctypes, struct, sys
import numpy as np
import nnburst
import nnburst.service
from nnburst.errors import NNBurstError
from nnburst.testing import assert_nothing_left
number = int(sys.argv[1])
code = [
    (0x20, 0, 0, 0),  # load the number of the call
    (0x15, 0, 1, number),  # is it this one?
    (0x06, 0, 0, 0x00050000 | 1),  # EPERM
    (0x06, 0, 0, 0x7FFF0000),  # allowed
]
program = b"".join(struct.pack("HBBI", *row) for row in code)
buffer = ctypes.create_string_buffer(program)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
arguments = Filter(len(code), ctypes.addressof(buffer))
b = nnburst.ModelBuilder()
x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (4,))
b.output("y", b.relu(x))
model = b.build()
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(arguments), 0, 0):
    print("no filter")
    sys.exit()
def use():
    try:
        devices = ["nnburst-reference"]
        with nnburst.launch(devices=devices, sandbox=sys.argv[2]) as service, service.session(model) as session:
            session.run(None, {"x": np.ones(4, np.float32)})
            print("works", service.sandbox)
    except NNBurstError as error:
        print(type(error).__name__, error)
with assert_nothing_left():
    use()
"""


def without(number: int, sandbox: str) -> subprocess.CompletedProcess[str]:
    """Use a service in a process whose system refuses a call."""
    done = run_python("-c", BLOCK, str(number), sandbox)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no filter":
        pytest.skip("this system has no filters of system calls")
    return done


@needs_walls
def test_missing_wall_is_said_or_refused() -> None:
    done = without(LANDLOCK_CREATE_RULESET, "on")
    assert done.stdout.startswith("works on: seccomp; without Landlock for files"), done.stderr
    assert "sandbox on: seccomp; without Landlock for files" in done.stderr
    done = without(LANDLOCK_CREATE_RULESET, "strict")
    assert "sandbox='strict' is more than this kernel or container can do" in done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are those of x86-64")
@pytest.mark.parametrize("name", NUMBERS)
def test_system_call_that_is_refused_is_named(name: str) -> None:
    done = without(NUMBERS[name], "on")
    assert name.rstrip("2") in done.stdout
    assert "EPERM" in done.stdout
    assert done.stdout.split()[0] in ("GeneralFailure", "DeviceUnavailable")


def test_errors_of_system_calls_are_typed_and_name_the_call() -> None:
    def failing(error: OSError) -> None:
        raise error

    failing.__name__ = "frob"
    with pytest.raises(GeneralFailure, match=r"frob failed: .*\[ENOSYS\]; a sandbox must allow it"):
        system(failing, OSError(38, "x"))
    with pytest.raises(ResourceExhausted, match=r"frob failed: .*RLIMIT_NOFILE.*\[EMFILE\]$"):
        system(failing, OSError(24, "x"))
    with pytest.raises(ResourceExhausted, match=r"frob failed: .*fs\.file-max.*\[ENFILE\]$"):
        system(failing, OSError(23, "x"))
    with pytest.raises(GeneralFailure, match=r"frob failed: .*\[EIO\]$"):
        system(failing, OSError(5, "x"))
    assert system(os.getpid) == os.getpid()


def test_no_memory_for_a_service_is_a_resource_that_is_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(forked, "current", None)  # a process to fork from is there already, perhaps
    monkeypatch.setattr(subprocess, "Popen", starved)
    with pytest.raises(ResourceExhausted, match="cannot be started: out of memory"):
        nnburst.launch()
    with pytest.raises(InvalidArgument):
        nnburst.launch(devices=[])
