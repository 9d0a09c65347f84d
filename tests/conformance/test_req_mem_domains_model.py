"""Buffers against a model of them: any sequence of copies and executions, wanted or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import nnburst
from nnburst import Memory, ModelBuilder, OperandType
from nnburst.burst import ExecutionBurstController
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument
from nnburst.model import Request
from nnburst.model.types import BufferDesc, BufferId, BufferRole, DataLocation, RequestArgument

COLUMNS = 3
MOST_ROWS = 4
WHICH = st.integers(0, 2)
ROWS = st.integers(1, MOST_ROWS)


def model() -> Any:
    """y = x + 1 with an activation that is known at run time only, so that an admitted run can fail."""
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (0, COLUMNS))
    activation = b.input("activation", OperandType.INT32)
    one = b.constant(np.ones((1, COLUMNS), np.float32), OperandType.TENSOR_FLOAT32)
    b.output("y", b.add(x, one, activation=activation, dimensions=(0, COLUMNS)))
    return b.build()


class BufferStates(RuleBasedStateMachine):
    """Two buffers with open dimensions and one of 2 rows; `values` is what each holds, None for nothing."""

    service: nnburst.Service

    def __init__(self) -> None:
        super().__init__()
        self.device = self.service.devices[0]
        self.prepared = self.device.prepare_model(model())
        self.burst = ExecutionBurstController.create(self.prepared)
        self.pool = Memory.ashmem(4096)
        role = [BufferRole(0, 0)]
        self.buffers = [
            self.device.allocate(BufferDesc(dims), [self.prepared], role, role) for dims in ((), (), (2, COLUMNS))
        ]
        self.values: list[np.ndarray | None] = [None] * 3
        self.generations = [-1] * 3

    def teardown(self) -> None:
        self.burst.close()
        for buffer in self.buffers:
            buffer.close()
        self.prepared.close()
        self.pool.close()

    def takes(self, which: int, rows: int) -> bool:
        return which < 2 or rows == 2

    @rule(which=WHICH, rows=ROWS, number=st.integers(0, 9), say=st.booleans(), wrong=st.booleans())
    def copy_from(self, which: int, rows: int, number: int, say: bool, wrong: bool) -> None:
        with Memory.ashmem(rows * COLUMNS * 4 + 4 * wrong) as source:
            values = source.array(np.float32, (rows, COLUMNS))
            values[:] = number
            if self.takes(which, rows) and (say or which == 2) and not wrong:
                self.buffers[which].copy_from(source, (rows, COLUMNS) if say else ())
                self.values[which] = values.copy()
            else:
                with pytest.raises(InvalidArgument):
                    self.buffers[which].copy_from(source, (rows, COLUMNS) if say else ())
                self.values[which] = None

    @rule(to=WHICH, source=WHICH)
    def copy_buffer(self, to: int, source: int) -> None:
        values = self.values[source]
        if to == source:
            self.buffers[to].copy_buffer(self.buffers[source])
        elif values is not None and self.takes(to, len(values)):
            self.buffers[to].copy_buffer(self.buffers[source])
            self.values[to] = values
        else:
            with pytest.raises(InvalidArgument):
                self.buffers[to].copy_buffer(self.buffers[source])
            self.values[to] = None

    @rule(x=WHICH, y=WHICH, fails=st.booleans(), in_burst=st.booleans(), rows=st.integers(0, MOST_ROWS))
    def run_on_buffers(self, x: int, y: int, fails: bool, in_burst: bool, rows: int) -> None:
        self.pool.array(np.int32, (1,))[0] = 999 if fails else 0
        request = Request(
            (
                RequestArgument(False, DataLocation(1, 0, 0), (rows, COLUMNS) if rows else ()),
                RequestArgument(False, DataLocation(0, 0, 4)),
            ),
            (RequestArgument(False, DataLocation(2, 0, 0)),),
            (self.pool, BufferId(self.buffers[x].id), BufferId(self.buffers[y].id)),
        )
        status = (self.burst.compute if in_burst else self.prepared.execute_synchronously)(request)[0]
        values = self.values[x]
        if x == y:
            assert status is ErrorStatus.INVALID_ARGUMENT
        elif values is None:
            assert status is ErrorStatus.GENERAL_FAILURE
        elif rows and rows != len(values):
            assert status is ErrorStatus.INVALID_ARGUMENT
        elif fails or not self.takes(y, len(values)):
            assert status is ErrorStatus.GENERAL_FAILURE
            self.values[y] = None
        else:
            assert status is ErrorStatus.NONE
            self.values[y] = values + 1

    @invariant()
    def everybody_holds_what_the_model_says(self) -> None:
        for i, (buffer, values) in enumerate(zip(self.buffers, self.values, strict=True)):
            with Memory.ashmem(2 * COLUMNS * 4 if values is None else values.nbytes) as target:
                if values is None:
                    with pytest.raises(GeneralFailure):
                        buffer.copy_to(target)
                else:
                    with Memory.ashmem(2 * values.nbytes) as wrong, pytest.raises(InvalidArgument):
                        buffer.copy_to(wrong)  # which changes nothing
                    generation = buffer.copy_to(target)
                    assert (target.array(np.float32, values.shape) == values).all()
                    assert generation >= self.generations[i]
                    self.generations[i] = generation


def test_REQ_MEM_016_to_029_110_113_any_sequence_leaves_the_states_of_the_model(service: nnburst.Service) -> None:
    machine = type("BufferStates", (BufferStates,), {"service": service})
    checks = list(HealthCheck)
    run = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(machine, settings=run)
