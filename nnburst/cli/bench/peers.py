"""The other ways to echo 32 bytes between two Python processes: one row of a table each.

Every peer is used in the fastest way that its Python interface offers for one request and one answer: raw bytes
rather than pickled objects where there is a choice, and both sides polling where the peer is meant to be polled.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import multiprocessing
import os
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from queue import Empty
from typing import Any

from .placement import APART, ONE_CORE

MESSAGE = bytes(range(32))
_WAKE_SECONDS = 1.0  # servers of libraries that swallow signals look up this often to see whether they must end

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to echo.

    Attributes:
        key: Name for ``--only`` and in the JSON file.
        title: Name in the table.
        wait: ``poll`` or ``block``.
        link: Makes the two ends from a private directory; the second is pickled into the server process.
        client: Context that turns the client's end into a callable which makes one round trip.
        server: Generator on the server's end: prepares, yields once, then serves for ever.
        module: What must be importable, or None for the standard library.
        distribution: What pip must install for it.
        placement: Where the two processes run.
        payload_bytes: Size of the request.
    """

    key: str
    title: str
    wait: str
    link: Callable[[str], tuple[Any, Any]]
    client: Callable[[Any], Any]
    server: Callable[[Any], Generator[None, None, None]]
    module: str | None = None
    distribution: str | None = None
    placement: str = APART
    payload_bytes: int = len(MESSAGE)


# ---- Unix domain socket


def _socket_link(directory: str) -> tuple[Any, Any]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def _socket_client(sock: socket.socket) -> Iterator[Call]:
    send, recv = sock.send, sock.recv

    def echo() -> bytes:
        send(MESSAGE)
        return recv(64)

    with sock:
        yield echo


def _socket_server(sock: socket.socket) -> Generator[None, None, None]:
    send, recv = sock.send, sock.recv
    yield
    while message := recv(64):
        send(message)


