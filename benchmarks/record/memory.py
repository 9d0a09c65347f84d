"""Rows (g), (h) and (i): ways to pass an input, places of recurrent state, and the benefit of a slot."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from benchmarks.programs import step_model
from nnburst import Memory, ModelBuilder, OperandType, launch
from nnburst.burst import ExecutionBurstController
from nnburst.cli.bench.rounds import POLLING_WINDOW, Case, Subject
from nnburst.cli.bench.rows import bytes_in_bytes_out
from nnburst.cli.bench.sampling import Samples, time_calls
from nnburst.cli.targets import size
from nnburst.model import Request
from nnburst.model.types import DataLocation, RequestArgument

from .peers import MESSAGE
from .server import server_process

_INPUT = 16 << 20
STATE_SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
_SLOT = 64 << 10
STEPS = 64
_REFERENCE = "nnburst-reference"
_F32 = 4


# ---- (g) a frame of 16 MiB, from an array of the caller to a process that could use it ------------------------------


@contextmanager
def _open_pool(copies: bool) -> Iterator[Subject]:
    frame, model = np.ones((1, _INPUT), np.uint8), bytes_in_bytes_out(_INPUT)
    with launch(devices=["nnburst-noop"]) as service, service.session(model, polling_window=POLLING_WINDOW) as session:
        bound = session.bind()
        target = bound.inputs["x"]
        target[...] = frame

        def call() -> None:
            target[...] = frame
            bound.run()

        call()
        yield Subject(partial(time_calls, call if copies else bound.run), service.pid)


def _shared_server(connection: Any) -> Generator[None, None, None]:
    """Map the memory that the first message names, then answer each message with 32 bytes."""
    receive, send = connection.recv_bytes, connection.send_bytes
    yield
    shared = SharedMemory(receive().decode())
    frame = np.ndarray(_INPUT, np.uint8, shared.buf)
    send(MESSAGE)
    try:
        while True:
            receive()
            send(MESSAGE)
    finally:
        del frame
        shared.close()


@contextmanager
def _open_shared(copies: bool) -> Iterator[Subject]:
    ours, theirs = multiprocessing.Pipe()
    source = np.ones(_INPUT, np.uint8)
    shared = SharedMemory(create=True, size=_INPUT)
    frames = [np.ndarray(_INPUT, np.uint8, shared.buf)]
    frames[0][...] = source
    send, receive = ours.send_bytes, ours.recv_bytes

    def call() -> None:
        if copies:
            frames[0][...] = source
        send(MESSAGE)
        receive()

    try:
        with ours, server_process(_shared_server, theirs) as process:
            theirs.close()
            send(shared.name.encode())
            receive()
            yield process.subject(call)
    finally:
        frames.clear()
        shared.close()
        shared.unlink()


def _pickle_server(connection: Any) -> Generator[None, None, None]:
    receive, send = connection.recv, connection.send_bytes
    yield
    while True:
        receive()
        send(MESSAGE)


@contextmanager
def _open_pickled() -> Iterator[Subject]:
    ours, theirs = multiprocessing.Pipe()
    frame = np.ones(_INPUT, np.uint8)
    send, receive = ours.send, ours.recv_bytes

    def call() -> None:
        send(frame)
        receive()

    with ours, server_process(_pickle_server, theirs) as process:
        theirs.close()
        yield process.subject(call)


def _input_case(key: str, title: str, wait: str, opener: Callable[[], Any]) -> Case:
    return Case(key, "g", title, wait, _INPUT, opener)


INPUT_CASES: tuple[Case, ...] = (
    _input_case("input-pool", "burst, written in place", "poll", partial(_open_pool, False)),
    _input_case("input-pool-copied", "burst, copied into the pool", "poll", partial(_open_pool, True)),
    _input_case("input-shm", "shared_memory + Pipe, in place", "block", partial(_open_shared, False)),
    _input_case("input-shm-copied", "shared_memory + Pipe, copied", "block", partial(_open_shared, True)),
    _input_case("input-pickled", "pickled through Pipe", "block", _open_pickled),
)


# ---- (h) a step of a recurrent network: the state goes in, the next one comes out -----------------------------------


def _in_domain(service: Any, window: float, nbytes: int, stack: ExitStack) -> Callable[[], object]:
    session = stack.enter_context(service.session(step_model(nbytes), polling_window=window))
    run: Callable[[], object] = stack.enter_context(session.bind(state={"h_out": "h_in"})).run
    return run


def _in_steps(service: Any, window: float, nbytes: int, stack: ExitStack) -> Callable[[], object]:
    session = stack.enter_context(service.session(step_model(nbytes), polling_window=window))
    run: Callable[[], object] = stack.enter_context(session.bind(steps=STEPS, state={"h_out": "h_in"})).run
    return run


def _copied(service: Any, window: float, nbytes: int, stack: ExitStack) -> Callable[[], object]:
    session = stack.enter_context(service.session(step_model(nbytes), polling_window=window))
    x, names = np.zeros((1, 4), np.float32), ["h_out"]
    state = [np.zeros((1, nbytes // _F32), np.float32)]

    def step() -> None:
        state[0] = session.run(names, {"x": x, "h_in": state[0]})[0]

    return step


def _in_pool(service: Any, window: float, nbytes: int, stack: ExitStack) -> Callable[[], object]:
    """Return a run whose two state buffers alternate, as in a memory domain, but are in a pool of the client."""
    prepared = service.device(_REFERENCE).prepare_model(step_model(nbytes))
    stack.callback(prepared.close)
    burst = stack.enter_context(ExecutionBurstController.create(prepared, polling_window=window))
    memory = stack.enter_context(Memory.ashmem(256 + 2 * nbytes))

    def at(offset: int, length: int) -> RequestArgument:
        return RequestArgument(False, DataLocation(0, offset, length))

    states = at(256, nbytes), at(256 + nbytes, nbytes)
    turns = [burst.bind(Request((at(0, 16), states[i]), (states[1 - i], at(64, 16)), (memory,))).run for i in (0, 1)]
    turn = [0]

    def step() -> None:
        i = turn[0]
        turns[i]()
        turn[0] = 1 - i

    return step


@contextmanager
def _open_state(way: Callable[..., Callable[[], object]], nbytes: int) -> Iterator[Subject]:
    with launch(devices=[_REFERENCE]) as service, ExitStack() as stack:
        step = way(service, POLLING_WINDOW, nbytes, stack)
        step()
        step()
        yield Subject(partial(time_calls, step), service.pid)


def _time_steps(run: Callable[[], object], count: int) -> Samples:
    """Return samples of a step: the time of a run of `STEPS` steps, divided by `STEPS`. Makes `count` / 10 runs."""
    return time_calls(run, max(1, count // 10)) // STEPS


@contextmanager
def _open_steps(nbytes: int) -> Iterator[Subject]:
    with launch(devices=[_REFERENCE]) as service, ExitStack() as stack:
        run = _in_steps(service, POLLING_WINDOW, nbytes, stack)
        run()
        yield Subject(partial(_time_steps, run), service.pid)


_WAYS: dict[str, tuple[str, Callable[..., Callable[[], object]]]] = {
    "domain": ("state in the device", _in_domain),
    "copied": ("state through Session.run", _copied),
    "pingpong": ("state in a pool, in turn", _in_pool),
}

STEPS_CASE = Case(
    "state-steps-1KiB", "h", f"one of {STEPS} steps in one run, 1 KiB", "poll", 1 << 10, partial(_open_steps, 1 << 10)
)

STATE_CASES: tuple[Case, ...] = tuple(
    Case(f"state-{key}-{name}", "h", f"{title}, {size(n)}", "poll", n, partial(_open_state, way, n))
    for n in STATE_SIZES
    for name in [size(n).replace(" ", "")]
    for key, (title, way) in _WAYS.items()
)
STATE_CASES = (STATE_CASES[0], STEPS_CASE, *STATE_CASES[1:])


# ---- (i) the slot table: a memory is fetched, mapped and bound once -------------------------------------------------


@contextmanager
def _open_slot(later: bool) -> Iterator[Subject]:
    b = ModelBuilder()
    b.output("y", b.relu(b.input("x", OperandType.TENSOR_FLOAT32, (1, _SLOT // _F32))))
    arguments = [(RequestArgument(False, DataLocation(0, offset, _SLOT)),) for offset in (0, _SLOT)]

    def sample(count: int) -> Samples:
        """Return times of the first run with a memory or, if `later`, of the second. Each sample has a new memory."""
        now, times = time.perf_counter_ns, np.empty(count, np.int64)
        for i in range(count):
            with Memory.ashmem(2 * _SLOT) as memory:
                memory.array(np.uint8, (2 * _SLOT,))[...] = 0  # writing allocates its pages
                run = burst.bind(Request(arguments[0], arguments[1], (memory,))).run
                if later:
                    run()
                start = now()
                run()
                times[i] = now() - start
                burst.free_memory(memory)
        return times

    with launch(devices=[_REFERENCE]) as service:
        prepared = service.device(_REFERENCE).prepare_model(b.build())
        with ExecutionBurstController.create(prepared, polling_window=POLLING_WINDOW) as burst:
            yield Subject(sample, service.pid)
        prepared.close()


SLOT_CASES: tuple[Case, ...] = (
    Case("slot-first", "i", "first run with a memory", "poll", _SLOT, partial(_open_slot, False)),
    Case("slot-later", "i", "second run with a memory", "poll", _SLOT, partial(_open_slot, True)),
)
