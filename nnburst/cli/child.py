"""Calls of a function in another process. Arguments and results are pickled and sent through a `multiprocessing.Pipe`.

`nnburst bench` and `nnburst demo` compare bursts with these calls.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from ..errors import GeneralFailure


@contextmanager
def caller_of(make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> Iterator[tuple[Callable[[Any], Any], int]]:
    """Spawn a process, and call ``make(*arguments)`` there. Yield the result's proxy, and the process's id."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, make, *arguments), daemon=True)
    process.start()
    theirs.close()

    def ask(question: Any) -> Any:
        try:
            ours.send(question)
            return ours.recv()
        except (EOFError, ConnectionError):
            raise GeneralFailure("the multiprocessing child has ended; its message is above") from None

    assert process.pid is not None
    try:
        yield ask, process.pid
    finally:
        ours.close()
        process.terminate()
        process.join()
        process.close()


def _serve(connection: Connection, make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
    answer = make(*arguments)
    with suppress(EOFError, KeyboardInterrupt):  # Ctrl-C also signals this process
        while True:
            connection.send(answer(connection.recv()))
