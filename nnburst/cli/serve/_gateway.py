"""The process that speaks the Open Inference Protocol for a service, started and ended with it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from ...errors import DeviceUnavailable, InvalidArgument

_ENDING_S = 5.0


@contextlib.contextmanager
def gateway(
    address: str, names: Sequence[str], *, grpc: str | None, rest: str | None, shared_memory: bool
) -> Iterator[dict[str, int]]:
    """Start the gateway, if a protocol is wanted, and yield its ports by protocol.

    Raises:
        DeviceUnavailable: The extra is not installed, or an address cannot be had.
        InvalidArgument: An address is none; or there are no models to serve.
    """
    wanted = {"--oip": grpc, "--oip-rest": rest}
    if not any(wanted.values()):
        if shared_memory:
            raise InvalidArgument("--oip-shared-memory needs --oip or --oip-rest")
        yield {}
        return
    for option, text in wanted.items():
        host, colon, port = (text or "localhost:0").rpartition(":")
        if not host or not colon or not port.isdigit() or int(port) > 65535:
            raise InvalidArgument(f"{option} {text}: give HOST:PORT, for example 127.0.0.1:8001")
    if not names:
        raise InvalidArgument("--oip serves named models; give --model NAME=FILE, too")
    if not all(find_spec(module) for module in ("grpc", "tritonclient", "aiohttp")):
        raise DeviceUnavailable("--oip needs gRPC: pip install 'nnburst[oip]'")
    options = {"address": address, "names": names, "grpc": grpc, "rest": rest, "shared_memory": shared_memory}
    command = [sys.executable, "-m", "nnburst.gateway._run", json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline() or b"{}")
            if not said or "error" in said:
                raise DeviceUnavailable(f"--oip: {said.get('error', 'the gateway ended; see what it wrote above')}")
            yield said
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends with its standard input
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
