"""REQ-MODEL-014 … 045: models that every device must reject.

045, 050, 052: models at random, with control flow: a few, hundreds each night, thousands each week.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace
from random_models import Author, changed

from nnburst import Model, ModelBuilder
from nnburst.devices import Device
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, NNBurstError
from nnburst.model import Operation
from nnburst.model.operand_types import HalVersion
from nnburst.model.types import DataLocation, DeviceStatus, Lifetime, OperandDesc, Subgraph
from nnburst.model.validate import validate_model
from nnburst.service.process.launch import start_child
from support.mutations import MUTATIONS, RULES, with_operand, with_operation
from support.samples import SAMPLES, O, T, check_outputs, run
from support.waiting import until


def accepts(device: Device, model: Model) -> list[str]:
    """Return which of the two calls did not say INVALID_ARGUMENT."""
    wrong = []
    for call in (device.get_supported_operations, device.prepare_model):
        try:
            call(model)
        except InvalidArgument:
            continue
        except Exception as error:
            wrong.append(f"{call.__name__}: {error!r}")
        else:
            wrong.append(f"{call.__name__} accepts it")
    return wrong


_APPLIES = [
    pytest.param(
        number, name, id=f"REQ_MODEL_{number}-{name}", marks=[] if name == "three_adds" else pytest.mark.nightly
    )
    for number in sorted(MUTATIONS)
    for name in SAMPLES
]


@pytest.mark.parametrize(("number", "name"), _APPLIES)
def test_REQ_MODEL_014_to_035_038_to_041_043_mutant_is_rejected(device: Device, number: str, name: str) -> None:
    model = SAMPLES[name]().model
    if number == "041":
        model = replace(model, input_names=(), output_names=())
    mutants = list(MUTATIONS[number](model))
    wrong = {label: problem for label, mutant in mutants if (problem := accepts(device, mutant))}
    assert not wrong


@pytest.mark.parametrize("number", sorted(MUTATIONS))
def test_mutants_break_the_rule_that_they_are_about(number: str) -> None:
    for make in SAMPLES.values():
        for label, mutant in MUTATIONS[number](make().model):
            with pytest.raises(InvalidArgument) as caught:
                validate_model(mutant)
            assert re.search(rf"\b({RULES[number]})\b", str(caught.value)), label


def test_every_mutation_has_a_sample_to_apply_to() -> None:
    assert set(map(int, MUTATIONS)) == {*range(14, 36), *range(38, 42), 43}
    for number, mutate in MUTATIONS.items():
        assert list(mutate(SAMPLES["three_adds"]().model)), number


def test_REQ_MODEL_011_cycle(device: Device) -> None:
    model = SAMPLES["three_adds"]().model
    first, last = model.main.operations[0], model.main.operations[-1]
    looped = with_operation(model, 0, inputs=(last.outputs[0], *first.inputs[1:]))
    assert accepts(device, looped) == []


@pytest.mark.parametrize("value", [-1, 3])
@pytest.mark.parametrize("field", ["preference", "priority"])
def test_REQ_MODEL_036_037_preference_or_priority(device: Device, field: str, value: int) -> None:
    with pytest.raises(InvalidArgument):
        device.prepare_model(SAMPLES["three_adds"]().model, CompileJob(**{field: value}))  # type: ignore[arg-type]


def _branch(lifetime_of_output: Lifetime = Lifetime.SUBGRAPH_OUTPUT) -> Subgraph:
    """One float [2] in, RELU, one float [2] out."""
    x = OperandDesc(T.TENSOR_FLOAT32, (2,), 1, lifetime=Lifetime.SUBGRAPH_INPUT)
    y = OperandDesc(T.TENSOR_FLOAT32, (2,), 0, lifetime=lifetime_of_output)
    return Subgraph((x, y), (Operation(O.RELU, (0,), (1,)),), (0,), (1,))


def _if_model(*, condition: int = T.TENSOR_BOOL8, outer: tuple[int, ...] = (2,), branches: int = 2) -> Model:
    operands = [OperandDesc(condition, (1,), 1, lifetime=Lifetime.SUBGRAPH_INPUT)]
    operands += [
        OperandDesc(T.SUBGRAPH, (), 1, lifetime=Lifetime.SUBGRAPH, location=DataLocation(0, i)) for i in (0, 1)
    ]
    operands += [OperandDesc(T.TENSOR_FLOAT32, outer, 1, lifetime=Lifetime.SUBGRAPH_INPUT)]
    operands += [OperandDesc(T.TENSOR_FLOAT32, (2,), 0, lifetime=Lifetime.SUBGRAPH_OUTPUT)]
    if branches == 1:
        operands[2] = OperandDesc(T.TENSOR_FLOAT32, (2,), 1, lifetime=Lifetime.SUBGRAPH_INPUT)
        inputs = (0, 2, 3)
    else:
        inputs = (0, 3)
    main = Subgraph(tuple(operands), (Operation(O.IF, (0, 1, 2, 3), (4,)),), inputs, (4,))
    return Model(main, (_branch(), _branch()))


def test_REQ_MODEL_042_valid_if_is_accepted(device: Device) -> None:
    assert device.get_supported_operations(_if_model()) == (True,)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(_if_model(condition=T.TENSOR_INT32), id="condition"),
        pytest.param(_if_model(outer=(3,)), id="dimensions"),
        pytest.param(_if_model(branches=1), id="branch"),
        pytest.param(replace(_if_model(), referenced=(_branch(), replace(_branch(), input_indexes=()))), id="inputs"),
    ],
)
def test_REQ_MODEL_042_bad_if(device: Device, model: Model) -> None:
    assert accepts(device, model) == []


def _while_model(condition_type: int = T.TENSOR_BOOL8, body_outputs: int = 1) -> Model:
    x = OperandDesc(T.TENSOR_FLOAT32, (1,), 2, lifetime=Lifetime.SUBGRAPH_INPUT)
    flag = OperandDesc(condition_type, (1,), 0, lifetime=Lifetime.SUBGRAPH_OUTPUT)
    condition = Subgraph((x, flag), (Operation(O.LESS, (0, 0), (1,)),), (0,), (1,))
    y = OperandDesc(T.TENSOR_FLOAT32, (1,), 0, lifetime=Lifetime.SUBGRAPH_OUTPUT)
    body = Subgraph(
        (replace(x, number_of_consumers=body_outputs), *[y] * body_outputs),
        tuple(Operation(O.RELU, (0,), (i + 1,)) for i in range(body_outputs)),
        (0,),
        tuple(range(1, body_outputs + 1)),
    )
    operands = [OperandDesc(T.SUBGRAPH, (), 1, lifetime=Lifetime.SUBGRAPH, location=DataLocation(0, i)) for i in (0, 1)]
    operands += [replace(x, number_of_consumers=1), y]
    main = Subgraph(tuple(operands), (Operation(O.WHILE, (0, 1, 2), (3,)),), (2,), (3,))
    return Model(main, (condition, body))


def test_REQ_MODEL_042_while(device: Device) -> None:
    assert device.get_supported_operations(_while_model()) == (True,)
    assert accepts(device, _while_model(condition_type=T.TENSOR_FLOAT32)) == []
    assert accepts(device, _while_model(body_outputs=2)) == []


@pytest.mark.parametrize(
    ("name", "first_good"),
    [
        ("conv_float", HalVersion.V1_0),
        ("two_outputs", HalVersion.V1_2),  # TENSOR_FLOAT16
        ("quant_chain_signed", HalVersion.V1_3),
        ("per_channel", HalVersion.V1_2),
        ("shapes_and_types", HalVersion.V1_2),  # QUANTIZE
        ("int_arithmetic", HalVersion.V1_3),
        ("average_and_l2", HalVersion.V1_2),  # NCHW option
        ("optional_input", HalVersion.V1_1),
    ],
)
def test_REQ_MODEL_044_newer_than_declared(name: str, first_good: HalVersion) -> None:
    model = SAMPLES[name]().model
    for version in HalVersion:
        if version >= first_good:
            validate_model(model, version)
        else:
            with pytest.raises(InvalidArgument):
                validate_model(model, version)


def _bad_constants() -> dict[str, Model]:
    """Models that are well formed but whose constants do not fit together."""
    x = (1, 3, 3, 2)
    models = {}
    for name, edit in {
        "stride": {"stride": 0},
        "filter larger than image": {"padding": "valid", "filter": (1, 5, 5, 2)},
        "padding scheme": {},
    }.items():
        b = ModelBuilder()
        i = b.input("x", T.TENSOR_FLOAT32, x)
        w = b.constant(np.ones(edit.get("filter", (1, 1, 1, 2)), np.float32))
        scheme = 7 if name == "padding scheme" else 2
        stride = edit.get("stride", 1)
        y = b.operand(b.add_operand(T.TENSOR_FLOAT32, (0, 0, 0, 0)))
        inputs = [i, w, b.constant(np.zeros(1, np.float32)), *map(b.scalar, (scheme, stride, stride, 0))]
        b.add_operation(O.CONV_2D, inputs, [y])
        b.output("y", y)
        models[name] = b.build()
    b = ModelBuilder()
    y = b.operand(b.add_operand(T.TENSOR_FLOAT32, (0, 0)))
    shape = b.constant(np.array([4, 5], np.int32))
    b.add_operation(O.RESHAPE, [b.input("x", T.TENSOR_FLOAT32, x), shape], [y])
    b.output("y", y)
    models["reshape"] = b.build()
    return models


@pytest.mark.parametrize("name", list(_bad_constants()))
def test_REQ_MODEL_045_050_bad_constants_fail_cleanly(device: Device, name: str) -> None:
    model = _bad_constants()[name]
    x = np.ones((1, 3, 3, 2), np.float32)
    try:
        prepared = device.prepare_model(model)
    except (GeneralFailure, InvalidArgument):
        pass
    else:
        for way in ("sync", "burst"):
            outcome = run(prepared, model, (x,), [(1, 3, 3, 1)], way)
            assert outcome.status in (ErrorStatus.GENERAL_FAILURE, ErrorStatus.INVALID_ARGUMENT)
            assert outcome.shapes == ()
            assert outcome.timing.time_on_device is None
        prepared.close()
    assert device.status is DeviceStatus.AVAILABLE
    sample = SAMPLES["three_adds"]()  # the device has survived
    prepared = device.prepare_model(sample.model)
    check_outputs(sample, run(prepared, sample.model, sample.inputs, [(2, 3)]))
    prepared.close()


def test_REQ_MODEL_018_scale_that_is_no_number(device: Device) -> None:
    model = SAMPLES["quant_chain"]().model
    for scale in (float("nan"), float("inf")):
        assert accepts(device, with_operand(model, 0, scale=scale)) == []
        with pytest.raises(InvalidArgument, match=r"V2: operand 0 .* scale is"):
            validate_model(with_operand(model, 0, scale=scale))


def test_REQ_MODEL_042_messages_name_what_differs() -> None:
    """What one check lets through, the next one must not hide."""
    with pytest.raises(InvalidArgument, match="the body has 2 outputs"):
        validate_model(_while_model(body_outputs=2))
    half = replace(_branch(), operands=tuple(replace(o, type=T.TENSOR_FLOAT16) for o in _branch().operands))
    with pytest.raises(InvalidArgument, match="type or quantisation"):
        validate_model(replace(_if_model(), referenced=(_branch(), half)))


def test_REQ_MODEL_044_option_that_is_newer_than_its_types() -> None:
    b = ModelBuilder()
    b.output("y", b.softmax(b.input("x", T.TENSOR_FLOAT32, (2, 3)), axis=0))
    model = b.build()
    validate_model(model, HalVersion.V1_2)
    with pytest.raises(InvalidArgument, match="axis"):
        validate_model(model, HalVersion.V1_1)


# ---- models at random ----------------------------------------------------------------------------------------------


DRAWS = pytest.mark.parametrize(
    "draws",
    [
        pytest.param(range(20), id="few"),
        pytest.param(range(20, 300), marks=pytest.mark.nightly, id="some"),
        pytest.param(range(300, 20_300), marks=[pytest.mark.soak, pytest.mark.timeout(0)], id="many"),
    ],
)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Device, int]]:
    """A device in a service, and the service's process."""
    connection = start_child(devices=("nnburst-reference",))
    try:
        yield connection.devices[0], connection.pid
    finally:
        connection.close()


