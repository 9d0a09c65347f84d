"""State that stays in the device: Session.bind(state=…), in process and across processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import nnburst
from nnburst import BadState, DeadObject, InvalidArgument, Model, ModelBuilder, OperandType

UNITS = 5
RNG = np.random.default_rng(5)
W = RNG.normal(size=(UNITS, 3)).astype(np.float32)
R = RNG.normal(size=(UNITS, UNITS)).astype(np.float32)
B = RNG.normal(size=UNITS).astype(np.float32)


def cell() -> Model:
    """h_out = y = tanh(W x + R h_in + b)."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (1, 3))
    h = b.input("h_in", OperandType.TENSOR_FLOAT32, (1, UNITS))
    total = b.add(b.fully_connected(x, W, B), b.fully_connected(h, R, np.zeros(UNITS, np.float32)))
    new = b.tanh(total)
    b.output("h_out", new)
    b.output("y", b.mul(new, np.full((1, 1), 2, np.float32)))
    return b.build()


def expected(xs: np.ndarray, h: np.ndarray) -> list[np.ndarray]:
    out = []
    for x in xs:
        h = np.tanh(x @ W.T + B + h @ R.T)
        out.append(2 * h)
    return out


@pytest.fixture(params=["in_process", "child"])
def session(request: pytest.FixtureRequest) -> Iterator[nnburst.Session]:
    with (nnburst.in_process if request.param == "in_process" else nnburst.launch)() as service:
        with service.session(cell()) as session:
            yield session


def test_state_goes_from_step_to_step(session: nnburst.Session) -> None:
    xs = RNG.normal(size=(50, 1, 3)).astype(np.float32)
    with session.bind(state={"h_out": "h_in"}) as step:
        assert set(step.inputs) == {"x"}
        assert set(step.outputs) == {"y"}
        for x, y in zip(xs, expected(xs, np.zeros((1, UNITS), np.float32)), strict=True):
            step.inputs["x"][:] = x
            step.run()
            np.testing.assert_allclose(step.outputs["y"], y, atol=1e-5)
        np.testing.assert_allclose(2 * step.get_state()["h_in"], y, atol=1e-5)


def test_state_can_be_set_and_read_at_any_turn(session: nnburst.Session) -> None:
    start = RNG.normal(size=(1, UNITS)).astype(np.float32)
    x = np.ones((1, 1, 3), np.float32)
    with session.bind(state={"h_out": "h_in"}, initial_state={"h_in": start}) as step:
        assert (step.get_state()["h_in"] == start).all()
        for _ in range(3):
            step.inputs["x"][:] = x[0]
            step.run()
            step.reset_state({"h_in": start})
            step.run()
            np.testing.assert_allclose(step.outputs["y"], expected(x, start)[0], atol=1e-5)
        step.reset_state()
        assert not step.get_state()["h_in"].any()


def test_two_executions_keep_states_apart(session: nnburst.Session) -> None:
    with session.bind(state={"h_out": "h_in"}) as a, session.bind(state={"h_out": "h_in"}) as b:
        for step, value in ((a, 1), (b, -1), (a, 1)):
            step.inputs["x"][:] = value
            step.run()
        assert not np.array_equal(a.get_state()["h_in"], b.get_state()["h_in"])


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"nothing": "h_in"}, "h_out"),
        ({"h_out": "nothing"}, "h_in"),
        ({"h_out": "x"}, r"output of shape \(1, 5\) is no input of shape \(1, 3\)"),
        ({"h_out": "h_in", "y": "h_in"}, "two outputs"),
    ],
)
def test_states_that_make_no_sense_are_refused(session: nnburst.Session, state: dict[str, str], what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        session.bind(state=state)


def test_wrong_initial_states_are_refused(session: nnburst.Session) -> None:
    for initial in ({"x": np.zeros((1, 3), np.float32)}, {"h_in": np.zeros(UNITS)}, {"h_in": np.zeros((2, UNITS))}):
        with pytest.raises(InvalidArgument):
            session.bind(state={"h_out": "h_in"}, initial_state=initial)


@pytest.fixture(scope="module")
def sums() -> Iterator[nnburst.Session]:
    """t = x + s, both of rows of two."""
    b = ModelBuilder()
    x, s = (b.input(name, OperandType.TENSOR_FLOAT32, (0, 2)) for name in "xs")
    b.output("t", b.add(x, s))
    with nnburst.in_process() as service, service.session(b.build()) as session:
        yield session


@pytest.mark.parametrize("steps", [None, 2])
def test_state_of_open_dimensions_has_the_shape_that_is_given(sums: nnburst.Session, steps: int | None) -> None:
    shapes = {"x": (3, 2), "s": (3, 2)}
    with sums.bind(state={"t": "s"}, shapes=shapes, steps=steps, initial_state={"s": np.ones((3, 2), "f")}) as step:
        step.inputs["x"][:] = 1
        step.run()
        step.run()
        assert step.get_state()["s"].tolist() == [[1 + 2 * (steps or 1)] * 2] * 3
        with pytest.raises(InvalidArgument, match=r"shape \(3, 2\), got \(1, 2\)"):
            step.reset_state({"s": np.ones((1, 2), np.float32)})


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ({"x": (3, 2)}, r"input 's' has open dimensions \(None, 2\); say them"),
        ({"x": (3, 2), "s": (3, 2), "t": (1, 2)}, r"output of shape \(1, 2\) is no input of shape \(3, 2\)"),
        ({"x": (3, 2), "s": (3, 3)}, "does not admit"),
    ],
)
def test_state_whose_shape_is_not_said_or_contradicts_itself_is_refused(
    sums: nnburst.Session, shapes: dict[str, tuple[int, ...]], what: str
) -> None:
    with pytest.raises(InvalidArgument, match=what):
        sums.bind(state={"t": "s"}, shapes=shapes)


def test_bind_that_is_refused_gives_its_state_back_at_once() -> None:
    with (
        nnburst.launch(devices=["nnburst-reference"], quotas={"buffers": 2}) as service,
        service.session(cell()) as session,
        nnburst.Memory.ashmem(4) as small,
    ):
        with pytest.raises(InvalidArgument, match="takes 12 bytes") as refused:
            session.bind(state={"h_out": "h_in"}, memory={"x": small})
        assert refused.tb is not None, "what the traceback holds is not garbage"
        session.bind(state={"h_out": "h_in"}).close()


def test_device_without_buffers_says_so() -> None:
    with (
        nnburst.in_process(devices=["nnburst-noop"]) as service,
        service.session(cell()) as session,
        pytest.raises(nnburst.GeneralFailure, match="cannot allocate"),
    ):
        session.bind(state={"h_out": "h_in"})


def test_death_and_close_end_a_stateful_execution() -> None:

    with nnburst.launch() as service, service.session(cell()) as session:
        step = session.bind(state={"h_out": "h_in"})
        step.run()
        os.kill(service.pid, signal.SIGKILL)
        with pytest.raises(DeadObject):
            while True:
                step.run()
        step.close()
        step.close()
        session.close()
        with pytest.raises(BadState):
            step.run()
