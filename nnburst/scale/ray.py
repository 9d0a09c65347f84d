"""Sessions in Ray: an actor, and a deployment for Ray Serve. Needs the extra ``ray``.

Ray places, scales, routes and restarts; each replica holds a `Session`, whose model runs in a service process beside
it, or in a service that the programs of its node share. What kills a model costs that service only: the replica stays,
and its next request starts the service again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .._core.deadline import Deadline
from ..errors import DeadObject, DeviceUnavailable, InvalidArgument, MissedDeadline, NNBurstError
from ..model import Array
from ..runtime import Service, Session, connect

try:
    import ray
    from ray import serve
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise DeviceUnavailable("nnburst.scale.ray needs Ray: pip install 'nnburst[ray]'") from error

Inputs = Mapping[str, Array]
T = TypeVar("T")

_MOST_MODELS = 3
_OPENING = 60.0
"""Seconds that a shared service which has died has to come back."""
_PUBLISHED = "sha256:"
_WINDOW = 300e-6
"""Seconds. Who sleeps in a replica waits for a CPU, and for the interpreter, among Ray's own threads: that takes a
tenth of a request's time. A service that sleeps is awake within this time, and a small model has run."""


class Replica:
    """A session, or one for each model that is asked for, as an actor or a replica holds it.

    Args:
        model: The path of a model file on each node, its bytes, what `publish` returned, or with `service` the name of
            a model that the service has. None: each request names its model (see `deployment`), found by `find`.
        service: Name or address of a service that the programs of a node share, as for `nnburst.connect`; None starts
            one for each session.
        retry: Whether a request that met the death of its service is repeated once, for models that give the same
            answer twice. Without it such a request gets `DeadObject`.
        find: Turns the name of a model into what `model` would be.
        trust_uid: Whose `service` is used beside that of the replica's user and of root, as for `nnburst.connect`.
        options: Of `Session`: ``device``, ``timeout``, ``cache_dir``, ``concurrency``.

    Raises:
        InvalidArgument: There is nothing to run; or no model of that hash is published.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | None = None,
        *,
        service: str | None = None,
        retry: bool = False,
        find: Callable[[str], str | bytes] | None = None,
        trust_uid: int | Collection[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if model is None and service is None and find is None:
            raise InvalidArgument("give a model, or find= to look one up by its name, or the service= that has them")
        self._shared: Service | None = None if service is None else connect(service, trust_uid=trust_uid)
        self._find = find or (lambda name: name)
        self._options = {
            "polling_window": _WINDOW, "on_death": "restart", "retry": int(retry), **(options or {})
        }  # fmt: skip
        self._retry = retry
        self._alone = None if model is None else self._open(model)

    def _open(self, model: str | os.PathLike[str] | bytes) -> Session:
        return Session(_fetched(model), service=self._shared, **self._options)

    def open_model(self, name: str) -> Session:
        """Return a session of a model by its name."""
        return self._open(self._find(name))

    @property
    def session(self) -> Session:
        """The session of the model that was given; `InvalidArgument` if none was: requests name theirs."""
        if self._alone is None:
            raise InvalidArgument("this replica serves models by name; name one with the request")
        return self._alone

    def run(self, inputs: Inputs) -> list[Array]:
        """Run the model once; raises as `Session.run`."""
        return self.session.run(None, inputs)

    async def arun(self, inputs: Inputs) -> list[Array]:
        """As `run`, awaited."""
        return await self.session.arun(None, inputs)

    def run_many(self, inputs: Sequence[Inputs], batch: int = 1) -> list[list[Array]]:
        """Run the model for each of several inputs, in order, `batch` rows at once; raises as `Session.run_many`."""
        return list(self.session.run_many(inputs, batch=batch))

    def run_together(self, inputs: Sequence[Inputs], batch: int) -> list[list[Array] | NNBurstError]:
        """As `run_many`, for inputs of different callers: one that cannot be run gets its error, the others outputs.

        After a failure each runs by itself, but not when the time is over, nor after a death unless `retry` allows it.
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
        """Open services that have died again, now rather than with the next request.

        Raises:
            NNBurstError: One cannot be opened; Ray then replaces the replica.
        """
        if self._alone is not None:
            self._alone.reopen()
        if self._shared is not None:
            Deadline.after(_OPENING).call(self._shared._revive)

    def status(self) -> dict[str, Any]:
        """Return how the replica stands: ``restarts`` of its model's service; None without a `model`."""
        return {"restarts": None if self._alone is None else len(self._alone.restarts)}

    def close(self) -> None:
        """End the sessions and what belongs to them."""
        for held in (self._alone, self._shared):
            if held is not None:
                held.close()


class _Published:
    """Holds a model for all nodes; its place is the node of who published it, its name the hash of the model."""

    def __init__(self, model: bytes) -> None:
        self._held = [ray.put(np.frombuffer(model, np.uint8))]  # owned here, so that it outlives the publisher

    def held(self) -> list[Any]:
        return self._held


