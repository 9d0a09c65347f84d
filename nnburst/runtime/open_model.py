"""A compiled model with its bursts: what a session shows of it, and what it is compiled from once more."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from .._core.leaving import Closing, Leaving
from .._core.one_process import OneProcess
from ..errors import BadState, DeadObject, GeneralFailure
from ..model import ExecutionPreference, ImportedModel, Model, Priority
from .compile.cache_sources import CacheSource
from .compile.compilation import Compilation
from .compile.model_files import imported
from .display import described, nodes_table
from .request.node_args import NodeArg
from .run.burst_pool import BurstPool, Restart

if TYPE_CHECKING:
    from ..burst import BurstStats
    from ..devices import Device
    from ..watch import Latency
    from .compile.caching import CacheReport
    from .run.burst import Burst
    from .service import ServiceProcess


T = TypeVar("T", bound="OpenModel")


class Settings(Struct, frozen=True):
    """What a model is compiled from, also once more."""

    model: Model | str | bytes
    device: str | None
    preference: ExecutionPreference
    priority: Priority
    cache: CacheSource | None

    def compiled(self, service: ServiceProcess) -> Compilation:
        with contextlib.ExitStack() as reading:
            found: Model | ImportedModel
            devices: ServiceProcess | Sequence[Device]
            if isinstance(self.model, Model):
                found, devices = self.model, service if self.device is None else (service.device(self.device),)
            else:
                chosen, found = reading.enter_context(imported(service, self.device, self.model))
                devices = (chosen,)
            compilation = Compilation(found, devices)
            try:
                compilation.set_preference(self.preference)
                compilation.set_priority(self.priority)
                compilation._set_cache_source(self.cache)
                compilation.finish()
            except BaseException:
                compilation.close()
                raise
            return compilation


class OpenModel(OneProcess, Closing):
    """What is below a `Session`, which opens it."""

    _settings: Settings
    _service: ServiceProcess
    _compilation: Compilation
    _pool: BurstPool
    _leaving: Leaving | None

    def _open_again(self) -> str:
        """Start a service again that has died, and compile the model. Returns what caching did."""
        self._service._revive()
        compilation, old = self._settings.compiled(self._service), self._compilation
        try:
            if (compilation.inputs, compilation.outputs) != (old.inputs, old.outputs):
                raise GeneralFailure("the model has other inputs or outputs than before; open another session")
            self._pool.begin_again(compilation)
        except BaseException:
            compilation.close()
            raise
        self._compilation = compilation
        return compilation.cache_report.outcome

    def get_inputs(self) -> list[NodeArg]:
        """Return names, shapes and types of the inputs that each run needs."""
        return [node.shown for node in self._compilation.inputs if not node.is_optional]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return names, shapes and types of the inputs that may be left out: the model has a default for each."""
        return [node.shown for node in self._compilation.inputs if node.is_optional]

    def get_outputs(self) -> list[NodeArg]:
        """Return names, shapes and types of the outputs."""
        return [node.shown for node in self._compilation.outputs]

    @property
    def compilation(self) -> Compilation:
        """What the session runs; for executions made step by step."""
        return self._compilation

    @property
    def burst(self) -> Burst:
        """The burst that was opened first; runs that do not come at once go through it."""
        return self._pool.first

    @property
    def device(self) -> Device:
        """The device that the model was compiled for."""
        return self._compilation.device

    @property
    def cache_report(self) -> CacheReport:
        """What caching did when the session was opened."""
        return self._compilation.cache_report

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """The deaths of the service that the session has got over, with ``on_death="restart"``."""
        return self._pool.restarts

    def reopen(self) -> None:
        """Get over a death of the service now rather than with the next run. Does nothing while it lives.

        Raises:
            DeadObject: It does not come back, or the session was not opened with ``on_death="restart"``.
            NNBurstError: As a run that has to wait for it.
        """
        if not self._service.alive and not self._pool.recover(self._pool.first):
            raise DeadObject("the service is gone; open the session with on_death='restart' to have it started again")

    @property
    def stats(self) -> BurstStats:
        """Counters of this end of all bursts."""
        return self._pool.stats

    def latency(self) -> Latency:
        """Return how long the runs of this session took: p50, p99 and max in seconds, and where the time went.

        Counted always, at no cost to speak of: in a fast loop one run in 256 is timed and stands for the others, and
        every run that is not answered at once. Runs without a burst are not among them.
        """
        return self._pool.latency()

    def __enter__(self: T) -> T:
        if self.closed:
            raise BadState("the session is closed; open another one")
        return self

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._leaving is not None

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.stats.received:,} runs, {self.latency()!r}"
        return f"<Session of {described(self._compilation)} on {self._compilation.device.name}, {state}>"

    def _repr_html_(self) -> str:
        about = f"session on {self._compilation.device.name}, {self._service!r}"
        return nodes_table(about, self._compilation) + self.latency()._repr_html_()


def open_again(model: OpenModel | None) -> str:
    """As `OpenModel._open_again`; None: it was dropped."""
    if model is None:
        raise BadState("the session was dropped")
    return model._open_again()
