"""The process that speaks the Open Inference Protocol for a service, started and ended with it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...burst import default_polling_window
from ...errors import BadState, DeviceUnavailable, InvalidArgument
from ...service import check_free
from ..targets import whole_number
from .supervised import SupervisedProcess

_log = logging.getLogger(__name__)
_WINDOW_US = 300
"""For which the gateway looks for an answer before it sleeps: a service that slept has run a small model by then."""


@contextlib.contextmanager
def gateway(options: dict[str, Any], *, has_models: bool) -> Iterator[Gateway | None]:
    """Start the gateway, if a protocol is wanted, and yield it.

    One that ends by itself is started again, at the same ports.

    Args:
        options: Of `nnburst.gateway.run.run`, as they were given.

    Raises:
        BadState: Another process listens at the path.
        DeviceUnavailable: The extra is not installed, or an address cannot be had.
        InvalidArgument: An address is none; or there are no models to serve.
    """
    wanted = {"--oip": options["grpc"], "--oip-rest": options["rest"]}
    if not any(wanted.values()):
        if options["shared_memory"] or options["control"]:
            raise InvalidArgument("--oip-shared-memory and --oip-control are for clients of --oip or --oip-rest")
        yield None
        return
    for option, text in wanted.items():
        host, colon, port_text = (text or "localhost:0").rpartition(":")
        if text is not None and text.startswith("unix:/"):
            check_free(Path(text.removeprefix("unix:")))
            continue
        if options["token_file"] is None and host not in ("localhost", "127.0.0.1", "[::1]"):
            _log.warning(
                "%s %s: other machines may reach it, and nobody is asked for a token (--token-file)", option, text
            )
        if not host or not colon or (whole_number(port_text) or 0) > 65535 or whole_number(port_text) is None:
            raise InvalidArgument(f"{option} {text}: give HOST:PORT, for example 127.0.0.1:8001, or unix:/PATH")
    if not has_models:
        raise InvalidArgument(
            "--oip serves named models; give --model NAME=FILE, --models DIR or FILE.py:FUNCTION, too"
        )
    if not all(find_spec(module) for module in ("grpc", "grpc_health", "grpc_reflection", "aiohttp")):
        raise DeviceUnavailable("--oip needs gRPC: pip install 'nnburst[oip]'")
    with contextlib.closing(Gateway({**options, "unloaded": []})) as running:
        yield running


class Gateway:
    """The process.

    Attributes:
        ports: By protocol; the address of a Unix socket.

    Raises:
        DeviceUnavailable: It cannot be started.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        # If there is a CPU for it.
        window = {"NNBURST_POLLING_WINDOW_US": str(_WINDOW_US)} if default_polling_window() else {}
        self._process = SupervisedProcess(
            "the gateway", "--oip", "nnburst.gateway.run", options, environment=window, patience=options["drain"]
        )
        self.ports = self._process.ports
        for protocol, port in self.ports.items():  # where clients look for the next one
            if not isinstance(port, str):
                options[protocol] = f"{options[protocol].rpartition(':')[0]}:{port}"

    def renew(self, unloaded: Sequence[str]) -> None:
        """Have it open the models again, which are new ones; some were unloaded."""
        self._process.options["unloaded"] = [*unloaded]  # for one that is started later
        self._process.tell()

    def close(self) -> None:
        self._process.close()
        for port in self.ports.values():
            if isinstance(port, str):
                with contextlib.suppress(OSError, BadState):  # another gateway may have taken the place
                    path = Path(port.removeprefix("unix:"))
                    check_free(path)
                    path.unlink()
