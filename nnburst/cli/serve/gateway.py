"""The process that speaks the Open Inference Protocol for a service, started and ended with it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from ...burst import default_polling_window
from ...errors import DeviceUnavailable, InvalidArgument
from ..targets import whole_number
from .supervised import SupervisedProcess

_log = logging.getLogger(__name__)
_WINDOW_US = 300
"""For which the gateway looks for an answer before it sleeps: a service that slept has run a small model by then."""


@contextlib.contextmanager
def gateway(
    address: str, names: Sequence[str], *, grpc: str | None, rest: str | None, shared_memory: bool
) -> Iterator[Gateway | None]:
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
        host, colon, port_text = (text or "localhost:0").rpartition(":")
        if not host or not colon or (whole_number(port_text) or 0) > 65535 or whole_number(port_text) is None:
            raise InvalidArgument(f"{option} {text}: give HOST:PORT, for example 127.0.0.1:8001")
    if not names:
        raise InvalidArgument("--oip serves named models; give --model NAME=FILE or FILE.py:FUNCTION, too")
    if not all(find_spec(module) for module in ("grpc", "tritonclient", "aiohttp")):
        raise DeviceUnavailable("--oip needs gRPC: pip install 'nnburst[oip]'")
    options: dict[str, Any] = {"address": address, "names": names, "grpc": grpc, "rest": rest}
    options["shared_memory"] = shared_memory
    with contextlib.closing(Gateway(options)) as running:
        yield running


class Gateway:
    """Two processes that listen at the same ports: one at work, and one that gets what comes after its end.

    Args:
        options: Of `nnburst.gateway.run.run`.

    Attributes:
        ports: By protocol.

    Raises:
        DeviceUnavailable: It cannot be started.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        first = _process(options)
        self._processes = [first]
        self.ports = first.ports
        for protocol, port in self.ports.items():  # where clients look for it
            options[protocol] = f"{options[protocol].rpartition(':')[0]}:{port}"
        try:
            self._processes.append(_process({**options, "joins": True}))
        except DeviceUnavailable as error:
            _log.warning("%s; no second gateway stands by", error)
        except BaseException:
            first.close()
            raise
        else:
            options["joins"] = True  # the next one stands by

    def renew(self) -> None:
        """Have it open the models again, which are new ones."""
        for process in self._processes:
            process.tell()

    def close(self) -> None:
        """End it, and wait for that."""
        for process in self._processes:
            process.dismiss()
        for process in self._processes:
            process.close()


def _process(options: dict[str, Any]) -> SupervisedProcess:
    # If there is a CPU for it.
    window = {"NNBURST_POLLING_WINDOW_US": str(_WINDOW_US)} if default_polling_window() else {}
    return SupervisedProcess("the gateway", "--oip", "nnburst.gateway.run", options, environment=window)
