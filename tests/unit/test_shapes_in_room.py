"""Shapes that change from run to run: the arguments of an execution are laid out again in the room that they have."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import BadState, InvalidArgument, Memory, NNBurstError
from nnburst.burst.server.server import ServerEnd
from nnburst.errors import ErrorStatus, OutputShape
from nnburst.memory import memory
from nnburst.model.types import NO_TIMING
from nnburst.runtime.request.arguments import Arguments
from support.users import in_forked_child
from support.waiting import PATIENCE, together, until

MODEL = """
import threading
import numpy as np
from nnburst.devices.function import Tensor, declare

hold, held = threading.Event(), threading.Event()
hold.set()

@declare(
    inputs=[Tensor("x", "float32", ("n", 2)), Tensor("y", "float32", ("m",))],
    outputs=[
        Tensor("both", "float32", ("m", "n")), Tensor("sums", "float32", ("n",)), Tensor("some", "float32", ("k",)),
    ],
)
def model(x, y):
    held.set()
    hold.wait(60)
    return y[:, None] * x[:, 0], x.sum(axis=1), x[x > 0]
"""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nnburst.Session]:
    (tmp_path / "function_of_shapes.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    with nnburst.in_process(devices=["nnburst-function:call=function_of_shapes:model"]) as service:
        with service.session("model", concurrency=2) as session:
            yield session
    sys.modules.pop("function_of_shapes", None)


def inputs(n: int, m: int, seed: int = 0) -> dict[str, Any]:
    numbers = np.random.default_rng((seed, n, m))
    return {"x": numbers.normal(size=(n, 2)).astype(np.float32), "y": numbers.normal(size=m).astype(np.float32)}


def check(outputs: Any, given: dict[str, Any]) -> None:
    x, y = given["x"], given["y"]
    for output, expected in zip(outputs, (y[:, None] * x[:, 0], x.sum(axis=1), x[x > 0]), strict=True):
        np.testing.assert_array_equal(output, expected)


def pools() -> int:
    return len(list(memory._pools))


def test_runs_of_hundreds_of_shapes_share_few_pools_slots_and_descriptors(session: nnburst.Session) -> None:
    shapes = [(random.Random(i).randint(1, 300), random.Random(-i).randint(1, 200)) for i in range(400)]
    for n, m in ((300, 200), *shapes[:100]):
        check(session.run(None, inputs(n, m)), inputs(n, m))
    slots, before, descriptors = len(session.burst.controller._slots), pools(), len(os.listdir("/proc/self/fd"))
    assert slots == 1
    for n, m in shapes[100:]:
        check(session.run(None, inputs(n, m)), inputs(n, m))
    assert (len(session.burst.controller._slots), pools()) == (slots, before)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_room_doubles_so_that_growing_shapes_need_few_pools(session: nnburst.Session) -> None:
    bound: list[Any] = []
    spare = session._pool.get_free_burst
    session._pool.get_free_burst = lambda: bound.append(1) or spare()  # type: ignore[method-assign,func-returns-value]
    for n in range(1, 1500):
        check(session.run(None, inputs(n, 3)), inputs(n, 3))
    assert len(bound) <= 8  # twice for the room of inputs, twice for that of `some`, once for that of `both`


def test_threads_run_shapes_of_their_own(session: nnburst.Session) -> None:
    def work(seed: int) -> None:
        numbers = random.Random(seed)
        for i in range(150):
            given = inputs(numbers.randint(1, 200), numbers.randint(1, 100), i)
            check(session.run(None, given), given)

    together(3, work)


def test_reshape_lays_out_anew_in_the_same_memory(session: nnburst.Session) -> None:
    with session.bind(room={"x": (64, 2), "y": (32,)}) as bound:
        assert bound.inputs["x"].shape == (64, 2)
        assert bound.outputs["both"].shape == (32, 64)
        address, names, before = bound.inputs["x"].ctypes.data, bound.inputs, pools()
        for n, m in ((3, 32), (64, 1), (1, 1), (17, 5), (64, 32)):
            bound.reshape({"n": n, "y": (m,)})
            assert bound.inputs is names
            assert bound.inputs["x"].ctypes.data == address
            assert bound.outputs["both"].shape == (m, n)
            given = inputs(n, m)
            for name, array in given.items():
                bound.inputs[name][:] = array
            bound.run()
            check(bound._copied(), given)
        assert pools() == before
    assert len(session.burst.controller._slots) == 0


def test_last_run_is_told_with_the_shapes_that_it_had(session: nnburst.Session) -> None:
    with session.bind(room={"x": (64, 2), "y": (32,)}, measure=True) as bound:
        bound.inputs["x"][:] = bound.inputs["y"][:] = 1
        bound.run()
        result = bound.result
        for n in (3, 5):
            bound.reshape({"n": n, "m": 4})
            assert bound.result == result
            assert bound.output_shapes[0].dimensions == (32, 64)
        assert bound.timing is not None
        bound.run()
        assert bound.output_shapes[0].dimensions == (4, 5)


def test_room_of_bind_counts_beside_what_the_session_has_learnt(session: nnburst.Session) -> None:
    session.run(None, inputs(3000, 1))
    with session.bind(room={"n": 40000, "m": 1, "some": (80000,)}) as bound:
        bound.inputs["x"][:] = 1
        bound.run()
        assert bound.output_shapes[2].dimensions == (80000,)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"n": 65, "m": 4}, r"'x' of shape \(65, 2\) takes 520 bytes and has room for 512; bind with room={'x': …}"),
        ({"n": 4, "m": 0}, r"'y' has shape \(2,\) here, which cannot become \(0,\)"),
        ({"n": 4}, "'y' has open dimensions"),
        ({"x": (4, 3), "m": 4}, "does not admit"),
        ({"x": (4, 2), "n": 5, "m": 4}, "contradicts 'n' = 5"),
        ({"z": 4}, "unknown name 'z'"),
        (7, "shapes is a dict by name, not int"),
    ],
)
def test_shapes_that_cannot_be_leave_the_execution_as_it_was(
    session: nnburst.Session, shapes: Any, message: str
) -> None:
    with session.bind(room={"n": 64, "m": 32}, shapes={"n": 8, "m": 2}) as bound:
        given = inputs(8, 2)
        for name, array in given.items():
            bound.inputs[name][:] = array
        with pytest.raises(InvalidArgument, match=message):
            bound.reshape(shapes)
        bound.run()
        check(bound._copied(), given)


def test_execution_in_flight_keeps_its_shapes(session: nnburst.Session) -> None:
    module = sys.modules["function_of_shapes"]
    with session.bind(room={"n": 64, "m": 32}) as bound:
        for array in bound.inputs.values():
            array[:] = 1
        module.hold.clear()
        run = bound.submit()
        with pytest.raises(BadState, match="running"):
            bound.reshape({"n": 1, "m": 1})
        module.hold.set()
        run.result(PATIENCE)
        assert bound.outputs["both"].shape == (32, 64)
        until(lambda: not bound.is_in_flight)
        bound.reshape({"n": 1, "m": 1})
        assert bound.outputs["both"].shape == (1, 1)
    with pytest.raises(BadState, match="closed"):
        bound.reshape({"n": 2, "m": 1})


def test_interrupt_while_shapes_change_closes_the_execution(
    session: nnburst.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with session.bind(room={"n": 64, "m": 32}) as bound:
        session.run(None, inputs(3, 3))
        with monkeypatch.context() as patched:
            patched.setattr(Arguments, "resize", interrupted)
            with pytest.raises(KeyboardInterrupt):
                bound.reshape({"n": 1, "m": 1})
            with pytest.raises(KeyboardInterrupt):
                session.run(None, inputs(4, 3))
        with pytest.raises(BadState, match="closed"):
            bound.run()
    for n in (3, 5):
        check(session.run(None, inputs(n, 3)), inputs(n, 3))


def test_memory_of_the_callers_has_room_to_its_end(session: nnburst.Session) -> None:
    with Memory.ashmem(160) as own:
        with session.bind(shapes={"n": 20, "m": 2}, memory={"x": own}) as bound:
            for n in (20, 1, 7):
                bound.reshape({"n": n, "m": 2})
                given = inputs(n, 2)
                own.array("float32", (n, 2))[:] = given["x"]
                assert bound.inputs["x"].tolist() == given["x"].tolist()
                bound.inputs["y"][:] = given["y"]
                bound.run()
                check(bound._copied(), given)
            with pytest.raises(InvalidArgument, match=r"shape \(21, 2\) takes 168 bytes"):
                bound.reshape({"n": 21, "m": 2})


def test_forked_child_changes_no_shapes(session: nnburst.Session) -> None:
    with session.bind(room={"n": 64, "m": 32}) as bound:

        def is_refused() -> None:
            with pytest.raises(BadState, match=r"fork\(\)"):
                bound.reshape({"n": 1, "m": 1})

        in_forked_child(is_refused)
        bound.reshape({"n": 2, "m": 1})
        assert bound.outputs["sums"].shape == (2,)


def test_what_a_service_tells_of_its_outputs_is_right_or_an_error(
    session: nnburst.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, answer = random.Random(7), ServerEnd.answer

    def size() -> int:
        return dice.choice([0, 1, 2, 2**16, 2**31, 2**32 - 1]) if dice.random() < 0.3 else dice.randint(0, 60)

    def told(end: ServerEnd, result: Any) -> None:
        shapes = [
            shape if dice.random() < 0.6 else OutputShape(tuple(size() for _ in range(rank)), dice.random() < 0.5)
            for shape, rank in zip(result[1], (2, 1, dice.choice([1, 1, 1, 65])), strict=False)
        ]
        status = dice.choice([ErrorStatus.NONE, ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE])
        answer(end, (status, tuple(shapes[: dice.choice([0, 1, 3, 3, 3])]), NO_TIMING))

    def attempt(run: Any) -> None:
        with monkeypatch.context() as patched, contextlib.suppress(NNBurstError):
            patched.setattr(ServerEnd, "answer", told)
            run()

    with session.bind(state={"sums": "y"}, room={"y": (64,)}, shapes={"n": 3, "m": 1}) as growing:
        growing.inputs["x"][:] = 1
        for i in range(150):
            attempt(lambda i=i: session.run(None, inputs(1 + i % 50, 1 + i % 7)))
            attempt(growing.run)
            attempt(growing.get_state)
            attempt(growing.reset_state)
    check(session.run(None, inputs(9, 5)), inputs(9, 5))


def test_run_many_opens_nothing_for_shapes_that_differ(session: nnburst.Session) -> None:
    bursts = session._pool._of_rings
    given = [inputs(n, m, n) for n, m in ((64, 32), *((1 + i * 37 % 64, 1 + i * 11 % 32) for i in range(60)))]
    for outputs, each in zip(session.run_many(given), given, strict=True):
        check(outputs, each)
    before, rings = list(bursts), len(session._pool._rings)
    for outputs, each in zip(session.run_many(given[::-1]), given[::-1], strict=True):
        check(outputs, each)
    assert bursts == before
    assert len(session._pool._rings) == rings


def doubling() -> nnburst.Model:
    builder = nnburst.ModelBuilder()
    x = builder.input("x", nnburst.OperandType.TENSOR_FLOAT32, (0, 2))
    builder.output("y", builder.add(x, x))
    return builder.build()


def test_shapes_change_after_the_service_came_back() -> None:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        with service.session(doubling(), on_death="restart") as session, session.bind(room={"x": (16, 2)}) as bound:
            for n in (3, 9, 16):
                bound.reshape({"x": (n, 2)})
                bound.inputs["x"][:] = n
                bound.run()
                assert bound._copied()[0].tolist() == [[2 * n, 2 * n]] * n
                service.kill()
                assert session.run(None, {"x": np.ones((n, 2), np.float32)})[0].tolist() == [[2, 2]] * n


def test_steps_have_other_shapes() -> None:
    with nnburst.in_process(devices=["nnburst-reference"]) as service, service.session(doubling()) as doubled:
        with doubled.bind(shapes={"x": (16, 2), "y": (16, 2)}, steps=3) as bound:
            for n in (5, 16, 1):
                bound.reshape({"x": (n, 2), "y": (n, 2)})
                values = np.arange(3 * n * 2).reshape(3, n, 2)
                bound.inputs["x"][:] = values
                bound.run()
                assert bound.outputs["y"].tolist() == (2 * values).tolist()