def held(pid: int) -> tuple[int, int]:
    """Descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@DRAWS
def test_REQ_MODEL_052_a_burst_gives_the_bits_of_the_device_in_process(
    served: tuple[Device, int], draws: range
) -> None:
    device, pid = served
    local = create_device("nnburst-reference")
    before = held(pid)
    for seed in draws:
        model, inputs, dims = Author(seed).model()
        here, there = local.prepare_model(model), device.prepare_model(model)
        mine = run(here, model, inputs, dims, "sync")
        theirs = run(there, model, inputs, dims, "burst")
        for prepared in (here, there):
            prepared.close()
        assert mine.status is theirs.status is ErrorStatus.NONE, f"draw {seed}"
        assert [out.tobytes() for out in mine.outputs] == [out.tobytes() for out in theirs.outputs], f"draw {seed}"
        assert [out.shape for out in mine.outputs] == [out.shape for out in theirs.outputs] == dims, f"draw {seed}"
    until(lambda: all(n <= old + 2 for n, old in zip(held(pid), before, strict=True)), "more is held than before")
    local.close()


@DRAWS
def test_REQ_MODEL_045_050_a_changed_model_is_refused_or_runs_to_a_status(
    served: tuple[Device, int], draws: range
) -> None:
    device, pid = served
    local = create_device("nnburst-reference")
    before, seen = held(pid), Counter[str]()
    for seed in draws:
        author = Author(10**6 + seed)
        model, inputs, dims = author.model()
        broken = changed(model, author)
        outcomes = []
        for where, way in ((local, "sync"), (device, "burst")):
            try:
                prepared = where.prepare_model(broken)
            except NNBurstError as error:
                outcomes.append(f"refused: {ErrorStatus(error.status).name}")
                continue
            try:
                outcomes.append(run(prepared, broken, inputs, dims, way).status.name)
            except NNBurstError as error:  # the request no longer fits the model
                outcomes.append(f"unfit: {ErrorStatus(error.status).name}")
            except (ValueError, KeyError, TypeError):
                outcomes.append("the test cannot make a request")
            finally:
                prepared.close()
        assert outcomes[0] == outcomes[1], f"draw {seed}"
        seen[outcomes[0]] += 1
    assert device.status is DeviceStatus.AVAILABLE
    until(lambda: all(n <= old + 2 for n, old in zip(held(pid), before, strict=True)), "more is held than before")
    assert seen["refused: INVALID_ARGUMENT"] > len(draws) / 2
    local.close()
