"""The base class of prepared models that wrap another one and change part of its behaviour."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..burst.interfaces import BurstCallback, BurstContext, BurstExecutorWithCache
from ..errors import Ending
from ..fmq.descriptor import MQDescriptor
from ..model.running import ExecutionResult, RunOptions
from ..model.types import Request
from .fence import Fence
from .fenced import FencedExecution
from .interfaces import PreparedModel


class WrappedModel(PreparedModel):
    """A prepared model that forwards every call to another one."""

    def __init__(self, inner: PreparedModel) -> None:
        self.inner = inner
        self.cache_result, self.label, self.takes_steps = inner.cache_result, inner.label, inner.takes_steps

    @property
    def ending(self) -> Ending:
        return self.inner.ending

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        return self.inner.execute_synchronously(request, options)

    def bind_fenced(self, request: Request, options: RunOptions) -> Callable[[RunOptions], ExecutionResult]:
        return self.inner.bind_fenced(request, options)

    def execute_fenced(
        self,
        request: Request,
        wait_for: Sequence[Fence] = (),
        options: RunOptions = RunOptions(),
        duration_ns: int = 0,
        on_end: Callable[[], None] | None = None,
    ) -> FencedExecution:
        return self.inner.execute_fenced(request, wait_for, options, duration_ns, on_end)

    def configure_execution_burst(
        self,
        callback: BurstCallback,
        request_channel: MQDescriptor,
        result_channel: MQDescriptor,
        polling_window: float | None = None,
    ) -> BurstContext:
        return self.inner.configure_execution_burst(callback, request_channel, result_channel, polling_window)

    def burst_executor(self) -> BurstExecutorWithCache | None:
        return self.inner.burst_executor()

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        return self.inner.link_to_death(on_death)

    def close(self) -> None:
        self.inner.close()
