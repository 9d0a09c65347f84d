"""The rows of `nnburst bench`: the round trip of a cache line between CPUs, and bursts with small and large tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from ...model.builder import ModelBuilder
from ...model.operand_types import OperandType
from ...model.types import Model
from ...runtime.open_service import launch
from ..targets import size
from .rounds import POLLING_WINDOW, Case, Subject, allowed_cpus, line_samples
from .sampling import time_calls

PAYLOADS = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)


def bytes_in_bytes_out(nbytes: int) -> Model:
    """Return a model with one input and one output of `nbytes` bytes each."""
    builder = ModelBuilder()
    x = builder.input("x", OperandType.TENSOR_QUANT8_ASYMM, (1, nbytes), scale=1.0, zero_point=0)
    builder.output("y", builder.relu(x))
    return builder.build()


@contextmanager
def _open_burst(nbytes: int, window: float) -> Iterator[Subject]:
    model = bytes_in_bytes_out(nbytes)
    with launch(devices=["nnburst-noop"]) as service, service.session(model, polling_window=window) as session:
        bound = session.bind()
        bound.inputs["x"][...] = 1  # writing allocates the pages
        bound.run()
        yield Subject(partial(time_calls, bound.run), service.pid)


def _pool(nbytes: int) -> Case:
    key, opener = f"pool-{size(nbytes).replace(' ', '')}", partial(_open_burst, nbytes, POLLING_WINDOW)
    return Case(key, "f", f"burst, pool, {size(nbytes)}", "poll", nbytes, opener)


_POLLS, _BLOCKS = partial(_open_burst, 32, POLLING_WINDOW), partial(_open_burst, 32, 0.0)
LINE = Case(
    "line", "a", "L: one cache line, C", "poll", 8,
    lambda: nullcontext(Subject(partial(line_samples, allowed_cpus()))),
)  # fmt: skip
BURSTS = (
    Case("burst-poll", "d", "burst Execution.run()", "poll", 32, _POLLS),
    Case("burst-block", "d", "burst Execution.run()", "block", 32, _BLOCKS),
    Case("burst-block-1core", "d", "burst Execution.run()", "block", 32, _BLOCKS, one_core=True),
)
POOLS = tuple(map(_pool, PAYLOADS))


def all_cases() -> tuple[Case, ...]:
    """Return every row, in the order of the table. With one CPU, there is no row for the round trip of a cache line."""
    return (LINE, *BURSTS, *POOLS)[not allowed_cpus().two :]
