"""A burst whose server runs in a thread of this process, and adds one to each element."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nnburst import Memory
from nnburst.burst import BurstExecutorWithCache, ExecutionBurstController, ExecutionBurstServer
from nnburst.burst.client.request import BoundRequest
from nnburst.burst.interfaces import BurstCallback, BurstContext
from nnburst.burst.kernel import Kernel
from nnburst.errors import Ending, ErrorStatus
from nnburst.fmq import MQDescriptor
from nnburst.model import Request, RunOptions, Timing
from nnburst.model.running import ExecutionResult
from nnburst.model.types import DataLocation, RequestArgument
from support.waiting import PATIENCE

WINDOWS = pytest.mark.parametrize("window", [0.0, 50e-6, 0.5], ids=["futex", "short", "polling"])


class Adder(BurstExecutorWithCache):
    """An executor of y = x + 1 on four floats, which records the server's calls. Runs call `during` first."""

    def __init__(self) -> None:
        super().__init__(self.bound_to)
        self.memories = self._entries
        self.added: list[int] = []
        self.bound = 0
        self.during: Callable[[], ExecutionResult | None] = lambda: None

    def add_cache_entry(self, memory: Any, slot: int) -> None:
        assert slot not in self.memories
        self.added.append(slot)
        super().add_cache_entry(memory, slot)

    def bound_to(self, request: Request, options: RunOptions) -> Kernel:
        self.bound += 1
        (x,), (y,) = request.inputs, request.outputs
        pools: Any = request.pools
        xs = pools[x.location.pool_index].array(np.float32, (4,), x.location.offset)
        ys = pools[y.location.pool_index].array(np.float32, (4,), y.location.offset)

        def run() -> ExecutionResult | None:
            result = self.during()
            np.add(xs, 1, out=ys)
            return result

        return run


class LocalModel:
    """A model with only the methods that a controller calls. A thread of this process serves the burst."""

    def __init__(self, executor: BurstExecutorWithCache | None = None) -> None:
        self.executor = executor or Adder()
        self.server: ExecutionBurstServer | None = None
        self.on_death: Callable[[], None] = lambda: None
        self.callback: Callable[[BurstCallback], BurstCallback] = lambda callback: callback
        self.executed: list[Request] = []

    def configure_execution_burst(
        self,
        callback: BurstCallback,
        request_channel: MQDescriptor,
        result_channel: MQDescriptor,
        polling_window: float | None = None,
    ) -> BurstContext:
        self.server = ExecutionBurstServer.create(
            self.callback(callback), request_channel, result_channel, self.executor, polling_window
        )
        return self.server

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        self.executed.append(request)
        return ErrorStatus.NONE, (), Timing()

    ending = Ending()

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        self.on_death = on_death
        return lambda: None


def adder_request(memory: Memory, output: int = 64) -> Request:
    return Request(
        (RequestArgument(False, DataLocation(0, 0, 16)),),
        (RequestArgument(False, DataLocation(0, output, 16)),),
        (memory,),
    )


def bind(controller: ExecutionBurstController, request: Request) -> BoundRequest:
    execution = controller.bind(request)
    execution.timeout = PATIENCE
    return execution


@contextlib.contextmanager
def bound(model: LocalModel, memory: Memory, **options: Any) -> Iterator[tuple[ExecutionBurstController, BoundRequest]]:
    """Yield a burst and an execution that is bound to it."""
    with ExecutionBurstController.create(model, **options) as controller:
        yield controller, bind(controller, adder_request(memory))
