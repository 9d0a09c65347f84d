"""The named models of a shared service, opened when they are first asked for and again after the service died."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DeadObject, InvalidArgument, MissedDeadline, NNBurstError
from ..model import Array, Priority
from ..runtime import Service, Session, connect
from .tensors import ModelTensor

VERSION = "1"
"""Of every model: a service has one of each name."""


def check_version(model: str, version: str) -> None:
    """Check that a model has a version; '' is any.

    Raises:
        InvalidArgument: It has not.
    """
    if version not in ("", VERSION):
        raise InvalidArgument(f"model {model!r} has the version {VERSION}, not {version!r}")


@dataclass
class ModelCounts:
    """What happened to the requests for one model; nanoseconds."""

    inferences: int = 0
    failures: int = 0
    success_ns: int = 0
    failure_ns: int = 0
    last_ms: int = 0


class OpenedModel:
    """A model that can be run. Closed once `Models` has let go of it and no request uses it.

    Attributes:
        session: Its session.
        platform: What runs it, in the protocol's words.
        inputs, outputs: By name, in order.
    """

    def __init__(self, session: Session, counts: ModelCounts) -> None:
        self.session = session
        self.platform = f"nnburst_{session.device.name}"
        self.inputs = ModelTensor.all_of(session.get_inputs())
        self.outputs = ModelTensor.all_of(session.get_outputs())
        self._counts = counts
        self._lock = threading.Lock()
        self._users = 1  # `Models` itself

    def use(self) -> bool:
        """Keep it open for a request. False if it is closed already."""
        with self._lock:
            self._users += bool(self._users)
            return self._users > 0

    def let_go(self) -> bool:
        """Undo one `use`. True for the last one, who has to close it."""
        with self._lock:
            self._users -= 1
            return self._users == 0

    def close(self) -> None:
        """Close the session; a service that is dead has done so."""
        with contextlib.suppress(DeadObject):
            self.session.close()

    async def run(self, inputs: dict[str, Array], timeout: float | None = None) -> list[Array]:
        """Run it once, within so many seconds, and count that; raises as `Session.arun`.

        A request that met a dead service is not repeated.
        """
        counts, began = self._counts, time.monotonic_ns()
        try:
            if timeout is None:
                results = await self.session.arun(None, inputs)
            else:
                results = await self._within(timeout, inputs)
        except NNBurstError:
            counts.failures += 1
            counts.failure_ns += time.monotonic_ns() - began
            raise
        finally:
            counts.last_ms = time.time_ns() // 1_000_000
        counts.inferences += 1
        counts.success_ns += time.monotonic_ns() - began
        return results

    async def _within(self, timeout: float, inputs: dict[str, Array]) -> list[Array]:
        try:
            return await asyncio.wait_for(self.session.arun(None, inputs), timeout)
        except asyncio.TimeoutError as error:
            if isinstance(error, MissedDeadline):
                raise
            raise MissedDeadline(f"no answer within the {timeout:g} s that the client gave it") from None


class Models:
    """Named models of a service. Any thread.

    Args:
        address: Of the service, as `nnburst.connect` takes it.
        names: The models that clients may ask for.
    """

    def __init__(self, address: str, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.counts = {name: ModelCounts() for name in names}
        self._address = address
        self._lock = threading.Lock()
        self._service: Service | None = None
        self._opened: dict[tuple[str, Priority], OpenedModel] = {}

    def open(self, name: str, priority: Priority = Priority.MEDIUM) -> OpenedModel:
        """Return a model for runs of a priority, and wait for the service if it has to be opened first.

        Raises:
            InvalidArgument: No such model.
            DeviceUnavailable: The service is not there.
        """
        if name not in self.names:
            raise InvalidArgument(f"no model {name!r}; this service has {list(self.names)}")
        with self._lock:
            if self._service is None or not self._service.alive:
                self._drop()
                self._service = connect(self._address)
            key = name, priority
            if key not in self._opened:
                session = self._service.session(name, priority=priority)
                self._opened[key] = OpenedModel(session, self.counts[name])
            return self._opened[key]

    def is_ready(self) -> bool:
        """Whether every model can be run now."""
        try:
            return all(self.open(name) is not None for name in self.names)
        except NNBurstError:
            return False

    # What models are and did: as JSON has it, and as the fields of the protocol's messages.

    def describe(self, name: str) -> dict[str, Any]:
        """Say what a model takes and gives; raises as `open`."""
        model = self.open(name)

        def tensors(named: Mapping[str, ModelTensor]) -> list[dict[str, Any]]:
            return [{"name": name, "datatype": one.datatype, "shape": one.shape} for name, one in named.items()]

        arguments = {"inputs": tensors(model.inputs), "outputs": tensors(model.outputs)}
        return {"name": name, "versions": [VERSION], "platform": model.platform, **arguments}

    def index(self) -> list[dict[str, str]]:
        """Name every model."""
        return [{"name": name, "version": VERSION, "state": "READY"} for name in self.names]

    def statistics(self, name: str) -> list[dict[str, Any]]:
        """Say what happened to the requests for a model, or for each if the name is empty.

        Raises:
            InvalidArgument: No such model.
        """
        if name and name not in self.names:
            raise InvalidArgument(f"no model {name!r}")
        return [
            {
                "name": each,
                "version": VERSION,
                "last_inference": counts.last_ms,
                "inference_count": counts.inferences,
                "execution_count": counts.inferences,
                "inference_stats": {
                    "success": {"count": counts.inferences, "ns": counts.success_ns},
                    "fail": {"count": counts.failures, "ns": counts.failure_ns},
                },
            }
            for each in ([name] if name else self.names)
            for counts in [self.counts[each]]
        ]

    async def take(self, name: str, priority: Priority = Priority.MEDIUM) -> OpenedModel:
        """As `open`, without blocking the loop, for one request, which calls `give_back` at its end.

        Until then the model is not closed unless the service dies.
        """
        while (model := self.ready(name, priority)) is None:
            await asyncio.get_running_loop().run_in_executor(None, self.open, name, priority)
        return model

    def ready(self, name: str, priority: Priority = Priority.MEDIUM) -> OpenedModel | None:
        """As `take`; None if it has to be opened first."""
        model = self._opened.get((name, priority))
        return model if model is not None and model.session.service.alive and model.use() else None

    def give_back(self, model: OpenedModel) -> None:
        """A request that has taken the model has ended."""
        if model.let_go():
            asyncio.get_running_loop().run_in_executor(None, model.close)

    def renew(self) -> None:
        """Open each model again when it is next asked for; what runs ends with the old one."""
        with self._lock:
            models, self._opened = self._opened, {}
        with contextlib.ExitStack() as stack:
            for model in models.values():
                if model.let_go():
                    stack.callback(model.close)

    def close(self) -> None:
        """Close all sessions."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        models, self._opened = self._opened, {}
        service, self._service = self._service, None
        with contextlib.ExitStack() as stack:
            if service is not None:
                stack.callback(service.close)
            for model in models.values():
                stack.callback(model.close)
