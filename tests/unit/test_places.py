"""Arguments in memory of the caller's: ``bind(memory=...)``."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import BadState, InvalidArgument, Memory, Model, ModelBuilder, OperandType
from nnburst.memory.kinds import PROT_READ
from support.waiting import until

F = OperandType.TENSOR_FLOAT32


def doubling() -> Model:
    b = ModelBuilder()
    x = b.input("x", F, (2, 4))
    b.output("y", b.add(x, x))
    return b.build()


@pytest.fixture(params=["child", "in process"])
def session(request: pytest.FixtureRequest) -> Iterator[nnburst.Session]:
    start = nnburst.launch if request.param == "child" else nnburst.in_process
    with start(devices=["nnburst-reference"]) as service, service.session(doubling()) as session:
        yield session


@pytest.fixture
def ring() -> Iterator[Memory]:
    with Memory.ashmem(4096, "ring") as ring:
        yield ring


def test_input_and_output_lie_where_the_views_are(session: nnburst.Session, ring: Memory) -> None:
    frames = [ring.array("float32", (2, 4), 64 * slot) for slot in range(3)]
    answers = ring.array("float32", (3, 2, 4), 1024)
    bound = [session.bind(memory={"x": frames[slot], "y": answers[slot]}) for slot in range(3)]
    assert bound[0].inputs["x"] is frames[0]
    assert bound[0]._arguments.layout.memory is None  # nothing else is needed
    for round in range(3):
        for slot, frame in enumerate(frames):
            frame[:] = 10 * round + slot
        for execution in bound:
            execution.run()
        assert [answer[0, 0] for answer in answers] == [2 * (10 * round + slot) for slot in range(3)]
    assert session.stats.fallbacks == 0
    assert len(session.burst.controller._slots) == 1  # the ring is one memory, however many frames it has
    for execution in bound:
        execution.close()


def test_memory_is_used_from_its_beginning_and_the_rest_is_the_executions_own(
    session: nnburst.Session, ring: Memory
) -> None:
    with session.bind(memory={"x": ring}) as execution:
        ring.array("float32", (8,))[:] = np.arange(8)
        execution.run()
        assert execution.outputs["y"].tolist() == [[0, 2, 4, 6], [8, 10, 12, 14]]
        assert np.shares_memory(execution.inputs["x"], ring.array("float32", (8,)))


def test_memory_is_given_back_with_the_last_execution_that_names_it(session: nnburst.Session, ring: Memory) -> None:
    def service_maps() -> int:
        with open(f"/proc/{session.service.pid}/maps") as file:
            return sum("memfd:ring" in line for line in file)

    own = session.service.pid == os.getpid()
    first, second = session.bind(memory={"x": ring}), session.bind(memory={"x": ring})
    for execution in (first, second):
        execution.run()
    assert service_maps() > 0
    first.close()
    second.run()  # still knows it
    second.close()
    until(lambda: own or service_maps() == 0)
    assert len(session.burst.controller._slots) == 0
    assert not ring.closed
    third = session.bind(memory={"x": ring})
    third.run()
    del third
    gc.collect()
    with session.bind() as execution:  # what was dropped is given back now
        execution.run()
        assert len(session.burst.controller._slots) == 1


def test_memory_that_comes_back_while_it_is_dropped_stays_known(session: nnburst.Session, ring: Memory) -> None:
    first = session.bind(memory={"x": ring})
    first.run()
    del first
    gc.collect()
    with session.bind(memory={"x": ring}) as again, session.bind() as other:
        for execution in (again, other, again):
            execution.run()


def test_memory_that_is_closed_too_early_is_named(session: nnburst.Session) -> None:
    with Memory.ashmem(64) as ring, session.bind(memory={"x": ring}) as execution:
        ring.close()
        with pytest.raises(BadState, match="the memory of input 0 is closed"):
            execution.run()


def test_read_only_memory_is_good_for_inputs(session: nnburst.Session, ring: Memory) -> None:
    ring.array("float32", (8,))[:] = 3
    with Memory.mmap_fd(ring.fds[0], 32, prot=PROT_READ) as frame:
        with session.bind(memory={"x": frame}) as execution:
            execution.run()
            assert (execution.outputs["y"] == 6).all()
            assert not execution.inputs["x"].flags.writeable
        with session.bind(memory={"x": frame.array("float32", (2, 4))}) as execution:
            execution.run()
            assert (execution.outputs["y"] == 6).all()
        with pytest.raises(InvalidArgument, match="output 'y' is read-only"):
            session.bind(memory={"y": frame})


def test_session_that_restarts_keeps_the_memory(ring: Memory) -> None:
    frame = ring.array("float32", (2, 4), 128)
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        with service.session(doubling(), on_death="restart") as session, session.bind(memory={"x": frame}) as execution:
            for value in (1, 2):
                frame[:] = value
                execution.run()
                assert (execution.outputs["y"] == 2 * value).all()
                service.kill()


def wrong(ring: Memory) -> dict[str, tuple[dict[str, Any], str]]:
    view = ring.array("float32", (2, 4))
    wide = ring.array("float32", (2, 8))
    return {
        "unknown name": ({"z": view}, "unknown name 'z'"),
        "other dtype": ({"x": ring.array("int32", (2, 4))}, "holds int32, the model takes float32"),
        "other shape": ({"x": ring.array("float32", (4, 2))}, "does not admit"),
        "strides": ({"x": wide[:, ::2]}, "strides"),
        "rows with gaps": ({"x": wide[:, :4]}, "strides"),
        "no shared memory": ({"x": np.zeros((2, 4), np.float32)}, "not in shared memory"),
        "a list": ({"x": [1, 2]}, "expected a Memory or a view"),
        "no elements": ({"x": view[:0]}, "no elements"),
        "too small": ({"x": Memory.ashmem(16)}, "takes 32 bytes"),
        "shapes that differ": ({"x": view, "shapes": {"x": (4, 2)}}, "but its memory has shape"),
        "no dict": ([view], "dict by name"),  # type: ignore[dict-item]
    }


@pytest.mark.parametrize("case", wrong(Memory.ashmem(4096)))
def test_what_cannot_be_used_as_it_lies_is_refused(session: nnburst.Session, ring: Memory, case: str) -> None:
    memory, message = wrong(ring)[case]
    shapes = memory.pop("shapes", None) if isinstance(memory, dict) else None
    with pytest.raises(InvalidArgument, match=message):
        session.bind(memory=memory, shapes=shapes)
    gc.collect()
    assert len(session.burst.controller._slots) == 0


def test_state_has_no_memory_of_the_callers(session: nnburst.Session, ring: Memory) -> None:
    with pytest.raises(InvalidArgument, match="is a state"):
        session.bind(state={"y": "x"}, memory={"x": ring})
