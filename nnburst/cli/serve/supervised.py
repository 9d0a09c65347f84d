"""A process that works for a service: started and ended with it, and started again if it ends by itself."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import DeviceUnavailable
from ...service import absolute_entries, safe_command

_log = logging.getLogger(__name__)
_STARTING_S = 60.0
_ENDING_S = 5.0
_PAUSE_S = 0.5


class SupervisedProcess:
    """A process, and a thread that waits for its end and starts another one.

    It runs a module's `main` with its options as JSON, prints one line of JSON when it is ready (its ports by protocol,
    or an ``error``), and ends when its standard input does.

    Args:
        what: It is, for people: ``the gateway``.
        option: Of `nnburst serve` that asked for it.
        module: That it runs.
        options: Of that.
        fds: Descriptors that it inherits, under the same numbers.
        environment: Variables that are set unless they are already.
        patience: Seconds that it may take to end what it does, when it is told to end.

    Attributes:
        options: As given; changes count from the next start on.
        ports: What it said when it was first ready.

    Raises:
        DeviceUnavailable: It cannot be started.
    """

    def __init__(
        self,
        what: str,
        option: str,
        module: str,
        options: dict[str, Any],
        *,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        patience: float = 0.0,
    ) -> None:
        self.options = options
        self._what, self._option, self._module = what, option, module
        self._fds, self._environment = fds, environment or {}
        self._patience = patience
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.ports: dict[str, int | str] = self._start()
        self._watcher = threading.Thread(target=self._watch, name=f"nnburst-{option.lstrip('-')}", daemon=True)
        self._watcher.start()

    def tell(self, line: str = "") -> None:
        """Send it a line: what it reads from is new."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # it ends, and the next one begins with what is new;
            assert self._process.stdin is not None  # or it reads nothing and the pipe is full: then it will
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())

    def close(self) -> None:
        """Tell it to end, start no other one, and wait. Idempotent."""
        with self._lock:
            self._closing.set()
        self._end(self._process)
        self._watcher.join()

    def _start(self) -> dict[str, int | str]:
        """Start a process and wait until it is ready. Returns its ports."""
        try:
            command = [*safe_command(self._module), json.dumps(self.options)]
            given = {**self._environment, **os.environ}
            env = {**given, "PYTHONPATH": absolute_entries(os.environ.get("PYTHONPATH", ""))}
            with self._lock:
                if self._closing.is_set():
                    raise DeviceUnavailable(f"{self._option}: the service is ending")
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, pass_fds=self._fds
                )
                assert self._process.stdin is not None
                os.set_blocking(self._process.stdin.fileno(), False)
        except OSError as error:
            raise DeviceUnavailable(f"{self._option}: cannot start {self._what}: {error}") from error
        process = self._process
        try:
            return self._ports(process)
        except BaseException:
            self._end(process)
            raise

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:  # no `tell` meanwhile
            process.stdin.close()  # with which it ends
        try:
            process.wait(self._patience + _ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _watch(self) -> None:
        while True:
            status = self._process.wait()
            if self._closing.is_set():
                return
            self._end(self._process)
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            _log.error("%s (process %d) %s; another one is started", self._what, self._process.pid, how)
            while not self._closing.wait(_PAUSE_S):
                try:
                    self._start()
                    _log.warning("%s is process %d now", self._what, self._process.pid)
                    break
                except DeviceUnavailable as error:
                    if not self._closing.is_set():
                        _log.error("%s; it is tried again", error)
            if self._closing.is_set():
                return

    def _ports(self, process: subprocess.Popen[bytes]) -> dict[str, int | str]:
        """Wait for its first line, and return what it says."""
        assert process.stdout is not None
        overdue = threading.Event()

        def end() -> None:
            overdue.set()
            process.kill()

        watchdog = threading.Timer(_STARTING_S, end)
        watchdog.start()
        line = b""
        try:
            line = process.stdout.readline()
            if overdue.is_set():
                raise DeviceUnavailable(
                    f"{self._option}: {self._what} was not ready within {_STARTING_S:g} s and was ended; "
                    "start it again when the machine is less busy"
                )
            said = json.loads(line or b'{"error": "it ended; see what it wrote above"}')
            if "error" in said:
                raise DeviceUnavailable(f"{self._option}: {said['error']}")
            return {str(key): port if str(port).startswith("unix:") else int(port) for key, port in said.items()}
        except (ValueError, TypeError, AttributeError, RecursionError):  # it is no such line, or `close` came first
            raise DeviceUnavailable(f"{self._option}: {self._what} said {line[:200]!r}, not its ports") from None
        finally:
            watchdog.cancel()
            watchdog.join()
