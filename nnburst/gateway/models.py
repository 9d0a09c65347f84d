"""The named models of a shared service. Each is opened at its first request, and again after the service's death."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    ResourceExhausted,
)
from ..model.types import Array, Priority
from ..runtime.open_service import connect
from ..runtime.service import Service
from ..runtime.session import Session
from ..service.client.connection import ServiceConnection, connect_to, order
from ..service.process.launch import is_of_functions
from ..service.wire.protocol import LoadModel
from .tensors import ModelTensor

T = TypeVar("T")

_ONLY = "1"
"""The version given for a model without versions."""


class NoSuchModel(InvalidArgument):
    """The model or version does not exist, and has not existed since this gateway started."""


@dataclass
class ModelCounts:
    """Counts and times (in nanoseconds) of requests for one version of a model. Only the event loop's thread uses it.

    Attributes:
        failures: Number of failures by reason; Triton defines the reasons.
        input_ns, run_ns, output_ns: Time of each part of answered requests; `run_ns` includes the wait for other
            requests.
    """

    inferences: int = 0
    pending: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    success_ns: int = 0
    failure_ns: int = 0
    input_ns: int = 0
    run_ns: int = 0
    output_ns: int = 0
    last_ms: int = 0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        began = time.monotonic_ns()
        self.pending += 1
        try:
            yield
        except (NNBurstError, asyncio.CancelledError) as error:
            self.failures[next(reason for kind, reason in REASONS if isinstance(error, kind))] += 1
            self.failure_ns += time.monotonic_ns() - began
            raise
        else:
            self.inferences += 1
            self.success_ns += time.monotonic_ns() - began
        finally:
            self.pending -= 1
            self.last_ms = time.time_ns() // 1_000_000

    def spent(self, began: int, given: int, ran: int, ended: int) -> None:
        """Add the times of an answered request's parts, computed from the times at their borders."""
        self.input_ns += given - began
        self.run_ns += ran - given
        self.output_ns += ended - ran

    def as_statistics(self, name: str, version: str) -> dict[str, Any]:
        """Return the counts as Triton's ModelStatistics."""
        parts = {
            "success": (self.inferences, self.success_ns),
            "fail": (self.failures.total(), self.failure_ns),
            "compute_input": (self.inferences, self.input_ns),
            "compute_infer": (self.inferences, self.run_ns),
            "compute_output": (self.inferences, self.output_ns),
        }
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_ms,
            "inference_count": self.inferences,
            "execution_count": self.inferences,
            "inference_stats": {part: {"count": count, "ns": ns} for part, (count, ns) in parts.items()},
        }


REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (asyncio.CancelledError, "CANCELED"),
    (MissedDeadline, "REJECTED"),
    (ResourceExhausted, "REJECTED"),
    (InvalidArgument, "OTHER"),
    (NNBurstError, "BACKEND"),
)


class OpenedModel:
    """A model that can be run. Its session ends once neither `Models` nor a request has a reference to it.

    Attributes:
        digest: SHA-256 of the model's files; empty for a model without files.
        platform: The protocol's name for the software that runs the model.
        is_repeatable: True if a run may be repeated after its process died. False for functions, which may have side
            effects.
        inputs, outputs: The tensors by name, in order.
        optional: Inputs that may be left out. Descriptions do not list them, as the protocol has no optional inputs.
        refused: The reason why the protocol cannot serve the model; the other fields are then empty, and the session
            is closed.
    """

    def __init__(self, version: str, digest: str, session: Session, counts: ModelCounts) -> None:
        self.version = version
        self.digest = digest
        self.session = session
        self.platform = f"nnburst_{session.device.name}"
        self.is_repeatable = not is_of_functions(session.device.name)
        self.inputs: dict[str, ModelTensor] = {}
        self.optional: dict[str, ModelTensor] = {}
        self.outputs: dict[str, ModelTensor] = {}
        self.refused = ""
        self.counts = counts
        try:
            self.inputs = ModelTensor.all_of(session.get_inputs())
            for node in session.get_overridable_initializers():
                with contextlib.suppress(InvalidArgument):  # such an input keeps its default
                    self.optional |= ModelTensor.all_of([node])
            self.outputs = ModelTensor.all_of(session.get_outputs())
        except InvalidArgument as error:
            self.refused = str(error)
            session.close()

    async def run(self, inputs: dict[str, Array], timeout: float | None = None) -> list[Array]:
        """Run the model once, with a time limit in seconds. Raises the same errors as `Session.arun`."""
        try:
            return await self.session.arun(None, inputs, timeout)
        except BadState as error:  # the session is closed because the gateway stops
            raise DeadObject(str(error)) from error


