"""IF and WHILE on the reference device: in process and in a service, nested, with growing tensors, without end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import Model, ModelBuilder, Operand
from nnburst.devices.reference import graph as reference_graph
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, MissedDeadline
from nnburst.model.types import Lifetime, OperandDesc
from support.models import built, chained, compiled, ready
from support.operations import B8, F32, I32, O, run_model
from support.samples import run

L = Lifetime


ONE, PAIR, TRUTH = OperandDesc(F32, (1,)), OperandDesc(F32, (2,)), OperandDesc(B8, (1,))
COUNT = OperandDesc(I32, (1,))


def nested(inner: Model, depth: int, *inputs: OperandDesc) -> Model:
    """So many IFs, each of which has the next one on both sides; the condition goes down with the inputs."""
    return chained(built([TRUTH, *inputs], lambda b, *values: b.branch(values[0], inner, inner, values)), depth)


def if_model() -> Model:
    """y = c ? x + 1 : -x."""
    then, other = built([PAIR], lambda b, x: b.add(x, np.float32([1]))), built([PAIR], lambda b, x: b.neg(x))
    return built([TRUTH, PAIR], lambda b, c, x: b.branch(c, then, other, [x]))


@pytest.mark.parametrize("truth", [0, 1, 200])
def test_REQ_MODEL_042_if_runs_one_branch(truth: int) -> None:
    x = np.float32([3, -4])
    status, (y,), _ = run_model(if_model(), [np.uint8([truth]), x])
    assert status is ErrorStatus.NONE
    np.testing.assert_array_equal(y, x + 1 if truth else -x)


def test_failure_inside_control_flow_names_the_way_there() -> None:
    last = built([TRUTH, COUNT], lambda b, c, n: b.gather(np.float32([1, 2]), 0, n))
    model = nested(last, 1, COUNT)
    with nnburst.in_process(devices=["nnburst-reference"]) as service, service.session(model) as session:
        way = r"operation 0 \(IF\): operation 0 \(GATHER\): an index is not in 0 … 1$"
        with pytest.raises(nnburst.GeneralFailure, match=way):
            session.run(None, {"x0": np.ones(1, np.bool_), "x1": np.int32([99])})


def counting_parts(most: float = 5.0, step: float = 1.0) -> tuple[Model, Model]:
    """While x[0] < most: x += step, n += 1."""
    return (
        built([COUNT, ONE], lambda b, n, x: b.less(x, np.float32([most]))),
        built([COUNT, ONE], lambda b, n, x: (b.add(n, np.int32([1])), b.add(x, np.float32([step])))),
    )


def counting_model(step: float = 1.0) -> Model:
    """Gives n; x is carried but not given."""
    return built([COUNT, ONE], lambda b, n, x: b.loop(*counting_parts(step=step), [n, x], 1))


@pytest.mark.parametrize(("start", "steps"), [(0.0, 5), (3.5, 2), (9.0, 0)])
def test_REQ_MODEL_042_while_repeats_its_body(start: float, steps: int) -> None:
    status, (n,), _ = run_model(counting_model(), [np.int32([7]), np.float32([start])])
    assert status is ErrorStatus.NONE
    assert n.tolist() == [7 + steps]  # none: the initial value


def test_while_inside_if_inside_while() -> None:
    """While n < 3: n += 1; x = n odd ? double it until it is over 100 : x + 1."""
    less = built([COUNT, ONE], lambda b, n, x: b.less(n, np.int32([3])))
    below, double = built([ONE], lambda b, x: b.less(x, np.float32([100]))), built([ONE], lambda b, x: b.add(x, x))
    loop = built([ONE], lambda b, x: b.loop(below, double, [x]))
    plus = built([ONE], lambda b, x: b.add(x, np.float32([1])))

    def step(b: ModelBuilder, n: Operand, x: Operand) -> tuple[Operand, Operand]:
        n = b.add(n, np.int32([1]))
        return n, b.branch(b.logical_not(b.equal(n, np.int32([2]))), loop, plus, [x])[0]

    body = built([COUNT, ONE], step)
    model = built([COUNT, ONE], lambda b, n, x: b.loop(less, body, [n, x]))
    status, (n, x), _ = run_model(model, [np.int32([0]), np.float32([3])])
    assert status is ErrorStatus.NONE
    assert n.tolist() == [3]
    assert x.tolist() == [193.0]  # 3, 6, 12, 24, 48, 96, 192; 193; over 100 already


def growing_model() -> Model:
    """While n < 4: n += 1, x = [x, x]. Gives x, whose size nobody knows before."""
    any_ = OperandDesc(F32, (0,))
    condition = built([any_, COUNT], lambda b, x, n: b.less(n, np.int32([4])))
    body = built([any_, COUNT], lambda b, x, n: (b.concatenation([x, x], 0), b.add(n, np.int32([1]))))
    return built([any_, COUNT], lambda b, x, n: b.loop(condition, body, [x, n], 1))


def test_tensors_that_grow_report_their_size() -> None:
    status, (x,), shapes = run_model(growing_model(), [np.float32([1, 2]), np.int32([0])])
    assert status is ErrorStatus.NONE
    assert shapes[0].dimensions == (32,)
    np.testing.assert_array_equal(x, np.tile(np.float32([1, 2]), 16))


@pytest.mark.check
def test_tensors_that_grow_for_ever_exhaust_what_they_may_take() -> None:
    model, patience = growing_model(), 15_000_000_000  # the most that a loop may have: the machine may be busy
    status, _, _ = run_model(model, [np.float32([1, 2]), np.int32([-(2**20)])], loop_timeout_ns=patience)
    assert status in (ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT)


@pytest.mark.parametrize(("options", "seconds"), [({"loop_timeout_ns": 1_000_000}, 0.001), ({}, 2)])
def test_REQ_MODEL_063_a_loop_without_end_stops_at_its_timeout(
    options: dict[str, int], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count(step=100_000)
    monkeypatch.setattr(reference_graph, "time", SimpleNamespace(monotonic_ns=lambda: next(looks)))
    status, _, _ = run_model(counting_model(step=0.0), [np.int32([0]), np.float32([0])], **options)
    assert status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
    assert next(looks) == pytest.approx(seconds * 1e9, abs=500_000)


def test_REQ_MODEL_064_an_omitted_condition_fails() -> None:
    model = if_model()
    operands = list(model.main.operands)
    operands[0] = replace(operands[0], lifetime=L.NO_VALUE)
    model = replace(model, main=replace(model.main, operands=tuple(operands), input_indexes=(1,)), input_names=())
    device = create_device("nnburst-reference")
    try:
        prepared = device.prepare_model(model)
    except GeneralFailure:
        return
    assert run(prepared, model, [np.float32([1, 2])]).status is ErrorStatus.GENERAL_FAILURE


def test_control_flow_is_supported_only_if_all_of_it_is() -> None:
    model = if_model()
    other = model.referenced[1]
    oem = replace(other, operations=(replace(other.operations[0], type=O.OEM_OPERATION),))
    device = create_device("nnburst-reference")
    assert device.get_supported_operations(model) == (True,)
    assert device.get_supported_operations(replace(model, referenced=(model.referenced[0], oem))) == (False,)


@pytest.mark.check
def test_deeply_nested_control_flow_fails_cleanly() -> None:
    innermost, inputs = built([TRUTH, ONE], lambda b, c, x: b.neg(x)), [np.uint8([1]), np.float32([1])]
    assert run_model(nested(innermost, 2000, ONE), inputs)[0] is ErrorStatus.GENERAL_FAILURE
    assert run_model(nested(innermost, 1, ONE), inputs)[1][0].tolist() == [-1]


def part(make: Callable[[ModelBuilder, int], int], *, large: bool = False) -> Model:
    """A model of one input [2] and what `make` makes of it; `large` gives it a constant in a pool."""
    b = ModelBuilder()
    x = b.input("x", F32, (2,))
    y = make(b, x)
    b.output("y", b.mul(y, b.reduce_max(np.ones((100, 2), np.float32), [0])) if large else y)
    return b.build()


@pytest.mark.parametrize("large", [False, True])
def test_control_flow_is_built_from_models(large: bool) -> None:
    double = part(lambda b, x: b.mul(x, np.float32([2])), large=large)
    below = ModelBuilder()
    i = below.input("x", F32, (2,))
    below.output("y", below.reduce_any(below.less(i, np.float32([50])), [0]))
    looped = ModelBuilder()
    (y,) = looped.loop(below.build(), double, [looped.input("x", F32, (2,))])
    looped.output("y", looped.add(y, np.float32([1000])))
    outer = ModelBuilder()
    condition, x = outer.input("c", B8, (1,)), outer.input("x", F32, (2,))
    (z,) = outer.branch(condition, looped.build(), part(lambda b, x: b.neg(x), large=large), [x])
    outer.output("z", outer.add(z, np.float32([0.5])))
    model = outer.build()
    assert len(model.referenced) == 4
    for truth, wanted in ((1, [1096.5, 1128.5]), (0, [-2.5, -3.5])):
        status, (found,), _ = run_model(model, [np.uint8([truth]), np.float32([3, 4])])
        assert status is ErrorStatus.NONE
        assert found.tolist() == wanted
    for pool in model.pools:
        pool.close()  # type: ignore[attr-defined]


def test_only_a_subgraph_refers_to_a_model() -> None:
    b = ModelBuilder()
    index = b.operand(b.add_operand(F32, (2,)))
    with pytest.raises(InvalidArgument, match="no SUBGRAPH"):
        b.set_operand_value(index, part(lambda b, x: b.neg(x)))
    double = part(lambda b, x: b.mul(x, np.float32([2])))
    b = ModelBuilder()
    with pytest.raises(InvalidArgument, match="V16"):
        b.output("y", b.branch(b.input("c", B8, (1,)), double, double, [b.input("x", F32, (3,))])[0])
        b.build()


def test_a_model_for_both_sides_of_a_branch_is_copied_once() -> None:
    model, levels = part(lambda b, x: b.neg(x)), 10
    for _ in range(levels):
        b = ModelBuilder()
        x = b.input("x", F32, (2,))
        (y,) = b.branch(np.array([True]), model, model, [x])
        b.output("y", y)
        model = b.build()
    assert len(model.referenced) == levels
    status, (y,), _ = run_model(model, [np.float32([1, 2])])
    assert (status, y.tolist()) == (ErrorStatus.NONE, [-1, -2])


@pytest.mark.parametrize("pool", [False, True])
def test_padding_that_needs_more_memory_than_a_request_may_take(pool: bool) -> None:
    b = ModelBuilder()
    x, wide = b.input("x", F32, (1, 1, 1, 1)), 2**20
    padding = ((wide - 1, 0), (wide - 1, 0))
    if pool:
        y = b.max_pool_2d(x, wide, stride=1, padding=padding)
    else:
        y = b.conv_2d(x, np.ones((1, 1, 1, 1), np.float32), stride=wide, padding=((wide, 0), (wide, 0)))
    b.output("y", y)
    status, _, _ = run_model(b.build(), [np.ones((1, 1, 1, 1), np.float32)])
    assert status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


def test_relaxed_models_give_the_same() -> None:
    b = ModelBuilder(relaxed=True)
    x = b.input("x", F32, (3,))
    b.output("y", b.exp(x))
    status, (y,), _ = run_model(b.build(), [np.float32([0, 1, 2])])
    assert status is ErrorStatus.NONE
    np.testing.assert_allclose(y, np.exp([0, 1, 2]), rtol=5 / 1024)


def test_REQ_MODEL_063_an_execution_says_how_long_a_loop_may_take() -> None:
    with nnburst.in_process() as service, compiled(counting_model(step=0.0), service) as compilation:
        n = np.zeros(1, np.int32)
        execution = ready(compilation, np.int32([0]), n, reusable=True)
        execution.set_input(1, np.float32([0]))
        for wrong in (0, -1.0, float("nan"), "1"):
            with pytest.raises(InvalidArgument, match="timeout"):
                execution.set_loop_timeout(wrong)  # type: ignore[arg-type]
        execution.set_loop_timeout(0.05)
        with pytest.raises(MissedDeadline, match=r"0\.05 s"):
            execution.compute()
        execution.close()


@pytest.mark.parametrize("where", ["in process", "child"])
def test_REQ_MODEL_063_a_loop_may_take_as_long_as_a_session_or_a_burst_allows(where: str) -> None:
    inputs = {"n": np.int32([0]), "x": np.float32([0])}
    endless = replace(counting_model(step=0.0), input_names=("n", "x"), output_names=("m",))
    launch = nnburst.launch if where == "child" else nnburst.in_process
    with launch(devices=["nnburst-reference"]) as service:
        with service.session(endless, timeout=0.05) as session:
            with pytest.raises(MissedDeadline, match=r"a WHILE ran for more than 0\.05 s"):
                session.run(None, inputs, timeout=None)
            execution = session.bind(timeout=None)
            with pytest.raises(MissedDeadline, match=r"0\.05 s"):
                execution.run()
        with compiled(endless, service) as compilation:
            with nnburst.nnapi.Burst(compilation, loop_timeout=0.05) as burst, burst.bind() as bound:
                with pytest.raises(MissedDeadline, match=r"0\.05 s"):
                    bound.run()
            for wrong in (0, -1.0, float("nan"), "1"):
                with pytest.raises(InvalidArgument, match="timeout"):
                    nnburst.nnapi.Burst(compilation, loop_timeout=wrong)  # type: ignore[arg-type]
