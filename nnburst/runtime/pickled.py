"""Pickles of sessions and services. A pickle contains a shared service's address, a model and options, but no code.

A process opens each session or service once, even if the process reads several pickles of it.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from msgspec.structs import asdict, replace

from .._core.leaving import process_lock
from ..errors import NNBurstError
from ..model.types import Model
from .compile.model_files import copy_to_memory, is_name
from .service import Service

if TYPE_CHECKING:
    from ..memory.memory import Memory
    from .session import Session

T = TypeVar("T", "Service", "Session")
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

_known: deque[tuple[int, Reduced, Callable[[], Any]]] = deque(maxlen=64)
"""(process id, pickle, reference) of each session and service that this process has pickled or unpickled."""
_opening = process_lock()  # it is locked while a session or service is opened


class Unopened:
    """A session or service that could not be opened when its pickle was read. Each use raises the error.

    Reading the pickle raises no error: an error would end a worker of `multiprocessing.Pool`, and the pool's caller
    would wait for ever.
    """

    def __init__(self, error: NNBurstError, reduced: Reduced) -> None:
        self._error, self._reduced = error, reduced

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(name) if name.startswith("__") else self._error.with_traceback(None)

    def __enter__(self, *_: object) -> NoReturn:
        raise self._error.with_traceback(None)

    __exit__ = __enter__

    def __reduce__(self) -> Reduced:
        """Return the pickle that was read: another process may be able to open it, or this process at a later time."""
        return self._reduced


def reduce_service(service: Service) -> Reduced:
    """Return the function and arguments that reopen a connected service."""
    assert service.shared is not None
    return read, _remember(service, (connected, service.shared), service.opened_in)


def reduce_session(session: Session) -> Reduced:
    """Return the function and arguments that reopen a session of a connected service."""
    service, model, options = session.service, session._model, session._options
    changed = {name: value for name, value in asdict(options).items() if value != getattr(type(options)(), name)}
    for name in changed.keys() & {"preference", "priority"}:
        changed[name] = int(changed[name])
    if "cache_dir" in changed:
        changed["cache_dir"] = os.path.abspath(changed["cache_dir"])
    pools: tuple[bytes, ...] = ()
    if isinstance(model, Model):
        pools, model = tuple(bytes(cast("Memory", pool).buffer) for pool in model.pools), replace(model, pools=())
    elif isinstance(model, str) and not is_name(model):
        model = os.path.abspath(model)  # another process can have another directory
    arguments = service.shared, model, pools, tuple(sorted(changed.items()))
    return read, _remember(session, (open_session, arguments), service.opened_in)


def read(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Open the session or service that a pickle describes, by calling `make`. Return an `Unopened` if that fails."""
    try:
        return make(*arguments)
    except NNBurstError as error:
        return Unopened(error, (read, (make, arguments)))


def connected(*arguments: Any) -> Service:
    """Return this process's connection to a service. Connect if necessary."""
    from .open_service import connect

    address, open_timeout, trust_uid = arguments
    return _share((connected, arguments), lambda: connect(address, open_timeout=open_timeout, trust_uid=trust_uid))


def open_session(*arguments: Any) -> Session:
    """Return this process's session on a shared service. Open the session if necessary."""

    def make() -> Session:
        shared, model, pools, options = arguments
        if pools:
            model = replace(model, pools=tuple(map(copy_to_memory, pools)))
        return connected(*shared).session(model, **dict(options))

    return _share((open_session, arguments), make)


def _find(pid: int, reduced: Reduced) -> Any:
    """Return the open session or service of a pickle; None if this process has none."""
    things = (thing() for opened_in, others, thing in list(_known) if (opened_in, others) == (pid, reduced))
    return next(filter(_is_open, things), None)


def _is_open(thing: Service | Session | None) -> bool:
    if thing is None or isinstance(thing, Service):
        return thing is not None and thing.alive
    return not thing.closed and thing.service.alive


def _remember(thing: Service | Session, reduced: Reduced, pid: int) -> Reduced:
    if _find(pid, reduced) is None:
        _known.append((pid, reduced, weakref.ref(thing)))
    return reduced


def _share(reduced: Reduced, make: Callable[[], T]) -> T:
    with _opening:
        thing: T | None = _find(os.getpid(), reduced)
        if thing is None:
            thing = make()
            _known.append((os.getpid(), reduced, lambda: thing))
        return thing
