"""The server process of a row, which is stopped while other rows are measured."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from benchmarks.programs import end_with_parent
from nnburst.cli.bench.rounds import Subject
from nnburst.cli.bench.sampling import Samples, time_calls
from nnburst.errors import DeviceUnavailable

_START_SECONDS = 30.0
_STOP_SECONDS = 3.0

Serve = Callable[[Any], Generator[None, None, None]]


def _leave(signum: int, frame: object) -> NoReturn:
    raise SystemExit(0)


def _main(serve: Serve, end: Any, ready: Any, parent: int) -> None:
    """Tell the parent when the server is ready, then serve until SIGTERM. Runs in the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its servers
    signal.signal(signal.SIGTERM, _leave)
    end_with_parent()
    if os.getppid() != parent:
        return
    gc.disable()
    serving = serve(end)
    try:
        next(serving)
        ready.send(None)
        with suppress(StopIteration):
            next(serving)
    except SystemExit:
        pass
    finally:
        serving.close()


class ServerProcess:
    """A server in a child process; see `server_process`."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def subject(self, call: Any, timed: Callable[[Any, int], Samples] = time_calls) -> Subject:
        """Return a `Subject` that samples a call. Between samples the process is stopped."""

        def sample(count: int) -> Samples:
            self.unpark()
            try:
                timed(call, 1)  # this wakes the server
                return timed(call, count)
            finally:
                self.park()

        sample(1)
        return Subject(sample, self.pid)

    def park(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def unpark(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the process by SIGTERM, or SIGKILL if that does not work."""
        if self._process.is_alive():
            self.unpark()
            self._process.terminate()
            self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()


@contextmanager
def server_process(serve: Serve, end: Any) -> Iterator[ServerProcess]:
    """Run ``serve(end)`` in a spawned process for the duration of the context.

    Args:
        serve: Module-level generator function, which prepares, yields once, then serves for ever.
        end: The argument of `serve`, pickled into the child.

    Raises:
        DeviceUnavailable: The server did not become ready.
    """
    spawn = multiprocessing.get_context("spawn")
    ready, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_main, args=(serve, end, theirs, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    server = ServerProcess(process)
    try:
        with ready:
            if not ready.poll(_START_SECONDS):
                raise DeviceUnavailable(f"its server was not ready within {_START_SECONDS:.0f} s")
            try:
                ready.recv()
            except EOFError:
                raise DeviceUnavailable("its server ended while it started") from None
        yield server
    finally:
        server.stop()
