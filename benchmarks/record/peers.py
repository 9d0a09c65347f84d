"""Other ways to echo 32 bytes between two Python processes, one row each.

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
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from nnburst.cli.bench.rounds import Case, Subject

from .server import Serve, server_process

MESSAGE = bytes(range(32))
_WAKE_SECONDS = 1.0  # servers of libraries that swallow signals check this often whether they must end

Call = Callable[[], object]


def _asking(send: Callable[[bytes], object], receive: Call) -> Call:
    def echo() -> object:
        send(MESSAGE)
        return receive()

    return echo


def _answer(send: Callable[[Any], object], receive: Call) -> NoReturn:
    while True:
        send(receive())


@contextmanager
def _open(link: Callable[[str], tuple[Any, Any]], client: Callable[[Any], Any], serve: Serve) -> Iterator[Subject]:
    with ExitStack() as stack:
        ours, theirs = link(stack.enter_context(TemporaryDirectory(prefix="nnburst-bench-")))
        process = stack.enter_context(server_process(serve, theirs))
        if theirs is not ours and hasattr(theirs, "close"):
            theirs.close()
        call = stack.enter_context(client(ours))
        answer = call()
        if isinstance(answer, bytes) and answer != MESSAGE:
            raise RuntimeError(f"its answer is {answer!r}, not what it was sent")
        stack.callback(process.unpark)  # the client closes after this, as it may need an answer
        yield process.subject(call)


# ---- Unix domain socket


def _socket_link(directory: str) -> tuple[Any, Any]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def _socket_client(sock: socket.socket) -> Iterator[Call]:
    with sock:
        yield _asking(sock.send, partial(sock.recv, 64))


def socket_server(sock: socket.socket) -> Generator[None, None, None]:
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
# This is a lower bound, which no program should use: nothing is checked, no process is woken, no death is noticed, and
# number and bytes arrive in order only on processors that keep stores in order (x86).

_THERE, _BACK = slice(8, 8 + len(MESSAGE)), slice(72, 72 + len(MESSAGE))  # they follow words 0 and 8, on a line each


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
    with connection:
        yield _asking(connection.send_bytes, connection.recv_bytes)


def _pipe_server(connection: Any) -> Generator[None, None, None]:
    yield
    with suppress(EOFError):
        _answer(connection.send_bytes, connection.recv_bytes)


def _queue_link(kind: str, directory: str) -> tuple[Any, Any]:
    made = getattr(multiprocessing.get_context("spawn"), kind)
    ends = made(), made()
    return ends, ends


@contextmanager
def _queue_client(queues: Any) -> Iterator[Call]:
    there, back = queues
    try:
        yield _asking(there.put, back.get)
    finally:
        for queue in queues:
            queue.close()
            queue.join_thread()


def _queue_server(queues: Any) -> Generator[None, None, None]:
    queues[1].cancel_join_thread()
    yield from _simple_queue_server(queues)


@contextmanager
def _simple_queue_client(queues: Any) -> Iterator[Call]:
    there, back = queues
    with closing(there), closing(back):
        yield _asking(there.put, back.get)


def _simple_queue_server(queues: Any) -> Generator[None, None, None]:
    there, back = queues
    yield
    _answer(back.put, there.get)


# ---- pyzmq, pynng


def _ipc_link(directory: str) -> tuple[Any, Any]:
    address = f"ipc://{directory}/echo"
    return address, address


@contextmanager
def _zmq_client(address: str) -> Iterator[Call]:
    zmq: Any = importlib.import_module("zmq")
    with zmq.Context() as context, context.socket(zmq.REQ) as sock:
        sock.linger = 0
        sock.connect(address)
        yield _asking(sock.send, sock.recv)


def _zmq_server(address: str) -> Generator[None, None, None]:
    zmq: Any = importlib.import_module("zmq")
    with zmq.Context() as context, context.socket(zmq.REP) as sock:
        sock.linger = 0
        sock.bind(address)
        yield
        _answer(sock.send, sock.recv)


@contextmanager
def _nng_client(address: str) -> Iterator[Call]:
    pynng: Any = importlib.import_module("pynng")
    with pynng.Req0(dial=address, recv_timeout=10_000) as sock:
        yield _asking(sock.send, sock.recv)


def _nng_server(address: str) -> Generator[None, None, None]:
    pynng: Any = importlib.import_module("pynng")
    with pynng.Rep0(listen=address, recv_timeout=int(_WAKE_SECONDS * 1000)) as sock:
        yield
        while True:
            with suppress(pynng.Timeout):
                _answer(sock.send, sock.recv)


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
    """Return a message unchanged, in place of pickling at both ends of a faster-fifo queue."""
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
    yield _asking(there.put, partial(back.get, timeout=10.0))


def _fifo_block_server(queues: Any) -> Generator[None, None, None]:
    there, back = queues
    yield
    while True:
        with suppress(Empty):
            _answer(back.put, partial(there.get, timeout=_WAKE_SECONDS))


def _case(
    key: str, title: str, wait: str, link: Callable[[str], tuple[Any, Any]], client: Callable[[Any], Any], serve: Serve,
    one_core: bool = False,
) -> Case:  # fmt: skip
    """Return a row. `link` creates the two ends, `client` and `serve` use them. The server gets `serve` pickled."""
    return Case(key, "e", title, wait, len(MESSAGE), partial(_open, link, client, serve), one_core)


_MODULES = {
    "iceoryx2": "iceoryx2",
    "zmq": "zmq",
    "nng": "pynng",
    "faster-fifo": "faster_fifo",
    "faster-fifo-poll": "faster_fifo",
}
"""Third-party modules that rows need: ``pip install 'nnburst[bench]'``."""
PEER_CASES: tuple[Case, ...] = (
    _case(
        "iceoryx2", "iceoryx2 request-response", "poll", _iceoryx_link, _iceoryx_client, _iceoryx_server,
    ),
    _case("mmap-word", "a word in an mmap, nothing checked", "poll", _word_link, _word_client, _word_server),
    _case(
        "seqpacket-poll", "Unix SOCK_SEQPACKET, MSG_DONTWAIT", "poll", _socket_link, _spun_socket_client,
        _spun_socket_server,
    ),
    _case("seqpacket", "Unix SOCK_SEQPACKET", "block", _socket_link, _socket_client, socket_server),
    _case(
        "seqpacket-1core", "Unix SOCK_SEQPACKET", "block", _socket_link, _socket_client, socket_server,
        one_core=True,
    ),
    _case("pipe", "multiprocessing.Pipe, bytes", "block", _pipe_link, _pipe_client, _pipe_server),
    _case(
        "simple-queue", "multiprocessing.SimpleQueue", "block", partial(_queue_link, "SimpleQueue"),
        _simple_queue_client, _simple_queue_server,
    ),
    _case("mp-queue", "multiprocessing.Queue", "block", partial(_queue_link, "Queue"), _queue_client, _queue_server),
    _case(
        "zmq", "pyzmq ipc:// REQ/REP", "block", _ipc_link, _zmq_client, _zmq_server,
    ),
    _case(
        "nng", "pynng ipc:// req/rep", "block", _ipc_link, _nng_client, _nng_server,
    ),
    _case(
        "faster-fifo-poll", "faster-fifo, bytes", "poll", _fifo_link, _fifo_poll_client, _fifo_poll_server,
    ),
    _case(
        "faster-fifo", "faster-fifo, bytes", "block", _fifo_link, _fifo_block_client, _fifo_block_server,
    ),
)  # fmt: skip
"""The rows, in the order of the table."""


def installed_peers() -> tuple[Case, ...]:
    """Return the rows whose modules are installed."""
    return tuple(case for case in PEER_CASES if case.key not in _MODULES or find_spec(_MODULES[case.key]))
