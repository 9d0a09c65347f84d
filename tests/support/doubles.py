"""Devices with hooks, threads that do not start, and a record of runs with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from nnburst import Model
from nnburst.burst.interfaces import BurstCallback, BurstContext
from nnburst.devices import Device, PreparedModel
from nnburst.errors import ErrorStatus
from nnburst.model import Capabilities, Request, RunOptions
from nnburst.model.running import ExecutionResult, Failure
from nnburst.model.types import NO_TIMING
from support.waiting import PATIENCE


def refuse_threads(patch: pytest.MonkeyPatch, name: str, error: type[Exception] = RuntimeError) -> None:
    """Make each start of a thread fail if the thread's name contains `name`."""
    start = threading.Thread.start

    def failing(thread: threading.Thread) -> None:
        if name in thread.name:
            raise error("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", failing)


class Ended:
    """Recorder of runs with a deadline, for one class of kernels. `errors` has the exception of each run, or None."""

    def __init__(self, monkeypatch: Any, kind: Any) -> None:
        self.errors: list[BaseException | None] = []
        self.changed = threading.Condition()
        until = kind.run_until

        def recorded(this: Any, deadline_ns: int) -> Any:
            error = None
            try:
                return until(this, deadline_ns)
            except BaseException as raised:
                error = raised
                raise
            finally:
                with self.changed:
                    self.errors.append(error)
                    self.changed.notify()

        monkeypatch.setattr(kind, "run_until", recorded)

    def first(self) -> BaseException | None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.errors, PATIENCE)
            return self.errors[0]


class ScriptedModel(PreparedModel):
    """A prepared model whose answer comes from the device's hook "execute", or else from the device's `result`."""

    def __init__(self, device: FakeDevice, model: Model) -> None:
        self.device = device
        self.model = model
        self.closed = 0

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        answer = self.device.hook("execute", request)
        if isinstance(answer, Failure):
            return answer
        status, shapes, timing = answer if isinstance(answer, tuple) else self.device.result
        return status, shapes, timing if options.measure else NO_TIMING

    def close(self) -> None:
        self.closed += 1


class FakeModel(ScriptedModel):
    """A prepared model whose bursts run nothing, and record the calls of their methods."""

    def configure_execution_burst(
        self, callback: BurstCallback, request_channel: Any, result_channel: Any, polling_window: float | None = None
    ) -> BurstContext:
        context = FakeContext(self.device, callback, polling_window)
        self.device.contexts.append(context)
        self.device.hook("burst", context)
        return context


class FakeContext(BurstContext):
    def __init__(self, device: FakeDevice, callback: BurstCallback, polling_window: float | None) -> None:
        self.device = device
        self.callback = callback
        self.polling_window = polling_window
        self.freed: list[int] = []
        self.log: list[str] = []
        self.gone = threading.Event()

    def free_memory(self, slot: int) -> None:
        self.freed.append(slot)

    def hang_up(self) -> None:
        self.log.append("hang_up")

    def close(self) -> None:
        self.log.append("close")
        self.gone.set()


class FakeDevice(Device):
    """A device that supports every model. `hooks` are functions that it calls: prepare, execute, supported, burst."""

    name, version_string, capabilities = "test-fake", "1", Capabilities()
    prepared: type[ScriptedModel] = FakeModel

    def __init__(self, **hooks: Callable[[Any], Any]) -> None:
        self.hooks = hooks
        self.models: list[ScriptedModel] = []
        self.contexts: list[FakeContext] = []
        self.closed = False
        self.result: ExecutionResult = (ErrorStatus.NONE, (), NO_TIMING)

    def hook(self, name: str, argument: Any) -> Any:
        return self.hooks[name](argument) if name in self.hooks else None

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        self.hook("supported", model)
        return (True,) * len(model.main.operations)

    def prepare_model(self, model: Model, *_: Any) -> PreparedModel:
        self.hook("prepare", model)
        self.models.append(self.prepared(self, model))
        return self.models[-1]

    def close(self) -> None:
        self.closed = True


class ScriptedDevice(FakeDevice):
    """A fake device with real bursts, which call the hook "execute" for each run."""

    prepared = ScriptedModel