@contextmanager
def _spun_socket_client(sock: socket.socket) -> Iterator[Call]:
    send, recv = sock.send, sock.recv

    def echo() -> bytes:
        send(MESSAGE)
        while True:
            try:
                return recv(64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass

    with sock:
        yield echo


def _spun_socket_server(sock: socket.socket) -> Generator[None, None, None]:
    send, recv = sock.send, sock.recv
    yield
    while True:
        with suppress(BlockingIOError):
            while message := recv(64, socket.MSG_DONTWAIT):
                send(message)
            return


# ---- a word of shared memory that both sides look at: 32 bytes behind a number, each way
#
# What Python can do by hand, and no way to call anybody: nothing is checked, nobody is woken or noticed when dead, and
# the number and the bytes arrive in order only on processors that keep stores in order (x86).

_THERE, _BACK = slice(8, 8 + len(MESSAGE)), slice(72, 72 + len(MESSAGE))  # behind word 0 and word 8, on a line each


def _word_link(directory: str) -> tuple[Any, Any]:
    fd = os.memfd_create("nnburst-bench-word", os.MFD_CLOEXEC)
    os.truncate(fd, mmap.PAGESIZE)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


@contextmanager
def _word_client(fd: int) -> Iterator[Call]:
    shared = mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    words = memoryview(shared).cast("Q")
    number = 0

    def echo() -> bytes:
        nonlocal number
        number += 1
        shared[_THERE] = MESSAGE
        words[0] = number
        while words[8] != number:
            pass
        return shared[_BACK]

    yield echo


def _word_server(path: str) -> Generator[None, None, None]:
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    words = memoryview(shared).cast("Q")
    number = 1
    yield
    while True:
        while words[0] != number:
            pass
        shared[_BACK] = shared[_THERE]
        words[8] = number
        number += 1


# ---- multiprocessing


def _pipe_link(directory: str) -> tuple[Any, Any]:
    return multiprocessing.Pipe()


@contextmanager
def _pipe_client(connection: Any) -> Iterator[Call]:
    send, recv = connection.send_bytes, connection.recv_bytes

    def echo() -> object:
        send(MESSAGE)
        return recv()

    with connection:
        yield echo


def _pipe_server(connection: Any) -> Generator[None, None, None]:
    send, recv = connection.send_bytes, connection.recv_bytes
    yield
    with suppress(EOFError):
        while True:
            send(recv())


def _queue_link(directory: str) -> tuple[Any, Any]:
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.Queue(), spawn.Queue()
    return ends, ends


@contextmanager
def _queue_client(queues: Any) -> Iterator[Call]:
    there, back = queues
    put, get = there.put, back.get

    def echo() -> object:
        put(MESSAGE)
        return get()

    try:
        yield echo
    finally:
        for queue in queues:
            queue.close()
            queue.join_thread()


def _queue_server(queues: Any) -> Generator[None, None, None]:
    there, back = queues
    put, get = back.put, there.get
    back.cancel_join_thread()
    yield
    while True:
        put(get())


def _simple_queue_link(directory: str) -> tuple[Any, Any]:
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.SimpleQueue(), spawn.SimpleQueue()
    return ends, ends


@contextmanager
def _simple_queue_client(queues: Any) -> Iterator[Call]:
    there, back = queues
    put, get = there.put, back.get

    def echo() -> object:
        put(MESSAGE)
        return get()

    with closing(there), closing(back):
        yield echo


def _simple_queue_server(queues: Any) -> Generator[None, None, None]:
    there, back = queues
    put, get = back.put, there.get
    yield
    while True:
        put(get())


# ---- pyzmq, pynng


def _ipc_link(directory: str) -> tuple[Any, Any]:
    address = f"ipc://{directory}/echo-{os.urandom(4).hex()}"
    return address, address


@contextmanager
def _zmq_client(address: str) -> Iterator[Call]:
    zmq: Any = importlib.import_module("zmq")
    with zmq.Context() as context, context.socket(zmq.REQ) as sock:
        sock.linger = 0
        sock.connect(address)
        send, recv = sock.send, sock.recv

        def echo() -> object:
            send(MESSAGE)
            return recv()

        yield echo


def _zmq_server(address: str) -> Generator[None, None, None]:
    zmq: Any = importlib.import_module("zmq")
    with zmq.Context() as context, context.socket(zmq.REP) as sock:
        sock.linger = 0
        sock.bind(address)
        send, recv = sock.send, sock.recv
        yield
        while True:
            send(recv())


@contextmanager
def _nng_client(address: str) -> Iterator[Call]:
    pynng: Any = importlib.import_module("pynng")
    with pynng.Req0(dial=address, recv_timeout=10_000) as sock:
        send, recv = sock.send, sock.recv

        def echo() -> object:
            send(MESSAGE)
            return recv()

        yield echo


def _nng_server(address: str) -> Generator[None, None, None]:
    pynng: Any = importlib.import_module("pynng")
    with pynng.Rep0(listen=address, recv_timeout=int(_WAKE_SECONDS * 1000)) as sock:
        send, recv = sock.send, sock.recv
        yield
        while True:
            with suppress(pynng.Timeout):
                while True:
                    send(recv())


# ---- iceoryx2: request-response on fixed-size payloads, both sides polling


class _Echo32(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint8 * len(MESSAGE))]

    @staticmethod
    def type_name() -> str:
        return "nnburst_bench_Echo32"


def _iceoryx_link(directory: str) -> tuple[Any, Any]:
    name = f"nnburst/bench/{os.getpid()}/{os.urandom(4).hex()}"
    return name, name


def _iceoryx_service(name: str) -> tuple[Any, Any]:
    iceoryx2: Any = importlib.import_module("iceoryx2")
    iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
    builder = iceoryx2.NodeBuilder.new().signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled)
    node = builder.create(iceoryx2.ServiceType.Ipc)
    service = node.service_builder(iceoryx2.ServiceName.new(name)).request_response(_Echo32, _Echo32)
    return node, service.open_or_create()


@contextmanager
def _iceoryx_client(name: str) -> Iterator[Call]:
    _node, service = _iceoryx_service(name)
    client = service.client_builder().create()
    send_copy = client.send_copy
    message = _Echo32.from_buffer_copy(MESSAGE)

    def echo() -> object:
        pending = send_copy(message)
        receive = pending.receive
        response = receive()
        while response is None:
            response = receive()
        return response.payload_ptr

    try:
        yield echo
    finally:
        client.delete()


