"""The process that speaks the Open Inference Protocol for a service, started and ended with it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from ..._safe_path import absolute_entries
from ...burst import default_polling_window
from ...errors import DeviceUnavailable, InvalidArgument
from ...service import safe_command
from .._targets import whole_number

_log = logging.getLogger(__name__)
_STARTING_S = 60.0
_ENDING_S = 5.0
_WINDOW_US = 300
"""For which the gateway looks for an answer before it sleeps: a service that slept has run a small model by then."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0


@contextlib.contextmanager
def gateway(
    address: str, names: Sequence[str], *, grpc: str | None, rest: str | None, shared_memory: bool
) -> Iterator[GatewayProcess | None]:
    """Start the gateway, if a protocol is wanted, and yield it.

    One that ends by itself is started again, at the same ports.

    Raises:
        DeviceUnavailable: The extra is not installed, or an address cannot be had.
        InvalidArgument: An address is none; or there are no models to serve.
    """
    wanted = {"--oip": grpc, "--oip-rest": rest}
    if not any(wanted.values()):
        if shared_memory:
            raise InvalidArgument("--oip-shared-memory needs --oip or --oip-rest")
        yield None
        return
    for option, text in wanted.items():
        host, colon, port = (text or "localhost:0").rpartition(":")
        if not host or not colon or (whole_number(port) or 0) > 65535 or whole_number(port) is None:
            raise InvalidArgument(f"{option} {text}: give HOST:PORT, for example 127.0.0.1:8001")
    if not names:
        raise InvalidArgument("--oip serves named models; give --model NAME=FILE, too")
    if not all(find_spec(module) for module in ("grpc", "tritonclient", "aiohttp")):
        raise DeviceUnavailable("--oip needs gRPC: pip install 'nnburst[oip]'")
    options = {"address": address, "names": names, "grpc": grpc, "rest": rest, "shared_memory": shared_memory}
    with contextlib.closing(GatewayProcess(options)) as running:
        yield running


class GatewayProcess:
    """The gateway's process, and a thread that waits for its end and starts another one.

    Attributes:
        ports: By protocol.

    Raises:
        DeviceUnavailable: It cannot be started.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.ports = self._start()
        for protocol, port in self.ports.items():  # also the next one is where clients look for it
            self._options[protocol] = f"{options[protocol].rpartition(':')[0]}:{port}"
        self._watcher = threading.Thread(target=self._watch, name="nnburst-gateway", daemon=True)
        self._watcher.start()

    def renew(self) -> None:
        """Have it open the models again, which are new ones."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # it ends, and the next one opens what is new; or
            assert self._process.stdin is not None  # it reads nothing and the pipe is full: then it will
            os.write(self._process.stdin.fileno(), b"\n")

    def close(self) -> None:
        """End it, and wait for that."""
        with self._lock:
            self._closing.set()
        self._end(self._process)
        self._watcher.join()

    def _start(self) -> dict[str, int]:
        """Start a process and wait until it is ready. Returns its ports."""
        try:
            command = [*safe_command("nnburst.gateway._run"), json.dumps(self._options)]
            env = {**os.environ, "PYTHONPATH": absolute_entries(os.environ.get("PYTHONPATH", ""))}
            if default_polling_window():  # there is a CPU for it
                env.setdefault("NNBURST_POLLING_WINDOW_US", str(_WINDOW_US))
            with self._lock:
                if self._closing.is_set():
                    raise DeviceUnavailable("--oip: the service is ending")
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
                assert self._process.stdin is not None
                os.set_blocking(self._process.stdin.fileno(), False)
        except OSError as error:
            raise DeviceUnavailable(f"--oip: cannot start the gateway: {error}") from error
        process = self._process
        try:
            return _ports(process)
        except BaseException:
            self._end(process)
            raise

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:  # no `renew` meanwhile
            process.stdin.close()  # with which it ends
        try:
            process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _watch(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            since = time.monotonic()
            status = self._process.wait()
            if self._closing.is_set():
                return
            if time.monotonic() - since > _LONGEST_PAUSE_S:
                pause = _FIRST_PAUSE_S
            self._end(self._process)
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            _log.error("the gateway (process %d) %s; another one is started", self._process.pid, how)
            while not self._closing.wait(pause):
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                try:
                    self._start()
                    _log.warning("the gateway is process %d now", self._process.pid)
                    break
                except DeviceUnavailable as error:
                    if not self._closing.is_set():
                        _log.error("%s; the next try is in %g s", error, pause)
            if self._closing.is_set():
                return


def _ports(process: subprocess.Popen[bytes]) -> dict[str, int]:
    """Wait for the gateway's first line, and return what it says."""
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
                f"--oip: the gateway was not ready within {_STARTING_S:g} s and was ended; "
                "start it again when the machine is less busy"
            )
        said = json.loads(line or b'{"error": "the gateway ended; see what it wrote above"}')
        if "error" in said:
            raise DeviceUnavailable(f"--oip: {said['error']}")
        return {str(protocol): int(port) for protocol, port in said.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):  # it is no such line, or `close` came first
        raise DeviceUnavailable(f"--oip: the gateway said {line[:200]!r}, not its ports") from None
    finally:
        watchdog.cancel()
        watchdog.join()
