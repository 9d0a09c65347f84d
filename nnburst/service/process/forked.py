"""The client's side of the zygote, the process that services are forked from (docs/internals/zygote.md)."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..._core.errno import system
from ..._core.fds import FdSet, wait_readable
from ..._core.leaving import LEAVING, abandon_when_forked, process_lock
from ...errors import MissedDeadline
from .command import child_environment, safe_command

if TYPE_CHECKING:
    from ..._core.deadline import Deadline
    from .options import ServiceOptions

FUNCTIONS = "nnburst-function"
"""Name of the device for Python functions. Without options after the name, it runs functions that the client sends."""
_DEVICES = {"nnburst-reference", "nnburst-onnxruntime", "nnburst-noop"}
"""Devices whose modules the zygote may import, because they start no thread."""
_OWN = "NNBURST_"
"""Prefix of the environment variables that each request to the zygote contains."""
_STATUS = ("Umask", "Uid", "Gid", "Groups", "SigIgn", "Cap", "NoNewPrivs", "Seccomp", "Mems_allowed:")
"""Beginnings of the lines in /proc/thread-self/status that describe what a child process inherits."""
_FILES = ("limits", "cgroup", "oom_score_adj", "attr/current")
SEQPACKET = socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC


class Zygote:
    """The zygote's process.

    Attributes:
        kind: What forked services inherit: environment variables, rights, limits and more. If this program changes
            one of these, later services start as new interpreters, without the zygote.
        control: The socket for requests to fork.
    """

    def __init__(self, kind: tuple[Mapping[str, str], tuple[object, ...]]) -> None:
        self.kind = kind
        self.control, theirs = system(socket.socketpair, *SEQPACKET)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*safe_command(f"{__package__}.zygote"), str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=kind[0],
                )
        except BaseException:
            self.control.close()
            raise
        abandon_when_forked(self)

    def abandon(self) -> None:
        """Drop the zygote in a forked child, which may start its own."""
        global current
        current = None
        self.control.close()
        self.process.returncode = 0  # the zygote is not this process's child


_lock = process_lock()
current: Zygote | None = None


@contextlib.contextmanager
def occupy_streams() -> Iterator[None]:
    """Open /dev/null at closed standard streams, so that no descriptor for a child gets a number below 3."""
    with contextlib.ExitStack() as opened:
        fd = -1
        while fd < 2:
            fd = system(os.open, os.devnull, os.O_RDWR | os.O_CLOEXEC)
            opened.callback(os.close, fd)
        yield


def find_zygote(devices: Iterable[str]) -> Zygote | None:
    """Return the zygote of this process, and start it if necessary. The caller need not wait for its imports.

    Args:
        devices: Names of the service's devices.

    Returns:
        The zygote; None if this service has to start as a new interpreter.

    Raises:
        DeviceUnavailable: There is no Python interpreter.
        ResourceExhausted: This process has no free descriptor.
        OSError: The system has no free descriptor or process.
    """
    global current
    if not all(name == FUNCTIONS or str(name).partition(":")[0] in _DEVICES for name in devices):
        return None
    env = {name: value for name, value in child_environment(os.environ).items() if not name.startswith(_OWN)}
    try:
        kind = env, _inherited_state()
    except OSError:  # this process's rights or directory cannot be read
        return None
    with _lock, occupy_streams():
        zygote = current = current or Zygote(kind)
    return zygote if zygote.kind == kind else None


def fork(
    zygote: Zygote, options: ServiceOptions, stderr: int, fds: Mapping[str, int], deadline: Deadline
) -> tuple[FdSet, Callable[[FdSet], int | None]] | None:
    """Ask the zygote to fork a process. Return None if the caller must start a new interpreter instead.

    Args:
        zygote: The result of `find_zygote`.
        options: Options of the process, without descriptors.
        stderr: Descriptor that becomes stdout and stderr.
        fds: Descriptors for the process, by the names of the options that contain them.
        deadline: Time limit for the answer.

    Returns:
        (descriptors, function). The descriptors are a pidfd of the process and a socket. The function takes them, and
        returns the exit status, or None if the zygote was killed.

    Raises:
        MissedDeadline: The zygote has not answered in time.
        ResourceExhausted, OSError: See `find_zygote`.
    """
    import json  # this import runs while the zygote starts

    own = {name: value for name, value in os.environ.items() if name.startswith(_OWN)}
    blocked = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]  # each thread of a broker has its own mask
    request = json.dumps({"names": [*fds], "options": str(options), "env": own, "blocked": blocked}).encode()
    ours, theirs = system(socket.socketpair, *SEQPACKET)
    with ours:
        try:
            with theirs:
                rights = array("i", [theirs.fileno(), stderr, *fds.values()])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                zygote.control.sendmsg([request], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            if not wait_readable([ours.fileno()], deadline.left()):
                raise MissedDeadline("the zygote has not answered")
            _, received, flags, _ = ours.recvmsg(1, socket.CMSG_LEN(array("i").itemsize), socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, ConnectionError):
            return None
        except OSError as error:
            if error.errno == errno.EMSGSIZE:  # the program's module search path has thousands of entries
                return None
            raise
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "the pidfd is lost")
        if not received:  # the process was not forked, or ended before it answered
            return None
        return FdSet((int.from_bytes(received[0][2], sys.byteorder), ours.detach())), _status


def _status(fds: FdSet) -> int | None:
    """Return the exit status, in the form of `subprocess`; None if the zygote does not answer."""
    _, status_socket = fds.fds
    return int(text) if wait_readable([status_socket], LEAVING) and (text := os.read(status_socket, 16)) else None


def end() -> None:
    """End the zygote, and wait for its end. Call it only after all connections to its children have ended."""
    global current
    zygote, current = current, None
    if zygote is not None:
        zygote.control.close()
        zygote.process.kill()  # the zygote has no work that could be lost
        zygote.process.wait()


def _inherited_state() -> tuple[object, ...]:
    """Return what a child inherits from this thread: rights, limits, namespaces, directory and processors."""
    own = "/proc/thread-self/"
    return (
        *(_read(own + name) for name in _FILES),
        *(line for line in _read(own + "status").splitlines() if line.startswith(_STATUS)),
        *(os.readlink(f"{own}ns/{name}") for name in os.listdir(f"{own}ns")),
        *((found.st_dev, found.st_ino) for found in map(os.stat, ("/", "."))),
        os.sched_getaffinity(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        os.sched_getparam(0).sched_priority,
    )


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""
