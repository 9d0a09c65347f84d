"""Services in this process, shared services, and honest clients that report disturbances."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from click.testing import CliRunner, Result

import nnburst
from nnburst.cli import main
from nnburst.devices import Device
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.host.host import ServiceHost
from nnburst.service.process.command import service_environment
from nnburst.service.wire.protocol import VERSION, Hello, encode
from support import ROOT
from support.connections import socket_pair
from support.processes import line_of, start_python
from support.waiting import PATIENCE, until

COMMAND = [sys.executable, "-c", "from nnburst.cli import main; main()"]


HONEST = """
import collections, json, sys, threading
import numpy as np
import nnburst
from nnburst import ModelBuilder, OperandType

b = ModelBuilder()
x = b.input("x", OperandType.TENSOR_FLOAT32, (64,))
b.output("y", x + x)
model = b.build()
outcomes, stop = collections.Counter(), threading.Event()

def once(session, execution, i):
    value = np.full(64, i, np.float32)
    execution.inputs["x"][:] = value
    execution.run()
    right = (execution.outputs["y"] == 2 * value).all()
    return right and (session.run(None, {"x": value})[0] == 2 * value).all()

def work():
    i = 0
    with nnburst.connect(sys.argv[1]) as first:
        session = first.session(model, timeout=float(sys.argv[2]))
        execution = session.bind()
        execution.timeout = float(sys.argv[2])
        while not stop.is_set():
            i += 1
            outcomes["right" if once(session, execution, i % 1000) else "wrong"] += 1
            if i % 50 == 0:  # one that comes now, too
                with nnburst.connect(sys.argv[1]) as service:
                    service.session(model, timeout=float(sys.argv[2])).close()
                outcomes["opened"] += 1
            stop.wait(0.001)

def guarded():
    try:
        work()
    except BaseException as error:
        outcomes[repr(error)] += 1

thread = threading.Thread(target=guarded)
thread.start()
for line in sys.stdin:
    print(json.dumps(outcomes), flush=True)
stop.set()
thread.join()
"""


def run_command(*arguments: str) -> Result:
    """Run the `nnburst` command in this process. Not for `serve`, which restarts its process."""
    return CliRunner(env=service_environment(os.environ)).invoke(main, arguments)


@contextlib.contextmanager
def in_process(devices: Sequence[Device], **options: Any) -> Iterator[tuple[ServiceConnection, ServiceHost]]:
    """Yield a client and a host in this process."""
    a, b = socket_pair()
    host = ServiceHost(devices, **options)
    host.serve(b)
    client = ServiceConnection(a)
    try:
        yield client, host
    finally:
        client.close()
        host.close()


class Honest:
    """A client in its own process that runs a model and opens connections without pause. Context manager."""

    def __init__(self, address: str) -> None:
        self.process = start_python(HONEST, address, str(PATIENCE))

    def right(self) -> int:
        """Return the number of right answers so far. Fail if the client had a wrong answer or an error."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        outcomes = json.loads(line_of(self.process))
        assert outcomes.keys() <= {"right", "opened"}, outcomes
        return int(outcomes.get("right", 0))

    def goes_on(self, runs: int = 20) -> None:
        """Wait until the client has `runs` more answers and has opened one more connection."""
        aim = self.right() + max(runs, 51)
        while self.right() < aim:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.01)

    def __enter__(self) -> Honest:
        try:
            self.goes_on()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


def save_scaling(path: Path, factor: float) -> str:
    """Save a model of y = x * factor for any number of rows."""
    from support.onnx_models import FLOAT, graph, node, save  # needs extras

    x, y = ((name, FLOAT, ("rows", 4)) for name in "xy")
    return save(graph([node("Mul", ["x", "f"], ["y"])], [x], [y], {"f": np.array([factor], np.float32)}), path)


