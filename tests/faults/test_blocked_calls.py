"""What a program in a sandbox sees: system calls that are refused, no interpreter, little address space."""

from __future__ import annotations

import os
import platform
import subprocess

import pytest

import nnburst
from nnburst._core.errno import system
from nnburst.errors import GeneralFailure, InvalidArgument, ResourceExhausted
from nnburst.service.process import forked
from support.processes import run_python
from support.ways_out import needs_walls

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

    forked.end()  # a process to fork from is there already, perhaps
    monkeypatch.setattr(subprocess, "Popen", starved)
    with pytest.raises(ResourceExhausted, match="cannot be started: out of memory"):
        nnburst.launch()
    with pytest.raises(InvalidArgument):
        nnburst.launch(devices=[])
