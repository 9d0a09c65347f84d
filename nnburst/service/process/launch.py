"""Start and stop of a service that is a child process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from msgspec.structs import replace

from ..._core.deadline import Deadline, check_timeout
from ..._core.errno import meaning, one_of, system
from ..._core.fds import FdSet, wait_readable
from ..._core.leaving import LEAVING
from ..._core.threads import start_daemon
from ..._options import LogLevel, SandboxMode
from ...devices.registry import check_names
from ...errors import DeadObject, DeviceUnavailable, InvalidArgument, MissedDeadline, NNBurstError, ResourceExhausted
from ..host.quotas import Quotas
from .command import child_environment, interpreter, safe_command
from .forked import FUNCTIONS, SEQPACKET, find_zygote, fork, occupy_streams
from .limited_log import log_lines
from .options import Scheduling, ServiceOptions

if TYPE_CHECKING:
    from ..client.connection import ServiceConnection
    from .workers import Worker

_Started: TypeAlias = tuple[FdSet, Callable[[FdSet], int | None]]
"""(descriptors, function). The first descriptor is a pidfd. The function takes them and returns the exit status."""
_END_OF_A_WORKER = 4 * LEAVING
"""Seconds that a worker may take to finish its runs and tell its clients that it ends."""
_EXIT_PATIENCE = 0.2
"""Seconds to wait for a child's end after its socket has closed."""


def _as_absolute(entry: str) -> str:
    """Return an absolute path, or the given path if the working directory was removed."""
    try:
        return os.path.abspath(entry)
    except FileNotFoundError:
        return entry


def start_child(
    devices: Sequence[str] = ("nnburst-reference",),
    *,
    timeout: float | None = 60.0,
    env: Mapping[str, str] | None = None,
    log_level: LogLevel | int = "warning",
    log: str | os.PathLike[str] | logging.Logger | None = None,
    quotas: Mapping[str, int] | None = None,
    max_run: float | None = None,
    max_compile: float | None = None,
    faults: bool = False,
    scheduler: tuple[str, int] | None = None,
    affinity: Collection[int] | None = None,
    warm: bool = False,
    sandbox: SandboxMode = "on",
    functions: bytes = b"",
    more: Mapping[str, Any] = {},
    broker: Worker | None = None,
) -> ServiceConnection:
    """Start a service for this process alone and connect to it.

    The child ends when this process ends or the connection is closed. It has its own terminal session, so Ctrl-C
    reaches only the client.

    The child imports no modules from the working directory, nor from relative entries of PYTHONPATH. For Python
    functions, the child uses this program's module search path.

    `nnburst.launch` describes the other arguments and errors.

    Args:
        devices: Names of the devices that the service offers (`nnburst.devices.device_names`).
        timeout: Seconds that the child may take to start; None for no limit.
        env: Environment of the child; None for a copy of this process's environment.
        warm: True to load at once the modules that the devices need for their first model.
        functions: Result of `encode_functions`, for the device ``nnburst-function``.
        more: Other fields of `ServiceOptions`, for a worker.
        broker: Handler of the worker's calls.

    Raises:
        ResourceExhausted: The system has no free descriptor, process or thread.
    """
    limit = check_timeout(timeout)
    names = check_names(devices)
    quotas = {} if quotas is None else quotas
    Quotas().replace(quotas)
    one_of(sandbox, "sandbox", get_args(SandboxMode))
    options = ServiceOptions(
        devices=tuple(names),
        log_level=_level(log_level),
        quotas=dict(quotas),
        scheduling=Scheduling.of(scheduler, affinity),
        sandbox=sandbox,
        warm=warm,
        max_run=_longest("max_run", max_run),
        max_compile=_longest("max_compile", max_compile),
        **more,
    )
    interpreter()  # this raises the same error with and without a zygote
    try:
        with occupy_streams(), contextlib.ExitStack() as theirs, contextlib.ExitStack() as failing:
            log_fds = None
            if isinstance(log, logging.Logger):
                reading, writing = system(os.pipe2, os.O_CLOEXEC)
                log_fds, passed = FdSet((reading,)), {"stderr": writing}
            else:
                passed = {"stderr": _open_log(log)}
            theirs.callback(os.close, passed["stderr"])
            if env is None:
                find_zygote(names)
            from ..client.connection import ServiceConnection  # this import runs while the zygote starts

            deadline = Deadline.after(limit)
            limit = deadline.left()
            errors = system(os.memfd_create, "nnburst-child-stderr", os.MFD_CLOEXEC)
            theirs.callback(os.close, errors)
            if functions:
                sent = theirs.enter_context(open(system(os.memfd_create, "nnburst-functions", os.MFD_CLOEXEC), "w+b"))
                sent.write(functions)
                sent.seek(0)
                passed["functions"] = sent.fileno()
            orders = None
            if faults:
                orders, end = system(socket.socketpair, *SEQPACKET)
                failing.enter_context(orders)
                passed["faults"] = theirs.enter_context(end).fileno()
            ours, end = system(socket.socketpair, *SEQPACKET)
            passed["socket"] = theirs.enter_context(end).fileno()
            spawn = partial(_spawn, options, passed, end, errors, env, deadline)
            child = Child(spawn, None if broker is None else _END_OF_A_WORKER)
            try:
                connection = ServiceConnection(ours, child=child, timeout=limit, broker=broker)
            except DeadObject as error:
                how, words = str(error).partition(": ")[2] or error, _last_words(errors)
                why = words if words and error.exit_status == 1 else f": {how}{words}"
                raise DeviceUnavailable(f"the service for {', '.join(names)} did not start{why}") from error
            except MissedDeadline as error:
                raise MissedDeadline(
                    f"the service process did not start within {limit:.3g} s{_last_words(errors)}"
                ) from error
            connection.faults = orders
            if orders is not None:
                connection.link_to_death(orders.close)
            if log_fds is not None:
                failing.callback(connection.close)
                log_fds.add(system(os.pidfd_open, connection.pid))
                start_daemon(log_lines, log_fds, log, name="nnburst-log", what="the log of a service")
            failing.pop_all()
            return connection
    except NNBurstError:  # some of these are OSErrors, too
        raise
    except (OSError, MemoryError) as error:
        why = meaning(error.errno) if isinstance(error, OSError) and error.errno else "out of memory"
        raise ResourceExhausted(f"the service process cannot be started: {why}") from error


