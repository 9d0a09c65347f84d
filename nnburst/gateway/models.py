"""The named models of a shared service, opened when they are first asked for and again after the service died."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
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
from ..model import Array, Priority
from ..runtime import Service, Session
from ..service import ServiceConnection, connect_to
from ..service.process.launch import is_of_functions
from .tensors import ModelTensor

_T = TypeVar("_T")
_ONLY = "1"
"""The version of a model that has none of its own."""


class NoSuchModel(InvalidArgument):
    """No model, or version of one, has that name; nor had one while this gateway ran."""


@dataclass
class ModelCounts:
    """What happened to the requests for one version of a model; nanoseconds. The loop's thread counts.

    Attributes:
        failures: By reason, in Triton's words.
        input_ns, run_ns, output_ns: Of the parts of those that were answered: `run_ns` has the wait for others in it.
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
        """Note the moments between the parts of a request that is answered."""
        self.input_ns += given - began
        self.run_ns += ran - given
        self.output_ns += ended - ran


REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (asyncio.CancelledError, "CANCELED"),
    (MissedDeadline, "REJECTED"),
    (ResourceExhausted, "REJECTED"),
    (InvalidArgument, "OTHER"),
    (NNBurstError, "BACKEND"),
)


class OpenedModel:
    """A model that can be run. Closed once `Models` has let go of it and no request uses it.

    Attributes:
        digest: Of its files; empty if it has none.
        platform: What runs it, in the protocol's words.
        is_repeatable: Whether a run that the death of its process has ended may be run again: a function may have done
            more than to answer.
        has_died: Whether a run has found its process dead.
        inputs, outputs: By name, in order.
        optional: Inputs that may be left out, which descriptions do not name: the protocol knows none.
        refused: Why the protocol cannot serve it; then it has none of these, and its session is closed.
    """

    def __init__(self, version: str, digest: str, session: Session, counts: ModelCounts) -> None:
        self.version = version
        self.digest = digest
        self.session = session
        self.platform = f"nnburst_{session.device.name}"
        self.is_repeatable = not is_of_functions(session.device.name)
        self.has_died = False
        self.inputs: dict[str, ModelTensor] = {}
        self.optional: dict[str, ModelTensor] = {}
        self.outputs: dict[str, ModelTensor] = {}
        self.refused = ""
        self.counts = counts
        self._lock = threading.Lock()
        self._users = 1  # `Models` itself
        try:
            self.inputs = ModelTensor.all_of(session.get_inputs())
            for node in session.get_overridable_initializers():
                with contextlib.suppress(InvalidArgument):  # then its default is what it is
                    self.optional |= ModelTensor.all_of([node])
            self.outputs = ModelTensor.all_of(session.get_outputs())
        except InvalidArgument as error:
            self.refused = str(error)
            self.close()

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
        """Run it once, within so many seconds; raises as `Session.arun`."""
        try:
            return await (self.session.arun(None, inputs) if timeout is None else self._within(timeout, inputs))
        except (DeadObject, BadState) as error:  # or it was closed, since another run has found that
            self.has_died = True
            raise DeadObject(str(error)) from error

    async def _within(self, timeout: float, inputs: dict[str, Array]) -> list[Array]:
        try:
            return await asyncio.wait_for(self.session.arun(None, inputs), timeout)
        except TimeoutError as error:
            if isinstance(error, MissedDeadline):
                raise
            raise MissedDeadline(f"no answer within the {timeout:g} s that the client gave it") from None