class Models:
    """The named models of a service, for the loop's thread. Calls that may wait for the service run in another thread.

    Args:
        address: The service's address, as for `nnburst.connect`.
        may_change: True if clients may load and unload models.
        unloaded: Names of models that were unloaded before.
    """

    def __init__(self, address: str, *, may_change: bool = False, unloaded: Iterable[str] = ()) -> None:
        self.may_change = may_change
        self._address = address
        self._service: Service | None = None
        self._versions: dict[str, dict[str, tuple[str, str]]] = {}
        """Each version's name in the service and digest of its files, by model name and version, the newest last."""
        self._gone = {(name, "") for name in unloaded}
        """Versions that are no longer served; the empty version stands for all."""
        self._counts: dict[tuple[str, str], ModelCounts] = {}
        self._opened: dict[tuple[str, str, Priority], OpenedModel] = {}
        self._under_way: dict[object, asyncio.Future[Any]] = {}
        """Tasks that open a model (by its key) or connect to the service (by None). All requests share them."""
        self._looking, self._changing = asyncio.Lock(), asyncio.Lock()

    def _once(self, key: object, make: Callable[[], Awaitable[Any]]) -> asyncio.Future[Any]:
        """Run `make` once for all requests that wait for its result. A cancelled request does not stop it."""
        if key not in self._under_way:

            def end(task: asyncio.Future[Any]) -> None:
                del self._under_way[key]
                _ = task.cancelled() or task.exception()  # retrieved here; waiting requests get it as well

            self._under_way[key] = asyncio.ensure_future(make())
            self._under_way[key].add_done_callback(end)
        return asyncio.shield(self._under_way[key])

    async def open(self, name: str, version: str = "", priority: Priority = Priority.MEDIUM) -> OpenedModel:
        """Return a model for runs of a priority. Opens it first if necessary, which waits for the service.

        Raises:
            NoSuchModel: No model has the name, or the model has no such version.
            DeviceUnavailable: The model was unloaded, or the service does not run.
            InvalidArgument: The model has types of inputs or outputs that the protocol lacks.
        """
        model = await self._open(name, version, priority)
        if model.refused:
            raise InvalidArgument(f"model {name!r} is not served: {model.refused}")
        return model

    async def _open(self, name: str, version: str, priority: Priority = Priority.MEDIUM) -> OpenedModel:
        service = await self._connected()
        while True:  # the model may be replaced while it is opened
            key = name, self._choose(name, version), priority
            if (model := self._opened.get(key)) is not None:
                return model
            await self._once(key, partial(self._open_session, service, key, self._versions[name][key[1]]))

    async def _open_session(self, service: Service, key: tuple[str, str, Priority], source: tuple[str, str]) -> None:
        (name, version, priority), (full, digest) = key, source
        counts = self._counts.setdefault((name, version), ModelCounts())

        def make() -> OpenedModel:  # throughput: a request waits for others if the operator batches the model
            session = service.session(full, priority=priority, preference="sustained_speed", on_death="restart")
            return OpenedModel(version, digest, session, counts)

        try:
            model = await asyncio.to_thread(make)
        except InvalidArgument:
            await self._list_models()
            self._choose(name, version)  # raises if the model was unloaded during the opening
            raise
        except BadState as error:
            raise DeviceUnavailable("the gateway is being stopped; send this request again later") from error
        if self._versions.get(name, {}).get(version) == source:
            self._opened[key] = model

    async def _connected(self) -> Service:
        """Return the connection to the service. List the models first if they are not known."""
        if self._service is None:
            await self._once(None, self._connect)
        assert self._service is not None
        return self._service

    async def _connect(self) -> None:
        await self._list_models()
        self._service = await asyncio.to_thread(connect, self._address)

    async def _ask(self, question: Callable[[ServiceConnection], T]) -> T:
        """Call a function with a connection to the service. Sessions have their own connections."""

        def ask() -> T:
            with contextlib.closing(connect_to(self._address)) as connection:
                return question(connection)

        return await asyncio.to_thread(ask)

    async def _list_models(self) -> None:
        """Update the list of the service's models."""
        found = dict[str, dict[str, tuple[str, str]]]()
        async with self._looking:
            for full, digest in (await self._ask(ServiceConnection.list_models)).items():
                name, _, version = full.partition(":")
                found.setdefault(name, {})[version or _ONLY] = full, digest
            before = set(self._there())
            self._versions = {name: dict(sorted(found[name].items(), key=_age)) for name in sorted(found)}
            there = {(name, version) for name, versions in found.items() for version in ("", *versions)}
            self._gone = (self._gone | before) - there

    def _choose(self, name: str, version: str) -> str:
        versions = self._versions.get(name, {})
        if not versions or version not in ("", *versions):
            gone = {number for one, number in self._gone if one == name}
            if gone and (not version or gone & {"", version}):
                raise DeviceUnavailable(f"model {name!r} was unloaded; ask again when it is loaded")
            if versions:
                raise NoSuchModel(f"model {name!r} has the versions {list(versions)}, not {version!r}")
            raise NoSuchModel(f"no model {name!r}; this service has {list(self._versions)}")
        return version or list(versions)[-1]

    def _there(self) -> list[tuple[str, str]]:
        return [(name, version) for name, versions in self._versions.items() for version in versions]

    async def is_ready(self) -> bool:
        """Return True if every model can be run now, except those that the protocol cannot serve."""
        try:
            service = await self._connected()
            for name, version in self._there():
                model = await self._open(name, version)
                if not (service.alive or model.refused):
                    await asyncio.to_thread(model.session.reopen)
        except NNBurstError:
            return False
        return True

    async def load(self, name: str, parameters: Collection[str]) -> dict[str, Any]:
        """Reload all versions of a model from its files. Refuses parameters; otherwise like `change`."""
        if parameters:
            raise InvalidArgument(f"a model is loaded as it is, not with {sorted(parameters)}")
        return await self.change(name, unload=False)

    async def change(self, name: str, *, unload: bool) -> dict[str, Any]:
        """Have the service reload all versions of a model from its files, or unload them.

        Raises:
            InvalidArgument: Clients may not change models, or the model has no files.
            NNBurstError: A file cannot be compiled.
        """
        if not self.may_change:
            raise InvalidArgument("clients load and unload no models here: nnburst serve --oip-control lets them")
        async with self._changing:  # loading may take long; other calls wait here without a thread
            await asyncio.to_thread(order, self._address, LoadModel(name, unload))
            await self.renew()
        return {}

    # Descriptions and counts of models. The keys are those of the protocol's messages and of JSON.

    async def describe(self, name: str, version: str = "") -> dict[str, Any]:
        """Return a model's inputs and outputs; raises the same errors as `open`."""
        model = await self.open(name, version)

        def tensors(named: Mapping[str, ModelTensor]) -> list[dict[str, Any]]:
            return [{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in named.values()]

        about = {"name": name, "versions": list(self._versions[name]), "platform": model.platform}
        return {**about, "inputs": tensors(model.inputs), "outputs": tensors(model.outputs)}

    async def configure(self, name: str, version: str = "") -> dict[str, Any]:
        """Return a model's description as Triton's ModelConfig; raises the same errors as `open`.

        `max_batch_size` is 0: the batch dimension is a dimension like others.
        """
        model = await self.open(name, version)

        def tensors(named: Mapping[str, ModelTensor]) -> list[dict[str, Any]]:
            return [
                {"name": name, "data_type": f"TYPE_{one.datatype.replace('BYTES', 'STRING')}", "dims": one.shape}
                for name, one in named.items()
            ]

        config = {"name": name, "platform": model.platform, "backend": "nnburst", "max_batch_size": 0}
        config |= {"input": tensors(model.inputs), "output": tensors(model.outputs)}
        return config | ({"parameters": {"sha256": {"string_value": model.digest}}} if model.digest else {})

    async def index(self, *, only_ready: bool = False) -> list[dict[str, str]]:
        """List every version of every model, including removed ones."""
        await self.is_ready()  # opens new models, which shows whether they can be served
        await self._connected()
        refused = {key[:2]: model.refused for key, model in self._opened.items()}
        found = [(*one, refused.get(one, "")) for one in self._there()]
        found += [(*one, "unloaded") for one in sorted(self._gone)]
        return [
            {"name": name, "version": version, "state": "UNAVAILABLE" if reason else "READY", "reason": reason}
            for name, version, reason in found
            if not (reason and only_ready)
        ]

    async def counts(self, name: str = "", version: str = "") -> list[tuple[str, str, ModelCounts]]:
        """Return name, version and counts of a version of a model; of all versions, or of all models, if not given.

        Raises:
            NoSuchModel: No model has the name, or the model has no such version.
        """
        await self._connected()
        if name:
            self._choose(name, version)
        return [
            (*key, self._counts.setdefault(key, ModelCounts()))
            for key in self._there()
            if name in ("", key[0]) and version in ("", key[1])
        ]

    async def statistics(self, name: str = "", version: str = "") -> dict[str, list[dict[str, Any]]]:
        """Return statistics of requests for a model, or for all models if the name is empty.

        Raises the same errors as `counts`.
        """
        return {"model_stats": [counts.as_statistics(*key) for *key, counts in await self.counts(name, version)]}

    async def renew(self) -> None:
        """List the models again. New ones are opened at the next request; running requests finish on the old ones."""
        with contextlib.suppress(NNBurstError):  # the service does not run
            await self._list_models()
        for key, model in list(self._opened.items()):
            name, version, _ = key
            if self._versions.get(name, {}).get(version, ("", None))[1] != model.digest:
                del self._opened[key]

    def renew_soon(self) -> None:
        """Call `renew` in the background, as a restarted process may have loaded other files."""
        self._once("renew", self.renew)

    async def close(self) -> None:
        """Close all sessions. Running requests fail with `DeadObject`."""
        if self._service is not None:
            await asyncio.to_thread(self._service.close)


def _age(version: tuple[str, object]) -> int:
    return int(version[0]) if version[0].isdecimal() else 0