def _spawn(
    options: ServiceOptions, passed: Mapping[str, int], theirs: socket.socket, errors: int,
    env: Mapping[str, str] | None, deadline: Deadline,
) -> _Started:  # fmt: skip
    """Start the process, and close this process's copy of `theirs`."""
    with theirs:
        path: list[str] = []  # each entry is an argument, since one may have at most 128 KiB
        if any(map(is_of_functions, options.devices)):
            path = [_as_absolute(entry) for entry in sys.path if isinstance(entry, str)]
        zygote, full = find_zygote(options.devices) if env is None else None, replace(options, path=tuple(path))
        if zygote is not None and (forked := fork(zygote, full, errors, passed, deadline)) is not None:
            return forked
        process = subprocess.Popen(
            [*safe_command(f"{__package__}.child"), str(replace(options, parent=os.getpid(), **passed)), *path],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=[*passed.values()],
            start_new_session=True,
            env=child_environment(os.environ if env is None else env),
        )
    try:
        return FdSet.create(os.pidfd_open, process.pid), lambda _: process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise


def is_of_functions(device: str) -> bool:
    return device.partition(":")[0] == FUNCTIONS


def _longest(name: str, seconds: float | None) -> float | None:
    if (longest := check_timeout(seconds)) == 0:
        raise InvalidArgument(f"{name}={seconds!r}: give the seconds that it may take, above 0, or None")
    return longest


def _level(level: str | int) -> int:
    """Return the number of a `logging` level from its name or number."""
    number = logging.getLevelName(level.upper()) if isinstance(level, str) else level
    if not isinstance(number, int) or not 0 <= number <= logging.CRITICAL:
        raise InvalidArgument(
            f"log_level={level!r}; choose 'debug', 'info', 'warning', 'error', 'critical' or a number up to 50"
        )
    return int(number)  # a bool becomes a number


def _open_log(log: str | os.PathLike[str] | None) -> int:
    """Open the log file, which becomes the child's stdout and stderr once it serves."""
    if log is None:
        return system(os.dup, 2)
    try:
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except (OSError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(
            f"log={log!r} cannot be written: {reason}; give the path of a file, or a Logger"
        ) from error


class Child:
    """The process of a service.

    Args:
        spawn: Function that starts the process and returns (descriptors, function). The first descriptor is a pidfd.
            The returned function takes the descriptors and returns the exit status, or minus the number of the signal
            that ended the process.
        end: Seconds that the process may take to end; None for the connection's limit.
    """

    def __init__(self, spawn: Callable[[], _Started], end: float | None = None) -> None:
        self._spawn, self._end = spawn, end
        self._fds: FdSet | None = None  # the last reference closes it: another thread may be using it
        self._status: int | None = None

    def start(self) -> FdSet:
        """Start the process, and return its pidfd, possibly with more descriptors."""
        self._fds, self._tell = self._spawn()
        return self._fds

    def kill(self) -> None:
        fds = self._fds
        if fds is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fds.fds[0], signal.SIGKILL)

    def exit_status(self) -> int | None:
        """Return the exit status of a process that has just closed its socket; None if it still runs."""
        self._wait(_EXIT_PATIENCE)
        return self._status

    def reap(self, seconds: float) -> None:
        """Wait until a process whose socket was closed has ended. Kill it after `seconds`."""
        if not self._wait(seconds if self._end is None else self._end):
            self.kill()
            self._wait(None)

    def _wait(self, seconds: float | None) -> bool:
        if self._fds is not None:
            if not wait_readable(self._fds.fds[:1], seconds):
                return False
            self._status, self._fds = self._tell(self._fds), None
        return True


def _last_words(errors: int) -> str:
    """Return the end of the child's output to stderr during its start."""
    size = os.fstat(errors).st_size
    text = os.pread(errors, 8192, max(0, size - 8192)).decode(errors="replace").strip()
    return f":\n{text}" if text else ""
