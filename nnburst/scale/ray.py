"""Sessions in Ray: an actor, and a deployment for Ray Serve. Needs the extra ``ray``.

Each replica has a `Session`. The model runs in the session's own service process, or in a service that the programs of
the node share. If the model crashes, only the service ends, and the replica's next request starts a new service.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._core.deadline import Deadline
from ..errors import DeadObject, DeviceUnavailable, MissedDeadline, NNBurstError
from ..model.types import Array
from ..runtime.open_service import connect
from ..runtime.service import Service
from ..runtime.session import Session

try:
    import ray
    from ray import serve
except ImportError as error:
    raise DeviceUnavailable("nnburst.scale.ray needs Ray: pip install 'nnburst[ray]'") from error

Inputs = Mapping[str, Array]
_OPENING = 60.0
"""Seconds to wait for the restart of a dead shared service."""
_WINDOW = 300e-6
"""Polling window in seconds, long enough for a sleeping service to wake and run a small model."""


class Replica:
    """A session in an actor or in a replica of a deployment.

    Args:
        model: Path of a model file on each node, or the file's bytes. If `service` is given, the name of a
            model of that service.
        service: Name or address of a service that the programs of a node share, as for `nnburst.connect`; None to
            give each session its own service.
        retry: True to repeat a request once if the service died. Only for models without side effects.
        trust_uid: See `nnburst.connect`.
        options: Options of `Session`: ``device``, ``timeout``, ``cache_dir``, ``concurrency``.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes,
        *,
        service: str | None = None,
        retry: bool = False,
        trust_uid: int | Collection[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._shared: Service | None = None if service is None else connect(service, trust_uid=trust_uid)
        self._retry = retry
        self.session = Session(
            model,
            service=self._shared,
            **{"polling_window": _WINDOW, "on_death": "restart", "retry": int(retry), **(options or {})},
        )

    def run(self, inputs: Inputs) -> list[Array]:
        """Run the model once. Raises the same errors as `Session.run`."""
        return self.session.run(None, inputs)

    async def arun(self, inputs: Inputs) -> list[Array]:
        """Run the model once without blocking the event loop. Raises the same errors as `Session.run`."""
        return await self.session.arun(None, inputs)

    def run_many(self, inputs: Sequence[Inputs], batch: int = 1) -> list[list[Array]]:
        """Run the model for each dict of inputs, in order, with up to `batch` rows in a run.

        Raises the same errors as `Session.run_many`.
        """
        return list(self.session.run_many(inputs, batch=batch))

    def run_together(self, inputs: Sequence[Inputs], batch: int) -> list[list[Array] | NNBurstError]:
        """Run the inputs of several callers as one batch. Return the outputs or the error of each caller.

        If the batch fails, each input runs alone. After a missed deadline, no input runs again, and each caller gets
        the error. The same happens if the service died and `retry` is False.
        """
        try:
            return [*self.run_many(inputs, batch)]
        except NNBurstError as error:
            if len(inputs) == 1 or not self._may_run_again(error):
                return [error] * len(inputs)
        return [answer for one in inputs for answer in self.run_together([one], 1)]

    def _may_run_again(self, error: NNBurstError) -> bool:
        return self._retry if isinstance(error, DeadObject) else not isinstance(error, MissedDeadline)

    def check_health(self) -> None:
        """Restart the service if it has died, without waiting for the next request.

        Raises:
            NNBurstError: The service cannot be restarted, so Ray must replace the replica.
        """
        self.session.reopen()
        if self._shared is not None:
            Deadline.after(_OPENING).call(self._shared._revive)

    def status(self) -> dict[str, Any]:
        """Return the state of the replica: ``restarts`` is the number of restarts of its service."""
        return {"restarts": len(self.session.restarts)}

    def close(self) -> None:
        """Close the session and the connection to a shared service."""
        self.session.close()
        if self._shared is not None:
            self._shared.close()


def actor(
    model: str | os.PathLike[str] | bytes, *, actor_options: Mapping[str, Any] | None = None, **session: Any
) -> Any:
    """Start an actor with a session and the methods of `Replica`.

    Args:
        model: See `Replica`.
        actor_options: Arguments of Ray's `.options()`: ``num_cpus``, ``name``, ``max_concurrency``, and so on.
        session: The other arguments of `Replica`.
    """
    return ray.remote(Replica).options(**(actor_options or {})).remote(model, **session)


def deployment(
    model: str | os.PathLike[str] | bytes,
    *,
    serve_options: Mapping[str, Any] | None = None,
    batch: int = 1,
    batch_wait: float = 0.005,
    **session: Any,
) -> Any:
    """Return an application for `ray.serve.run` with one session per replica.

    ``handle.remote(inputs)`` returns a list of arrays, and ``handle.status.remote()`` the status of one replica.

    Args:
        model: See `Replica`.
        serve_options: Arguments of Serve's `deployment()`: ``num_replicas``, ``max_ongoing_requests``, and so on.
        batch: Maximum number of requests in one batch. More than 1 needs a model whose inputs all have a symbolic
            first dimension.
        batch_wait: Seconds that the first request of a batch waits for other requests.
        session: The other arguments of `Replica`.
    """

    class Model:
        def __init__(self) -> None:
            self._replica = Replica(model, **session)

        async def __call__(self, inputs: Inputs) -> list[Array]:
            if batch == 1:
                return await self._replica.arun(inputs)
            answer: list[Array] | NNBurstError = await self._run_together(inputs)
            if isinstance(answer, NNBurstError):
                raise answer
            return answer

        @serve.batch(max_batch_size=batch, batch_wait_timeout_s=batch_wait)  # type: ignore[untyped-decorator]
        async def _run_together(self, several: list[Inputs]) -> list[list[Array] | NNBurstError]:
            run = self._replica.run_together
            return await asyncio.get_running_loop().run_in_executor(None, run, several, batch)

        async def status(self) -> dict[str, Any]:
            return self._replica.status()

        async def check_health(self) -> None:  # it may start a service, so it runs in a thread
            await asyncio.get_running_loop().run_in_executor(None, self._replica.check_health)

        def __del__(self) -> None:
            if (replica := getattr(self, "_replica", None)) is not None:
                replica.close()

    options = {"health_check_period_s": 1.0, **(serve_options or {})}
    return serve.deployment(Model).options(**options).bind()