def publish(model: str | os.PathLike[str] | bytes) -> str:
    """Put a model into the cluster's object store under its content hash; return ``sha256:…``, a `Replica`'s model.

    Ray brings it once to each node that opens it, and replicas there share the copy; each checks the hash. A model that
    is published already is left as it is. It stays until
    ``ray.kill(ray.get_actor(name, "nnburst"))``, or until the node of the first publisher is gone.

    Args:
        model: The path of a model file here, whole: with no weights in other files; or its bytes.
    """
    content = model if isinstance(model, bytes) else Path(model).read_bytes()
    name = _PUBLISHED + hashlib.sha256(content).hexdigest()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"name": name, "namespace": "nnburst", "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
    holder = ray.remote(_Published).options(**options, scheduling_strategy=here).remote(content)
    ray.get(holder.held.remote())
    return name


def _fetched(model: T) -> T | bytes:
    if not isinstance(model, str) or not model.startswith(_PUBLISHED):
        return model
    try:
        content = ray.get(ray.get(ray.get_actor(model, "nnburst").held.remote())[0]).tobytes()
    except (ValueError, ray.exceptions.RayError) as error:
        raise InvalidArgument(f"no model {model} is in this cluster; publish it (again): {error}") from error
    if _PUBLISHED + hashlib.sha256(content).hexdigest() != model:
        raise InvalidArgument(f"what was published as {model} has another content; end its actor, and publish it again")
    return bytes(content)


def actor(
    model: str | os.PathLike[str] | bytes, *, actor_options: Mapping[str, Any] | None = None, **session: Any
) -> Any:
    """Start an actor that holds a session; its methods are those of `Replica`.

    Args:
        model: As for `Replica`.
        actor_options: Of Ray's `.options()`: ``num_cpus``, ``name``, ``max_concurrency``, and so on.
        session: The other arguments of `Replica`.
    """
    return ray.remote(Replica).options(**(actor_options or {})).remote(model, **session)


def deployment(
    model: str | os.PathLike[str] | bytes | None = None,
    *,
    serve_options: Mapping[str, Any] | None = None,
    batch: int = 1,
    batch_wait: float = 0.005,
    most_models: int = _MOST_MODELS,
    **session: Any,
) -> Any:
    """Return an application for `ray.serve.run`, whose replicas hold a session each.

    ``handle.remote(inputs)`` gives a list of arrays. Without a model the request names one:
    ``handle.options(multiplexed_model_id="detector").remote(inputs)``; a replica keeps the last `most_models` open and
    Serve sends requests to where their model is. ``handle.status.remote()`` gives the `Replica.status` of one replica.

    Args:
        model: As for `Replica`.
        serve_options: Of Serve's `deployment()`: ``num_replicas``, ``max_ongoing_requests``, ``ray_actor_options``, ….
        batch: Requests that a replica puts together and runs at once, for models whose inputs all have a symbolic first
            dimension; 1 for each by itself.
        batch_wait: Seconds for which the first request of a batch waits for others.
        most_models: How many models a replica keeps open.
        session: The other arguments of `Replica`.

    Raises:
        InvalidArgument: `batch` is given for models that requests name.
    """
    if batch > 1 and model is None:
        raise InvalidArgument("batch= needs a model=; requests that name their models are not put together")

    class Model:
        def __init__(self) -> None:
            self._replica = Replica(model, **session)

        async def __call__(self, inputs: Inputs) -> list[Array]:
            name = serve.get_multiplexed_model_id()
            if batch > 1:
                if name:
                    raise InvalidArgument(
                        f"the request names the model {name!r}; a deployment with batch= has only one"
                    )
                answer: list[Array] | NNBurstError = await self._together(inputs)
                if isinstance(answer, NNBurstError):
                    raise answer
                return answer
            if not name:
                return await self._replica.arun(inputs)
            opened = await self.open_model(name)
            outputs: list[Array] = await opened.arun(None, inputs)
            return outputs

        @serve.batch(max_batch_size=batch, batch_wait_timeout_s=batch_wait)  # type: ignore[untyped-decorator]
        async def _together(self, several: list[Inputs]) -> list[list[Array] | NNBurstError]:
            run = self._replica.run_together
            return await asyncio.get_running_loop().run_in_executor(None, run, several, batch)

        @serve.multiplexed(max_num_models_per_replica=most_models)  # type: ignore[untyped-decorator]
        async def open_model(self, name: str) -> Session:
            return await asyncio.get_running_loop().run_in_executor(None, self._replica.open_model, name)

        async def status(self) -> dict[str, Any]:
            return self._replica.status()

        async def check_health(self) -> None:  # which may start a service
            await asyncio.get_running_loop().run_in_executor(None, self._replica.check_health)

        def __del__(self) -> None:
            if (replica := getattr(self, "_replica", None)) is not None:
                replica.close()

    options = {"health_check_period_s": 1.0, **(serve_options or {})}
    return serve.deployment(Model).options(**options).bind()
