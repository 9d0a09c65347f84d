"""Rows (b) and (c): the queue in C, and the queue between two Python processes."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI

from nnburst.cli.bench.rounds import Case, Cpus, Subject, allowed_cpus
from nnburst.cli.bench.sampling import Samples, from_c
from nnburst.fmq import MessageQueue, MQDescriptor

from .peers import MESSAGE
from .server import server_process

PACKET_THERE, PACKET_BACK = 7, 4  # datums of a request and of a result, for a model with one input and one output
DATUM_BYTES = 24
_HERE = Path(__file__).parent
_SOURCES = [_HERE / "queue.c", *(path for path in _HERE.parents[1].glob("csrc/*.c") if path.name != "bench.c")]
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-pthread")


@cache
def _library() -> Any:
    """Compile the measurement together with the C core, using the package's compiler options."""
    ffi = FFI()
    ffi.cdef("int bench_queue(int, int, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t *);")
    with tempfile.TemporaryDirectory(prefix="nnburst-bench-") as directory:
        file = str(Path(directory, "queue.so"))
        command = ["cc", *_FLAGS, "-o", file, *map(str, sorted(_SOURCES)), "-lrt"]
        compiled = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if compiled.returncode:
            raise RuntimeError(f"benchmarks/record/queue.c does not compile: {compiled.stderr.strip()}")
        return ffi.dlopen(file)


def queue_samples(cpus: Cpus, there: int, back: int, count: int, warmup: int = 1100) -> Samples:
    """Send `there` datums and receive `back` datums between two C threads. Return nanoseconds, int64[count].

    The queues are new each time. The warm-up goes around the ring of 1024 once, which allocates all its pages.
    """
    return from_c(
        count,
        "message queue ping-pong",
        lambda out: _library().bench_queue(cpus.client, cpus.server, there, back, warmup, count, out),
    )


@contextmanager
def _open_c_queue(there: int, back: int) -> Iterator[Subject]:
    _library()
    yield Subject(partial(queue_samples, allowed_cpus(), there, back))


# ---- (c): MessageQueue between two Python processes

_WORD, _WORDS = np.dtype(np.uint64), len(MESSAGE) // 8


def _mq_ends(descriptors: tuple[MQDescriptor, MQDescriptor]) -> tuple[MessageQueue, MessageQueue]:
    first, second = (MessageQueue.attach(d, _WORD) for d in descriptors)
    return first, second


def _mq_poll_server(descriptors: tuple[MQDescriptor, MQDescriptor]) -> Generator[None, None, None]:
    requests, replies = _mq_ends(descriptors)
    message = np.zeros(_WORDS, dtype=_WORD)
    read, write = requests.read, replies.write
    with requests, replies:
        yield
        while True:
            if read(out=message) is not None:
                write(message)


def _mq_block_server(descriptors: tuple[MQDescriptor, MQDescriptor]) -> Generator[None, None, None]:
    requests, replies = _mq_ends(descriptors)
    message = np.zeros(_WORDS, dtype=_WORD)
    read, write = requests.read_blocking, replies.write_blocking
    with requests, replies:
        yield
        while True:
            read(out=message)
            write(message)


def _mq_poll_echo(requests: MessageQueue, replies: MessageQueue) -> Callable[[], object]:
    message, answer = np.frombuffer(MESSAGE, dtype=_WORD), np.zeros(_WORDS, dtype=_WORD)
    write, read = requests.write, replies.read

    def echo() -> None:
        write(message)
        while read(out=answer) is None:
            pass

    return echo


def _mq_block_echo(requests: MessageQueue, replies: MessageQueue) -> Callable[[], object]:
    message, answer = np.frombuffer(MESSAGE, dtype=_WORD), np.zeros(_WORDS, dtype=_WORD)
    write, read = requests.write_blocking, replies.read_blocking

    def echo() -> None:
        write(message)
        read(out=answer)

    return echo


@contextmanager
def _open_mq(
    echo: Callable[[MessageQueue, MessageQueue], Callable[[], object]],
    server: Callable[[Any], Generator[None, None, None]],
) -> Iterator[Subject]:
    with ExitStack() as stack:
        queues = [stack.enter_context(MessageQueue(_WORD, 128)) for _ in range(2)]
        descriptors = tuple(stack.enter_context(queue.descriptor) for queue in queues)
        process = stack.enter_context(server_process(server, descriptors))
        yield process.subject(echo(queues[0], queues[1]))


QUEUE_CASES: tuple[Case, ...] = (
    Case("queue", "b", "queue, one element, C", "poll", DATUM_BYTES, partial(_open_c_queue, 1, 1)),
    Case(
        "queue-packet",
        "b",
        f"queue, packets of {PACKET_THERE} and {PACKET_BACK}, C",
        "poll",
        PACKET_THERE * DATUM_BYTES,
        partial(_open_c_queue, PACKET_THERE, PACKET_BACK),
    ),
    Case("mq-poll", "c", "MessageQueue", "poll", 32, partial(_open_mq, _mq_poll_echo, _mq_poll_server)),
    Case("mq-block", "c", "MessageQueue", "block", 32, partial(_open_mq, _mq_block_echo, _mq_block_server)),
)
