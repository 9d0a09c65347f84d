"""Start a service as a child process, and take it down again."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from .. import _safe_path
from .._core import checked_timeout
from ..errors import DeadObject, DeviceUnavailable, InvalidArgument, MissedDeadline, NNBurstError, ResourceExhausted
from ._connection import ServiceConnection

__all__ = ["start_child"]

_EXIT_TIMEOUT = 3.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_bootstrap.py")
_FUNCTIONS = "nnburst-function"


def start_child(
    devices: Sequence[str] = ("nnburst-reference",),
    *,
    timeout: float | None = 60.0,
    env: Mapping[str, str] | None = None,
) -> ServiceConnection:
    """Start a service process for this process alone and connect to it.

    The child gets one end of a socketpair. It ends when this process ends, however that happens, and also when the
    connection is closed. It is in a session of its own, so Ctrl-C in a terminal reaches only the client.

    Unless one of OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and MKL_NUM_THREADS is set, all are set to 1 in the child: BLAS
    threads that spin for work cost more than they bring to small models.

    The child takes no modules from the working directory, nor from relative entries of PYTHONPATH. A function device
    runs code of this program: for one the child looks for modules where this program does.

    Args:
        devices: Names of the devices that the service offers (`nnburst.devices.device_names`).
        timeout: Seconds that the child may take to start; None for no limit.
        env: Environment of the child, None for a copy of this one's.

    Raises:
        InvalidArgument: No device is named.
        DeviceUnavailable: The child ended before it could serve; the message carries its error output.
        MissedDeadline: It did not start in time.
        ResourceExhausted: There are no descriptors, processes or threads for it.
    """
    limit = checked_timeout(timeout)
    try:
        return _start(devices, limit, env)
    except NNBurstError:  # some of which are OSErrors, too
        raise
    except OSError as error:
        raise ResourceExhausted(f"the service process cannot be started: {error}") from error


def _start(devices: Sequence[str], timeout: float | None, env: Mapping[str, str] | None) -> ServiceConnection:
    names = (devices,) if isinstance(devices, str) else tuple(devices)
    if not names:
        raise InvalidArgument("a service needs at least one device")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    errors = os.memfd_create("nnburst-child-stderr", os.MFD_CLOEXEC)
    try:
        try:
            with theirs:
                process = _spawn(names, theirs.fileno(), errors, dict(os.environ if env is None else env))
        except BaseException:
            ours.close()
            raise
        try:
            pidfd = os.pidfd_open(process.pid)
        except BaseException:
            ours.close()
            _reap(process)
            raise
        try:
            return ServiceConnection(ours, peer_pidfd=pidfd, timeout=timeout, on_end=lambda: _reap(process))
        except DeadObject as error:
            raise DeviceUnavailable(
                f"the service process for {', '.join(names)} ended with status {process.poll()} before it could "
                f"serve{_said(errors)}"
            ) from error
        except MissedDeadline as error:
            raise MissedDeadline(f"the service process did not start within {timeout} s{_said(errors)}") from error
    finally:
        os.close(errors)


def _spawn(names: Sequence[str], sock: int, errors: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    if not any(name in env for name in _THREAD_VARIABLES):
        env.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    # What is large goes back to the system when it is freed: glibc raises this by itself, up to 32 MiB, and keeps more.
    env.setdefault("MALLOC_MMAP_THRESHOLD_", str(16 << 20))
    env["PYTHONPATH"] = _safe_path.absolute_entries(env.get("PYTHONPATH", ""))
    command = [sys.executable, *_flags(), _BOOTSTRAP, "--socket", str(sock), "--parent", str(os.getpid())]
    if any(name.partition(":")[0] == _FUNCTIONS for name in names):
        command += [f"--path={os.path.abspath(entry)}" for entry in sys.path if isinstance(entry, str)]
    passed = [sock]
    stderr = -1
    with contextlib.suppress(OSError):  # without a stderr here the child's goes on into the memfd
        stderr = os.dup(2)
        passed.append(stderr)
        command += ["--stderr", str(stderr)]
    try:
        return subprocess.Popen(
            [*command, *names],
            stdin=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=passed,
            start_new_session=True,
            env=env,
        )
    finally:
        if stderr >= 0:
            os.close(stderr)


def _flags() -> list[str]:
    """Options of the child's interpreter: no directory before the libraries, and what this one must not look at."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []  # before that `_bootstrap` sees to it
    return [*safe, *["-E"] * sys.flags.ignore_environment, *["-s"] * sys.flags.no_user_site]


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child whose socket is closed; it ends by itself unless something is badly wrong."""
    try:
        process.wait(_EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _said(errors: int) -> str:
    """The end of what the child wrote to its stderr while it started."""
    size = os.fstat(errors).st_size
    text = os.pread(errors, 8192, max(0, size - 8192)).decode(errors="replace").strip()
    return f":\n{text}" if text else ""