class Shared:
    """A running ``nnburst serve``.

    Args:
        under: A command and its options, which runs the service's command.
        before: A statement that the process runs first, such as one that shortens a wait.
        env: Additional environment variables.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        under: Sequence[str] = (),
        before: str = "pass",
        env: Mapping[str, str] = {},
        **more: Any,
    ) -> None:
        self.path = directory / "shared.sock"
        self.address = f"unix:{self.path}"
        self.log = directory / "shared.log"
        (directory / "state").mkdir(mode=0o700, exist_ok=True)
        own = {"PYTHONPATH": str(ROOT), "NNBURST_STATE_DIR": str(directory / "state")}
        program = [*COMMAND[:-1], f"{before}; {COMMAND[-1]}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*under, *program, "serve", "--json", "--socket", str(self.path), *options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=service_environment({**os.environ, **own, **env}),  # else `serve` would restart its process
                **more,
            )
        try:
            line = line_of(self.process)
            assert line, self.log.read_text()
        except BaseException:
            self.process.kill()
            self.process.communicate()
            raise
        self.ready = json.loads(line)

    @property
    def pid(self) -> int:
        return self.process.pid

    @cached_property
    def worker(self) -> int:
        """Id of the process that runs named models. With ``--isolate none`` it runs all models."""
        with nnburst.connect(self.address) as service:
            return service.pid

    def descriptors(self) -> int:
        """Return the number of descriptors of the broker and `worker` together."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (self.pid, self.worker))

    def gives_back(self, before: int) -> None:
        """Wait until there are at most ten descriptors more than `before`: an honest client may be connecting."""
        until(
            lambda: self.descriptors() <= before + 10, lambda: f"{before} descriptors before, now {self.descriptors()}"
        )

    def resident(self) -> int:
        """Return the resident memory of the worker in bytes."""
        status = Path(f"/proc/{self.worker}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))

    def end(self) -> None:
        """End the service by SIGTERM. Fail if it does not exit with 0."""
        try:
            if self.process.returncode is None:  # else its test has ended it
                assert self.process.poll() is None, self.log.read_text()
                self.process.send_signal(signal.SIGTERM)
                assert self.process.wait(PATIENCE) == 0
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


def told_to_pass(directory: Path) -> str:
    """Return a statement for `Shared(before=)` that lets `let_pass` advance the broker's clock."""
    file = directory / "passed"
    file.touch()
    return (
        "import os, time; from types import SimpleNamespace; from nnburst.service.process import broker; "
        f"passed = lambda: time.monotonic() + os.path.getsize({str(file)!r}); "
        "broker.time = SimpleNamespace(monotonic=passed, sleep=time.sleep)"
    )


def let_pass(directory: Path, seconds: int) -> None:
    """Advance the broker's clock by `seconds`. A sleeping broker does not wake."""
    file = directory / "passed"
    os.truncate(file, file.stat().st_size + seconds)


@contextlib.contextmanager
def shared_service(directory: Path, *options: str, **more: Any) -> Iterator[Shared]:
    shared = Shared(directory, *options, **more)
    try:
        yield shared
    finally:
        shared.end()


class RawConnection:
    """A connection that sends raw messages, which may be wrong."""

    def __init__(self, to: Shared | socket.socket) -> None:
        self.sock = to if isinstance(to, socket.socket) else socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE)
        if isinstance(to, Shared):
            self.sock.connect(str(to.path))

    def send(self, header: bytes, body: bytes, fds: list[int]) -> None:
        """Send a message. Raises OSError if the other side has closed the connection."""
        socket.send_fds(self.sock, [header, body], fds)

    def answer(self) -> bytes:
        """Return the next message; empty if the other side has closed the connection."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, 70_000, 253)
        except ConnectionError:
            return b""
        for fd in fds:
            os.close(fd)
        return data

    def greet(self) -> None:
        self.send(header(1), encode(Hello(VERSION, os.getpid())), [])
        assert b"hello.reply" in self.answer()

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def header(number: int, n_fds: int = 0, kind: int = 0, flags: int = 0) -> bytes:
    return bytes([kind & 255, flags & 255]) + n_fds.to_bytes(2, "little") + number.to_bytes(4, "little")


def plain(body: bytes) -> Any:
    """Decode a message into lists, dicts and scalars."""
    return msgspec.msgpack.decode(body)
