"""The processes that start and end with a service: the gateway and the metrics server."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..._core.fds import wait_readable
from ...burst.polling import default_polling_window
from ...errors import BadState, DeviceUnavailable, InvalidArgument
from ...service.process.command import absolute_entries, safe_command
from ...service.process.discovery import check_free
from ..targets import whole_number

_log = logging.getLogger(__name__)
_STARTING_S = 60.0
_ENDING_S = 5.0
_PAUSE_S = 1.0
_WINDOW_US = 300
"""Microseconds that the gateway polls for an answer, enough for a sleeping service to wake and run a small model."""


class Child:
    """A process, which is restarted one second after an unexpected end.

    The process runs `nnburst.gateway.run` with options as JSON. When ready, the process prints one line of JSON: ports
    by protocol, or an ``error``.

    Args:
        what: Name of the process in messages, such as ``the gateway``.
        option: The option of `nnburst serve` that starts the process.
        options: Fields of `nnburst.gateway.run.Served`.
        patience: Seconds to wait for the end of the process.
        environment: Default values of environment variables.

    Attributes:
        options: The options for the next start, with the ports of the first start.
        ports: Port, or address of a Unix socket, of each protocol.

    Raises:
        DeviceUnavailable: The process cannot be started.
    """

    def __init__(
        self,
        what: str,
        option: str,
        options: dict[str, Any],
        *,
        patience: float = 0.0,
        environment: Mapping[str, str] = {},
    ) -> None:
        self.options = options
        self._what, self._option = what, option
        self._patience, self._environment = patience + _ENDING_S, environment
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.ports: dict[str, int | str] = self._start()
        for protocol, port in self.ports.items():  # a restarted process uses the same addresses
            if not isinstance(port, str):
                options[protocol] = f"{options[protocol].rpartition(':')[0]}:{port}"
        self._watcher = threading.Thread(target=self._watch, name=f"nnburst-{option.lstrip('-')}", daemon=True)
        self._watcher.start()

    def renew(self) -> None:
        self._process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        """End the process for good, and wait for its end. Idempotent."""
        with self._lock:
            self._closing.set()
        self._end(self._process)
        self._watcher.join()
        for port in self.ports.values():
            if isinstance(port, str):
                with contextlib.suppress(OSError, BadState):  # another service may already listen at the path
                    path = Path(port.removeprefix("unix:"))
                    check_free(path)
                    path.unlink()

    def _start(self) -> dict[str, int | str]:
        """Start a process and wait until it is ready. Return its ports."""
        env = {**self._environment, **os.environ, "PYTHONPATH": absolute_entries(os.environ.get("PYTHONPATH", ""))}
        try:
            command = [*safe_command("nnburst.gateway.run"), json.dumps(self.options)]
            with self._lock:
                if self._closing.is_set():
                    raise DeviceUnavailable(f"{self._option}: the service is ending")
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
                self._process = process
        except OSError as error:
            raise DeviceUnavailable(f"{self._option}: cannot start {self._what}: {error}") from error
        try:
            assert process.stdout is not None
            if not wait_readable([process.stdout.fileno()], _STARTING_S):
                raise DeviceUnavailable(
                    f"{self._option}: {self._what} was not ready within {_STARTING_S:g} s and was ended; "
                    "start it again when the machine is less busy"
                )
            line = process.stdout.readline()
            reply: dict[str, Any] = json.loads(line or b'{"error": "it ended; see what it wrote above"}')
            if "error" in reply:
                raise DeviceUnavailable(f"{self._option}: {reply['error']}")
            return reply
        except (ValueError, TypeError) as error:  # the line is malformed, or `close` was called
            self._end(process)
            raise DeviceUnavailable(f"{self._option}: {self._what} did not say its ports: {error}") from error
        except BaseException:
            self._end(process)
            raise

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()  # the process ends at the end of its input
        try:
            process.wait(self._patience)
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
            if self._closing.wait(_PAUSE_S):
                return
            try:
                self._start()
                _log.warning("%s is process %d now", self._what, self._process.pid)
            except DeviceUnavailable as error:
                _log.error("%s", error)


def _check_address(option: str, address: str, *, asks_for_tokens: bool) -> None:
    """Check that an address is ``HOST:PORT`` or a free ``unix:/PATH``. Warn if other users can connect without a token.

    Raises:
        BadState: Another process listens at the path.
        InvalidArgument: The address is malformed.
    """
    if address.startswith("unix:/"):
        check_free(Path(address.removeprefix("unix:")))
        return
    host, colon, text = address.rpartition(":")
    port = whole_number(text)
    if not host or not colon or port is None or port > 65535:
        raise InvalidArgument(f"{option} {address}: give HOST:PORT, for example 127.0.0.1:8001, or unix:/PATH")
    if not asks_for_tokens and host not in ("localhost", "127.0.0.1", "[::1]"):
        _log.warning(
            "%s %s: other machines may reach it, and nobody is asked for a token (--token-file)", option, address
        )


def gateway(has_models: bool, options: dict[str, Any]) -> Child | None:
    """Start the gateway, if an option requests a protocol.

    Args:
        has_models: True if there is a model to serve.
        options: Fields of `nnburst.gateway.run.Served` from the command line.

    Raises:
        BadState: Another process listens at the path.
        DeviceUnavailable: The extra is not installed, or an address is unusable.
        InvalidArgument: An address is malformed, or there are no models to serve.
    """
    wanted = {"--oip": options["grpc"], "--oip-rest": options["rest"]}
    if not any(wanted.values()):
        if options["shared_memory"] or options["control"] or options["cert"] or options["key"]:
            raise InvalidArgument(
                "--oip-shared-memory, --oip-control, --oip-cert and --oip-key are for clients of --oip or --oip-rest"
            )
        return None
    for option, address in wanted.items():
        if address is not None:
            _check_address(option, address, asks_for_tokens=options["token_file"] is not None)
    if not has_models:
        raise InvalidArgument(
            "--oip serves named models; give --model NAME=FILE, --models DIR or FILE.py:FUNCTION, too"
        )
    if not all(find_spec(module) for module in ("grpc", "grpc_health", "grpc_reflection", "aiohttp")):
        raise DeviceUnavailable("--oip needs gRPC: pip install 'nnburst[oip]'")
    environment = {"GRPC_VERBOSITY": "NONE"}  # otherwise gRPC logs each malformed request, without a limit
    if default_polling_window():
        environment["NNBURST_POLLING_WINDOW_US"] = str(_WINDOW_US)
    return Child("the gateway", "--oip", options, patience=options["drain"], environment=environment)


def start_metrics(where: str | None, options: Mapping[str, Any]) -> Child | None:
    """Start the metrics server, if an address is given.

    Args:
        where: ``HOST:PORT``, a port of 127.0.0.1 (0 for any free port), or ``unix:/PATH``.
        options: Other fields of `nnburst.gateway.run.Served`.

    Raises the same errors as `gateway`, and `DeviceUnavailable` for an invalid file of tokens.
    """
    if where is None:
        return None
    if not all(find_spec(module) for module in ("prometheus_client", "aiohttp")):
        raise DeviceUnavailable("--metrics needs prometheus-client: pip install 'nnburst[metrics]'")
    address = where if ":" in where else f"127.0.0.1:{where}"
    _check_address("--metrics", address, asks_for_tokens=options["token_file"] is not None)
    return Child("the process that serves metrics", "--metrics", {**options, "metrics": address})