class Models:
    """Named models of a service. Any thread.

    Args:
        address: Of the service, as `nnburst.connect` takes it.
        may_change: Whether clients may load and unload them.
        unloaded: Names of those that were unloaded before.
    """

    def __init__(
        self,
        address: str,
        *,
        may_change: bool = False,
        unloaded: Iterable[str] = (),
    ) -> None:
        self.may_change = may_change
        self._address = address
        self._lock = threading.Lock()
        """Of what is below. None waits for the service while it has it."""
        self._under_way: dict[object, Future[Any]] = {}
        """What is being opened: a model, by its key, or by none the service."""
        self._is_stopping = False
        self._connection: ServiceConnection | None = None
        self._service: Service | None = None
        self._looks, self._last_look = itertools.count(1), 0
        self._versions: dict[str, dict[str, tuple[str, str]]] = {}
        """By name, by version, the newest last: its name in the service, and the digest of its files."""
        self._gone = {(name, "") for name in unloaded}
        """Versions that were served and are no more; no version: all that there were."""
        self._counts: dict[tuple[str, str], ModelCounts] = {}
        self._opened: dict[tuple[str, str, Priority], OpenedModel] = {}
        self.changing = asyncio.Lock()
        """Held while models are loaded or unloaded, which may take long: others wait for that without a thread."""
        self._awaited: dict[object, asyncio.Future[Any]] = {}
        """What requests wait for, all for one thread, of which there are not many. The loop's thread has it."""

    def open(self, name: str, version: str = "", priority: Priority = Priority.MEDIUM) -> OpenedModel:
        """Return a model for runs of a priority, and wait for the service if it has to be opened first.

        Raises:
            NoSuchModel: There is none, or no such version.
            DeviceUnavailable: It was unloaded; or the service is not there.
            InvalidArgument: It takes or gives what the protocol has not.
        """
        model = self._open(name, version, priority)
        if model.refused:
            raise InvalidArgument(f"model {name!r} is not served: {model.refused}")
        return model

    def _open(self, name: str, version: str, priority: Priority = Priority.MEDIUM) -> OpenedModel:
        service = self._connected()
        with self._lock:
            key = name, self._choose(name, version), priority
            model = self._opened.get(key)
        if model is None:
            model = self._alone(key, lambda: self._open_session(service, key, version))
        return model or self._open(name, version, priority)

    def _alone(self, key: object, make: Callable[[], _T]) -> _T:
        """Make something, or wait for it if another thread is about to."""
        with self._lock:
            is_first = key not in self._under_way
            future = self._under_way.setdefault(key, Future())
        if is_first:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
            finally:
                del self._under_way[key]
        made: _T = future.result()
        return made

    def _open_session(self, service: Service, key: tuple[str, str, Priority], asked: str) -> OpenedModel | None:
        """Open a model; None if it, or the service, has become another one meanwhile."""
        name, version, priority = key
        with self._lock:
            source = self._versions.get(name, {}).get(version)
            if source is None or key in self._opened:
                return self._opened.get(key)
            counts = self._counts.setdefault((name, version), ModelCounts())
        try:  # a request comes with others, for which it waits if the operator batches the model
            session = service.session(source[0], priority=priority, preference="sustained_speed")
        except InvalidArgument:
            self._look()
            with self._lock:
                self._choose(name, asked)  # raises if it was unloaded meanwhile
            raise
        model = OpenedModel(version, source[1], session, counts)
        with self._lock:
            if self._service is service and self._versions.get(name, {}).get(version) == source:
                self._opened[key] = model
                return model
        model.close()
        return None

    def _connected(self) -> Service:
        """Connect to the service again if it has ended, and look what it has."""
        return self._usable() or self._alone(None, self._connect)

    def _usable(self) -> Service | None:
        with self._lock:
            service, died = self._service, any(model.has_died for model in self._opened.values())
        return None if service is None or died or not service.alive else service

    def _connect(self) -> Service:
        if (service := self._usable()) is not None:  # since then
            return service
        self._check_going_on()
        self._drop()
        self._connection = connect_to(self._address)
        service = Service(self._connection, self._address)
        with contextlib.ExitStack() as stack:
            stack.callback(service.close)
            self._look()
            with self._lock:
                self._check_going_on()
                self._service = service
            stack.pop_all()
        return service

    def _check_going_on(self) -> None:
        if self._is_stopping:
            raise DeviceUnavailable("the gateway is being stopped; send this request again later")

    def _look(self) -> None:
        """Look what the service has, unless a look that began later was quicker."""
        number, found = next(self._looks), dict[str, dict[str, tuple[str, str]]]()
        assert self._connection is not None
        for full, digest in self._connection.list_models().items():
            name, _, version = full.partition(":")
            found.setdefault(name, {})[version or _ONLY] = full, digest
        with self._lock:
            if number < self._last_look:
                return
            self._last_look = number
            before = {(name, version) for name, versions in self._versions.items() for version in versions}
            self._versions = {name: dict(sorted(found[name].items(), key=_age)) for name in sorted(found)}
            there = {(name, version) for name, versions in found.items() for version in ("", *versions)}
            self._gone = (self._gone | before) - there  # not in place: the loop's thread reads it

    def _choose(self, name: str, version: str) -> str:
        versions = self._versions.get(name, {})
        if not versions or version not in ("", *versions):
            gone = {number for one, number in self._gone if one == name}
            if gone and (not version or gone & {"", version}):
                raise DeviceUnavailable(f"model {name!r} was unloaded; ask again when it is loaded")
            if versions:
                raise NoSuchModel(f"model {name!r} has the versions {list(versions)}, not {version!r}")
            raise NoSuchModel(f"no model {name!r}; this service has {list(self._versions)}")
        if version:
            return version
        return list(versions)[-1]

    def is_ready(self) -> bool:
        """Whether every model that the protocol can serve can be run now."""
        try:
            self._connected()
            with self._lock:
                wanted = [(name, version) for name, versions in self._versions.items() for version in versions]
            return all(self._open(*one) is not None for one in wanted)
        except NNBurstError:
            return False

    def change(self, name: str, *, unload: bool) -> None:
        """Have the service load all versions of a model from its files again, or unload them.

        Raises:
            InvalidArgument: Clients may not do that, or there are no such files.
            NNBurstError: A file cannot be compiled.
        """
        if not self.may_change:
            raise InvalidArgument("clients load and unload no models here: nnburst serve --oip-control lets them")
        self._connected()
        assert self._connection is not None
        self._connection.load_model(name, unload=unload)
        self.renew()

    # What models are and did: as JSON has it, and as the fields of the protocol's messages.

    def describe(self, name: str, version: str = "") -> dict[str, Any]:
        """Say what a model takes and gives; raises as `open`."""
        model = self.open(name, version)

        def tensors(named: Mapping[str, ModelTensor]) -> list[dict[str, Any]]:
            return [{"name": name, "datatype": one.datatype, "shape": one.shape} for name, one in named.items()]

        arguments = {"inputs": tensors(model.inputs), "outputs": tensors(model.outputs)}
        return {"name": name, "versions": list(self._versions[name]), "platform": model.platform, **arguments}

    def configure(self, name: str, version: str = "") -> dict[str, Any]:
        """Say the same as Triton's ModelConfig; raises as `open`.

        The first dimension is one like the others: `max_batch_size` is 0.
        """
        model = self.open(name, version)

        def tensors(named: Mapping[str, ModelTensor]) -> list[dict[str, Any]]:
            return [
                {"name": name, "data_type": f"TYPE_{one.datatype.replace('BYTES', 'STRING')}", "dims": one.shape}
                for name, one in named.items()
            ]

        config = {"name": name, "platform": model.platform, "backend": "nnburst", "max_batch_size": 0}
        config |= {"input": tensors(model.inputs), "output": tensors(model.outputs)}
        return config | ({"parameters": {"sha256": {"string_value": model.digest}}} if model.digest else {})

    def index(self, *, only_ready: bool = False) -> list[dict[str, str]]:
        """Name every version of every model, also those that are there no more."""
        self.is_ready()  # opens those that are new: whether they are served is known from then on
        self._connected()
        with self._lock:
            refused = {key[:2]: model.refused for key, model in self._opened.items()}
            there = [(name, version) for name, versions in self._versions.items() for version in versions]
            found = [(*one, refused.get(one, "")) for one in there] + [(*one, "unloaded") for one in sorted(self._gone)]
        return [
            {"name": name, "version": version, "state": "UNAVAILABLE" if reason else "READY", "reason": reason}
            for name, version, reason in found
            if not (reason and only_ready)
        ]

    def counts(self, name: str = "", version: str = "") -> list[tuple[str, str, ModelCounts]]:
        """Return the name, the version and the counts of a model, of each version if none is named; or of all models.

        Raises:
            NoSuchModel: There is none of that name, or version.
        """
        self._connected()
        with self._lock:
            if name:
                self._choose(name, version)
            return [
                (each, number, self._counts.setdefault((each, number), ModelCounts()))
                for each, versions in self._versions.items()
                for number in versions
                if name in ("", each) and version in ("", number)
            ]

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Say what happened to the requests for a model, or for each if the name is empty; raises as `counts`."""
        return [
            {
                "name": each,
                "version": number,
                "last_inference": counts.last_ms,
                "inference_count": counts.inferences,
                "execution_count": counts.inferences,
                "inference_stats": {
                    "success": {"count": counts.inferences, "ns": counts.success_ns},
                    "fail": {"count": counts.failures.total(), "ns": counts.failure_ns},
                    "compute_input": {"count": counts.inferences, "ns": counts.input_ns},
                    "compute_infer": {"count": counts.inferences, "ns": counts.run_ns},
                    "compute_output": {"count": counts.inferences, "ns": counts.output_ns},
                },
            }
            for each, number, counts in self.counts(name, version)
        ]

    async def take(self, name: str, version: str = "", priority: Priority = Priority.MEDIUM) -> OpenedModel:
        """As `open`, without blocking the loop, for one request, which calls `give_back` at its end.

        Until then the model is not closed unless the service dies.
        """
        key = name, version, priority
        while (model := self.ready(*key)) is None:
            await self.once(key, partial(self.open, *key))
        return model

    async def once(self, key: object, work: Callable[[], _T]) -> _T:
        """Do something in another thread, for all who ask until it is done."""
        if key not in self._awaited:
            self._awaited[key] = asyncio.get_running_loop().run_in_executor(None, work)
            self._awaited[key].add_done_callback(lambda _: self._awaited.pop(key))
        done: _T = await asyncio.shield(self._awaited[key])
        return done

    async def require(self, name: str, version: str = "") -> None:
        """Wait until a model can be run; raises as `open`."""
        self.give_back(await self.take(name, version))

    def ready(self, name: str, version: str = "", priority: Priority = Priority.MEDIUM) -> OpenedModel | None:
        """As `take`; None if it has to be opened first."""
        if name not in self._versions:
            return None
        model = self._opened.get((name, self._choose(name, version), priority))
        is_usable = model is not None and not (model.refused or model.has_died) and model.session.service.alive
        return model if model is not None and is_usable and model.use() else None

    def give_back(self, model: OpenedModel) -> None:
        """A request that has taken the model has ended."""
        if model.let_go():
            asyncio.get_running_loop().run_in_executor(None, model.close)

    def renew(self) -> None:
        """Look what the service has now: what is new is opened when it is next asked for; what runs ends as it was."""
        if self._connection is not None:
            with contextlib.suppress(NNBurstError):  # it is gone, and its successor is looked at
                self._look()
        with contextlib.ExitStack() as stack, self._lock:
            for key, model in list(self._opened.items()):
                name, version, _ = key
                if self._versions.get(name, {}).get(version, ("", None))[1] != model.digest:
                    del self._opened[key]
                    if model.let_go():
                        stack.callback(model.close)

    def stop(self) -> None:
        """Connect no more: a service that is being stopped takes nobody. What is open is still run."""
        self._is_stopping = True

    def close(self) -> None:
        """Close all sessions. What is asked for from now on is refused."""
        self.stop()
        self._drop()

    def _drop(self) -> None:
        with contextlib.ExitStack() as stack, self._lock:
            if self._service is not None:
                stack.callback(self._service.close)
            for model in self._opened.values():
                stack.callback(model.close)
            self._service, self._opened = None, {}


def _age(version: tuple[str, object]) -> int:
    return int(version[0]) if version[0].isdecimal() else 0
