"""The named models of a shared service, opened when they are first asked for and again after the service died."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import DeadObject, InvalidArgument, NNBurstError
from ..runtime import Service, Session, connect
from ._tensors import Array


@dataclass
class Counts:
    """What happened to the requests for one model; nanoseconds."""

    inferences: int = 0
    failures: int = 0
    success_ns: int = 0
    failure_ns: int = 0
    last_ms: int = 0


class Models:
    """Named models of a service. Any thread.

    Args:
        address: Of the service, as `nnburst.connect` takes it.
        names: The models that clients may ask for.
    """

    def __init__(self, address: str, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.counts = {name: Counts() for name in names}
        self._address = address
        self._lock = threading.Lock()
        self._service: Service | None = None
        self._sessions: dict[str, Session] = {}

    def session(self, name: str) -> Session:
        """Return the session of a model.

        Raises:
            InvalidArgument: No such model.
            DeviceUnavailable: The service is not there.
        """
        if name not in self.names:
            raise InvalidArgument(f"no model {name!r}; this service has {list(self.names)}")
        session = self._sessions.get(name)
        if session is not None and session.service.alive:
            return session
        with self._lock:
            if self._service is None or not self._service.alive:
                self._drop()
                self._service = connect(self._address)
            if name not in self._sessions:
                self._sessions[name] = self._service.session(name)
            return self._sessions[name]

    def is_ready(self) -> bool:
        """Whether every model can be run now."""
        try:
            return all(self.session(name) is not None for name in self.names)
        except NNBurstError:
            return False

    async def opened(self, name: str) -> Session:
        """As `session`; a thread waits if it has to be opened first."""
        session = self._sessions.get(name)
        if session is not None and session.service.alive:
            return session
        return await asyncio.get_running_loop().run_in_executor(None, self.session, name)

    async def run(self, name: str, inputs: Mapping[str, Array]) -> list[Array]:
        """Run a model once; raises as `Session.run`. A request that met a dead service is not repeated."""
        session = await self.opened(name)
        counts, began = self.counts[name], time.monotonic_ns()
        counts.last_ms = time.time_ns() // 1_000_000
        try:
            outputs = await session.arun(None, inputs)
        except NNBurstError:
            counts.failures += 1
            counts.failure_ns += time.monotonic_ns() - began
            raise
        counts.inferences += 1
        counts.success_ns += time.monotonic_ns() - began
        return outputs

    def close(self) -> None:
        """Close all sessions."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        sessions, self._sessions = self._sessions, {}
        service, self._service = self._service, None
        with contextlib.suppress(DeadObject):
            for session in sessions.values():
                session.close()
        if service is not None:
            service.close()
