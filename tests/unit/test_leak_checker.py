"""`assert_nothing_left` names each kind of thing that is left, and not what other processes have."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import nnburst
from nnburst.testing import assert_nothing_left


def descriptor(stack: ExitStack, directory: Path) -> None:
    stack.callback(os.close, os.open(directory, os.O_RDONLY))


def thread(stack: ExitStack, directory: Path) -> None:
    end = threading.Event()
    started = threading.Thread(target=end.wait, name="forgotten")
    started.start()
    stack.callback(started.join)
    stack.callback(end.set)


def child(stack: ExitStack, directory: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stack.callback(process.communicate)


def mapping(stack: ExitStack, directory: Path) -> None:
    memory = stack.enter_context(nnburst.Memory.ashmem(4096))
    kept = [memory.array("uint8", (4096,))]
    stack.callback(kept.clear)


def entry(stack: ExitStack, directory: Path) -> None:
    name = f"/nnburst-left-{os.getpid()}"
    nnburst.Memory.posix_shm(name, 4096).close()
    stack.callback(nnburst.Memory.unlink_posix_shm, name)


def file(stack: ExitStack, directory: Path) -> None:
    (directory / "left").touch()


@pytest.mark.parametrize(
    ("leave", "named"),
    [
        (descriptor, r"fd \d+ -> /"),
        (thread, "thread forgotten"),
        (child, r"child \d+"),
        (mapping, "mapping of .*nnburst"),
        (entry, r"file /dev/shm/nnburst-left-\d+"),
        (file, "file .*/left"),
    ],
)
def test_what_is_left_is_named(leave: Callable[[ExitStack, Path], None], named: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        with pytest.raises(AssertionError, match=f"left behind: .*{named}"):
            with assert_nothing_left([tmp_path], timeout=0):
                leave(stack, tmp_path)


OTHER = """
import os
name = f"/dev/shm/nnburst-other-{os.getpid()}"
open(name, "x").close()
print(flush=True)
input()
os.unlink(name)
"""


def test_shared_memory_of_a_program_beside_this_one_does_not_count() -> None:
    beside = subprocess.Popen(
        ["setsid", "--fork", sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert beside.stdin is not None
    assert beside.stdout is not None
    with beside.stdin, beside.stdout:
        with assert_nothing_left():
            assert beside.stdout.readline() == "\n"
        assert any("nnburst-other-" in name for name in os.listdir("/dev/shm"))
        beside.stdin.write("\n")
        beside.stdin.flush()
        assert beside.stdout.read() == ""
    beside.wait()


@pytest.mark.check
def test_interrupt_of_a_test_run_is_told_by_itself(tmp_path: Path) -> None:
    text = "import signal\n\ndef test_interrupted(nnburst_leaves_nothing): signal.raise_signal(signal.SIGINT)\n"
    (tmp_path / "test_it.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