def _iceoryx_server(name: str) -> Generator[None, None, None]:
    _node, service = _iceoryx_service(name)
    server = service.server_builder().create()
    receive, at = server.receive, _Echo32.from_address
    try:
        yield
        while True:
            request = receive()
            if request is not None:
                request.send_copy(at(request.payload_ptr))
    finally:
        request = None
        server.delete()


# ---- faster-fifo


def same_bytes(message: object) -> bytes:
    """Stand in for pickling on both ends of a faster-fifo queue, which takes and hands out views of bytes."""
    return bytes(message)  # type: ignore[call-overload, no-any-return]


def _fifo_link(directory: str) -> tuple[Any, Any]:
    faster_fifo: Any = importlib.import_module("faster_fifo")
    ends = tuple(faster_fifo.Queue(max_size_bytes=1 << 16, loads=same_bytes, dumps=same_bytes) for _ in range(2))
    return ends, ends


@contextmanager
def _fifo_poll_client(queues: Any) -> Iterator[Call]:
    there, back = queues
    put, get = there.put_nowait, back.get_nowait

    def echo() -> object:
        put(MESSAGE)
        while True:
            try:
                return get()
            except Empty:
                pass

    yield echo


def _fifo_poll_server(queues: Any) -> Generator[None, None, None]:
    there, back = queues
    put, get = back.put_nowait, there.get_nowait
    yield
    while True:
        try:
            put(get())
        except Empty:
            pass


@contextmanager
def _fifo_block_client(queues: Any) -> Iterator[Call]:
    there, back = queues
    put, get = there.put, back.get

    def echo() -> object:
        put(MESSAGE)
        return get(timeout=10.0)

    yield echo


def _fifo_block_server(queues: Any) -> Generator[None, None, None]:
    there, back = queues
    put, get = back.put, there.get
    yield
    while True:
        with suppress(Empty):
            while True:
                put(get(timeout=_WAKE_SECONDS))


PEERS: tuple[Peer, ...] = (
    Peer(
        "iceoryx2", "iceoryx2 request-response", "poll", _iceoryx_link, _iceoryx_client, _iceoryx_server,
        "iceoryx2", "iceoryx2",
    ),
    Peer("mmap-word", "a word in an mmap, nothing checked", "poll", _word_link, _word_client, _word_server),
    Peer(
        "seqpacket-poll", "Unix SOCK_SEQPACKET, MSG_DONTWAIT", "poll", _socket_link, _spun_socket_client,
        _spun_socket_server,
    ),
    Peer("seqpacket", "Unix SOCK_SEQPACKET", "block", _socket_link, _socket_client, _socket_server),
    Peer(
        "seqpacket-1core", "Unix SOCK_SEQPACKET", "block", _socket_link, _socket_client, _socket_server,
        placement=ONE_CORE,
    ),
    Peer("pipe", "multiprocessing.Pipe, bytes", "block", _pipe_link, _pipe_client, _pipe_server),
    Peer(
        "simple-queue", "multiprocessing.SimpleQueue", "block", _simple_queue_link, _simple_queue_client,
        _simple_queue_server,
    ),
    Peer("mp-queue", "multiprocessing.Queue", "block", _queue_link, _queue_client, _queue_server),
    Peer("zmq", "pyzmq ipc:// REQ/REP", "block", _ipc_link, _zmq_client, _zmq_server, "zmq", "pyzmq"),
    Peer("nng", "pynng ipc:// req/rep", "block", _ipc_link, _nng_client, _nng_server, "pynng", "pynng"),
    Peer(
        "faster-fifo-poll", "faster-fifo, bytes", "poll", _fifo_link, _fifo_poll_client, _fifo_poll_server,
        "faster_fifo", "faster-fifo",
    ),
    Peer(
        "faster-fifo", "faster-fifo, bytes", "block", _fifo_link, _fifo_block_client, _fifo_block_server,
        "faster_fifo", "faster-fifo",
    ),
)  # fmt: skip
"""The order is that of the table."""
