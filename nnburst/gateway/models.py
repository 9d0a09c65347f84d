"""The named models of a shared service. The first request for a model, or the first after a crash, opens the model."""

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
from ..service.client.connection import ServiceConnection, connect_to, send_order
from ..service.process.launch import is_of_functions
from ..service.wire.protocol import LoadModel
from .tensors import ModelTensor

T = TypeVar("T")

_ONLY = "1"
"""The version of a model without versions."""


class NoSuchModel(InvalidArgument):
    """Error: no such model or version has existed since the gateway started."""


@dataclass
class ModelCounts:
    """Counts and times of requests for one version of a model. Only the event loop's thread may use this object.

    Attributes:
        failures: Number of failures by reason. The reasons have Triton's names.
        input_ns, run_ns, output_ns: Total time for reading inputs, for waits and runs, and for writing outputs.
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

    def add_times(self, began: int, read: int, ran: int, ended: int) -> None:
        """Add a request's times: reading inputs until `read`, the run until `ran`, writing outputs until `ended`."""
        self.input_ns += read - began
        self.run_ns += ran - read
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
    """An open model. Its session ends once neither `Models` nor a request refers to it.

    Attributes:
        digest: SHA-256 of the model's files; empty for a model without files.
        platform: The protocol's name for the software that runs the model.
        is_repeatable: True if a run may be repeated after a crash; False for functions.
        inputs, outputs: The tensors by name, in order.
        optional: Inputs that clients can omit. Descriptions lack these inputs, because the protocol has no optional
            inputs.
        refused: The reason why the protocol cannot serve the model; empty if it can. A refused model has no tensors and
            a closed session.
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
            self.inputs = ModelTensor.by_name(session.get_inputs())
            for node in session.get_overridable_initializers():
                with contextlib.suppress(InvalidArgument):  # the input keeps its default
                    self.optional |= ModelTensor.by_name([node])
            self.outputs = ModelTensor.by_name(session.get_outputs())
        except InvalidArgument as error:
            self.refused = str(error)
            session.close()

    async def run(self, inputs: dict[str, Array], timeout: float | None = None) -> list[Array]:
        """Run the model once. Arguments and errors as for `Session.arun`."""
        try:
            return await self.session.arun(None, inputs, timeout)
        except BadState as error:
            raise DeadObject(str(error)) from error


class Models:
    """The named models of a service, for the event loop's thread only. Other threads make the calls that block.

    Args:
        address: The service's address, as for `nnburst.connect`.
        may_change: True if clients may load and unload models.
        unloaded: Names of models that a client has unloaded before this object was created.
    """

    def __init__(self, address: str, *, may_change: bool = False, unloaded: Iterable[str] = ()) -> None:
        self.may_change = may_change
        self._address = address
        self._service: Service | None = None
        self._versions: dict[str, dict[str, tuple[str, str]]] = {}
        """By model, then by version (newest last): the model's name in the service, and the digest of its files."""
        self._gone = {(name, "") for name in unloaded}
        """Models and versions that are no longer served; the empty version means all."""
        self._counts: dict[tuple[str, str], ModelCounts] = {}
        self._opened: dict[tuple[str, str, Priority], OpenedModel] = {}
        self._under_way: dict[object, asyncio.Future[Any]] = {}
        """Tasks that requests share, by key: a key of `_opened` opens a model, None connects, "renew" calls `renew`."""
        self._looking, self._changing = asyncio.Lock(), asyncio.Lock()

    def _share_task(self, key: object, make: Callable[[], Awaitable[Any]]) -> asyncio.Future[Any]:
        """Run `make` once for all requests that wait for the result. A cancelled request does not stop the task."""
        if key not in self._under_way:

            def end(task: asyncio.Future[Any]) -> None:
                del self._under_way[key]
                _ = task.cancelled() or task.exception()  # without a waiting request, the exception is retrieved here

            self._under_way[key] = asyncio.ensure_future(make())
            self._under_way[key].add_done_callback(end)
        return asyncio.shield(self._under_way[key])

    async def open(self, name: str, version: str = "", priority: Priority = Priority.MEDIUM) -> OpenedModel:
        """Return a model for runs of a priority. Open the model if necessary.

        Raises:
            NoSuchModel: No model has the name, or the model has no such version.
            DeviceUnavailable: The model was unloaded, or the service does not run.
            InvalidArgument: The protocol lacks a type of the model's inputs or outputs.
        """
        model = await self._open(name, version, priority)
        if model.refused:
            raise InvalidArgument(f"model {name!r} is not served: {model.refused}")
        return model

    async def _open(self, name: str, version: str, priority: Priority = Priority.MEDIUM) -> OpenedModel:
        service = await self._connected()
        while True:  # the model can be replaced meanwhile
            key = name, self._choose(name, version), priority
            if (model := self._opened.get(key)) is not None:
                return model
            await self._share_task(key, partial(self._open_session, service, key, self._versions[name][key[1]]))

    async def _open_session(self, service: Service, key: tuple[str, str, Priority], source: tuple[str, str]) -> None:
        (name, version, priority), (full, digest) = key, source
        counts = self._counts.setdefault((name, version), ModelCounts())

        def make() -> OpenedModel:  # ``sustained_speed`` allows batches of several requests
            session = service.session(full, priority=priority, preference="sustained_speed", on_death="restart")
            return OpenedModel(version, digest, session, counts)

        try:
            model = await asyncio.to_thread(make)
        except InvalidArgument:
            await self._list_models()
            self._choose(name, version)  # this raises if the model was unloaded meanwhile
            raise
        except BadState as error:
            raise DeviceUnavailable("the gateway is being stopped; send this request again later") from error
        if self._versions.get(name, {}).get(version) == source:
            self._opened[key] = model

    async def _connected(self) -> Service:
        """Return the connection to the service. The first call connects, and lists the models."""
        if self._service is None:
            await self._share_task(None, self._connect)
        assert self._service is not None
        return self._service

    async def _connect(self) -> None:
        await self._list_models()
        self._service = await asyncio.to_thread(connect, self._address)

    async def _ask(self, question: Callable[[ServiceConnection], T]) -> T:

        def ask() -> T:
            with contextlib.closing(connect_to(self._address)) as connection:
                return question(connection)

        return await asyncio.to_thread(ask)

    async def _list_models(self) -> None:
        found = dict[str, dict[str, tuple[str, str]]]()
        async with self._looking:
            for full, digest in (await self._ask(ServiceConnection.list_models)).items():
                name, _, version = full.partition(":")
                found.setdefault(name, {})[version or _ONLY] = full, digest
            before = set(self._all_versions())
            self._versions = {name: dict(sorted(found[name].items(), key=_version_number)) for name in sorted(found)}
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

    def _all_versions(self) -> list[tuple[str, str]]:
        return [(name, version) for name, versions in self._versions.items() for version in versions]

    async def is_ready(self) -> bool:
        """Open all models. Return True if each model opens, or is one that the protocol cannot serve."""
        try:
            service = await self._connected()
            for name, version in self._all_versions():
                model = await self._open(name, version)
                if not (service.alive or model.refused):
                    await asyncio.to_thread(model.session.reopen)
        except NNBurstError:
            return False
        return True

    async def load(self, name: str, parameters: Collection[str]) -> dict[str, Any]:
        """Reload all versions of a model (see `change`). Raises `InvalidArgument` if there are parameters."""
        if parameters:
            raise InvalidArgument(f"a model is loaded as it is, not with {sorted(parameters)}")
        return await self.change(name, unload=False)

    async def change(self, name: str, *, unload: bool) -> dict[str, Any]:
        """Make the service reload all versions of a model from its files or, with `unload`, unload all versions.

        Raises:
            InvalidArgument: `may_change` is False, or the model has no files.
            NNBurstError: A file cannot be compiled.
        """
        if not self.may_change:
            raise InvalidArgument("clients load and unload no models here: nnburst serve --oip-control lets them")
        async with self._changing:  # loading can take long; other calls wait here without a thread
            await asyncio.to_thread(send_order, self._address, LoadModel(name, unload))
            await self.renew()
        return {}

    # The methods below return descriptions and counts of models, with the keys of the protocol's messages.

    async def describe(self, name: str, version: str = "") -> dict[str, Any]:
        """Return a model's inputs and outputs. Raises the same errors as `open`."""
        model = await self.open(name, version)

        def tensors(named: Mapping[str, ModelTensor]) -> list[dict[str, Any]]:
            return [{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in named.values()]

        about = {"name": name, "versions": list(self._versions[name]), "platform": model.platform}
        return {**about, "inputs": tensors(model.inputs), "outputs": tensors(model.outputs)}

    async def configure(self, name: str, version: str = "") -> dict[str, Any]:
        """Return a model's description as Triton's ModelConfig. Raises the same errors as `open`.

        `max_batch_size` is 0, so the shapes include the batch dimension.
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
        """List every version of every model, including removed versions."""
        await self.is_ready()  # this opens new models: the protocol may be unable to serve them
        await self._connected()
        refused = {key[:2]: model.refused for key, model in self._opened.items()}
        found = [(*one, refused.get(one, "")) for one in self._all_versions()]
        found += [(*one, "unloaded") for one in sorted(self._gone)]
        return [
            {"name": name, "version": version, "state": "UNAVAILABLE" if reason else "READY", "reason": reason}
            for name, version, reason in found
            if not (reason and only_ready)
        ]

    async def counts(self, name: str = "", version: str = "") -> list[tuple[str, str, ModelCounts]]:
        """Return names, versions and counts. Without `version`, return all versions; without `name`, all models.

        Raises:
            NoSuchModel: No model has the name, or the model has no such version.
        """
        await self._connected()
        if name:
            self._choose(name, version)
        return [
            (*key, self._counts.setdefault(key, ModelCounts()))
            for key in self._all_versions()
            if name in ("", key[0]) and version in ("", key[1])
        ]

    async def statistics(self, name: str = "", version: str = "") -> dict[str, list[dict[str, Any]]]:
        """Return statistics of requests. Arguments and errors as for `counts`."""
        return {"model_stats": [counts.as_statistics(*key) for *key, counts in await self.counts(name, version)]}

    async def renew(self) -> None:
        """List the models again. Requests in progress finish on the old models; the next request opens the new ones."""
        with contextlib.suppress(NNBurstError):  # the service does not run
            await self._list_models()
        for key, model in list(self._opened.items()):
            name, version, _ = key
            if self._versions.get(name, {}).get(version, ("", None))[1] != model.digest:
                del self._opened[key]

    def renew_soon(self) -> None:
        """Call `renew` in the background: a restarted service may have loaded other files."""
        self._share_task("renew", self.renew)

    async def close(self) -> None:
        """Close all sessions. Running requests fail with `DeadObject`."""
        if self._service is not None:
            await asyncio.to_thread(self._service.close)


def _version_number(version: tuple[str, object]) -> int:
    return int(version[0]) if version[0].isdecimal() else 0
