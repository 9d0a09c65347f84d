"""Runs a service that other programs connect to."""

from __future__ import annotations

import contextlib
import grp
import json
import logging
import os
import pwd
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import InvalidArgument, NNBurstError, error_for
from ..targets import whole_number

if TYPE_CHECKING:
    from ...devices import Device, NamedDevice
    from ...runtime import Service
    from ...service import Quotas

_LONGEST_IDLE_S = 1_000_000
_LEVELS = ("debug", "info", "warning", "error")


@contextlib.contextmanager
def _signals_of_the_start() -> Iterator[None]:
    """While the service starts, SIGTERM and SIGINT end it in order, and a SIGHUP waits until the service handles it.

    The start is left by `SystemExit`, so that what it has taken is given back. A second signal changes nothing.
    """
    hangup, ends = {signal.SIGHUP}, (signal.SIGTERM, signal.SIGINT)

    def leave(*_: object) -> None:
        for number in ends:
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, hangup)
    before = {number: signal.signal(number, leave) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.sigtimedwait(hangup, 0)  # one that came after the end
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


@click.command()
@click.argument("functions", nargs=-1, metavar="[FILE.py:FUNCTION]...")
@click.option("--name", default=None, help="Name that programs connect to [default: nnburst].")
@click.option("--socket", "path", default=None, metavar="PATH", help="Listen at this path instead of under a name.")
@click.option("--device", "devices", multiple=True, metavar="NAME", help="A device that is offered; may be repeated.")
@click.option("--model", "models", multiple=True, metavar="NAME=FILE", help="A model that is compiled once for all.")
@click.option("--allow-uid", "uids", multiple=True, metavar="USER", help="Serve this user, too (name or number).")
@click.option("--allow-gid", "gids", multiple=True, metavar="GROUP", help="Serve this group, too (name or number).")
@click.option(
    "--quota", "quotas", multiple=True, metavar="KEY=N", help="What a connection (KEY) or a user (user.KEY) may own."
)
@click.option(
    "--max-run",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=None,
    metavar="S",
    help="End a run that takes longer than S seconds [default: none].",
)
@click.option("--idle-exit", type=float, default=None, metavar="S", help="End after S seconds without a client.")
@click.option(
    "--metrics",
    type=click.IntRange(0, 65535),
    default=None,
    metavar="PORT",
    help="Answer Prometheus at this port of the loopback interface; needs nnburst[metrics].",
)
@click.option(
    "--oip",
    metavar="HOST:PORT",
    help="Serve the named models by the Open Inference Protocol over gRPC; needs nnburst[oip].",
)
@click.option("--oip-rest", metavar="HOST:PORT", help="The same over HTTP.")
@click.option("--oip-shared-memory", is_flag=True, help="Let clients of the protocol pass tensors in POSIX memory.")
@click.option(
    "--scheduler", default=None, metavar="POLICY:N", help="Real-time policy and priority, such as fifo:20 or rr:1."
)
@click.option("--affinity", default=None, metavar="CPUS", help="CPUs that it may use, such as 1 or 0,2-3.")
@click.option(
    "--sandbox",
    type=click.Choice(("strict", "on", "off")),
    default="on",
    show_default=True,
    help="Keep the service from all that models do not need: as far as this kernel can, fully or not at all, or not.",
)
@click.option("--log-level", type=click.Choice(_LEVELS), default="warning", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the line that says it is ready as JSON.")
@_signals_of_the_start()
def serve(
    functions: tuple[str, ...],
    name: str | None,
    path: str | None,
    devices: tuple[str, ...],
    models: tuple[str, ...],
    uids: tuple[str, ...],
    gids: tuple[str, ...],
    quotas: tuple[str, ...],
    max_run: float | None,
    idle_exit: float | None,
    metrics: int | None,
    oip: str | None,
    oip_rest: str | None,
    oip_shared_memory: bool,
    scheduler: str | None,
    affinity: str | None,
    sandbox: str,
    log_level: str,
    as_json: bool,
) -> None:
    """Run a service that programs of this machine share, until SIGTERM or Ctrl-C.

    \b
    nnburst serve --name vision --model detector=detector.onnx
    nnburst serve --name vision filters.py:edges
    python -c 'import nnburst; print(nnburst.connect("vision").session("detector").get_inputs())'

    FILE.py:FUNCTION is a Python function that is declared with @declare; it is served by its name, as a model.

    Prints one line when it is ready. SIGTERM lets running executions finish; SIGHUP compiles the files of the named
    models again and serves the new ones from then on. Also starts from a systemd socket unit (see contrib/systemd).
    """
    _settle_environment()
    from ..._core.errno import name_process
    from ...burst import ListenerGroup
    from ...devices import Needs
    from ...runtime import in_process
    from ...runtime.service import DEFAULT_DEVICES
    from ...service import AccessPolicy, Daemon, ServiceHost, activated_sockets, claim, close_door
    from ...service.process.limited_log import LimitedHandler
    from ...service.process.sandbox import log_sandbox
    from ...service.process.scheduling import Scheduling
    from ...watch import MOST_ROWS, Page
    from .gateway import gateway
    from .keeper import Beside, Keeper
    from .metrics import metrics as metrics_served

    name_process("the service")
    logging.basicConfig(
        format="nnburst serve %(process)d: %(levelname)s: %(message)s",
        level=log_level.upper(),
        handlers=[LimitedHandler()],
    )
    try:
        Scheduling.parse(scheduler, affinity).apply()  # before there are threads, which inherit it
        address = _address(name, path)
        policy = AccessPolicy(frozenset(map(_uid, uids)), frozenset(map(_gid, gids)))
        limits, user_limits = _quotas(quotas)
        files = _pairs(models, "--model")
        if idle_exit is not None and not 0 < idle_exit <= _LONGEST_IDLE_S:
            raise InvalidArgument(
                f"--idle-exit {idle_exit:g}: give the seconds as a number above 0, at most {_LONGEST_IDLE_S}"
            )
        with contextlib.ExitStack() as stack:
            listeners: list[socket.socket] = [stack.enter_context(sock) for sock in activated_sockets()]
            where = "passed by the service manager"
            claimed = None
            if not listeners:
                claimed = stack.enter_context(contextlib.closing(claim(address, wider=policy.wider)))
                listeners, where = [claimed.listener], str(claimed.path)
            local = stack.enter_context(in_process(devices=devices or DEFAULT_DEVICES))
            owned = [*local.devices, *_function_device(functions, local)]
            names = _names(files, owned)
            page = Page(address, rows=MOST_ROWS)
            own = f"unix:{listeners[0].getsockname()}"

            def beside(inner: contextlib.ExitStack) -> Beside:
                for listener in listeners:
                    listener.close()
                os.close(page.fd)  # else others would take that process for the service
                url = inner.enter_context(metrics_served(page, metrics, os.getppid()))
                running = inner.enter_context(
                    gateway(own, names, grpc=oip, rest=oip_rest, shared_memory=oip_shared_memory)
                )
                said: dict[str, Any] = {} if url is None else {"metrics": url}
                if running is None:
                    return Beside(said, lambda: None)
                return Beside({**said, "oip": running.ports}, running.renew)

            keeper = stack.enter_context(contextlib.closing(Keeper(beside, claimed)))
            _raise_descriptor_limit()
            box = close_door(sandbox, owned, more=Needs(read=_places(files)))
            log_sandbox(box)
            if claimed is not None:
                claimed.say(str(box))
            named = _load(local, files)
            group = ListenerGroup()
            host = ServiceHost(
                [*([named] if files else ()), *owned],
                quotas=limits,
                user_quotas=user_limits,
                page=page,
                listeners=group,
                max_run=max_run,
                sandbox=box,
            )

            def reload() -> None:
                _reload(local, named, files)
                keeper.renew()

            daemon = Daemon(
                host,
                listeners,
                policy=policy,
                idle_exit=idle_exit,
                reload=reload,
                finish=keeper.close,
            )
            ready = {
                "name": address,
                "socket": where,
                "pid": os.getpid(),
                "devices": [device.name for device in host.offer.devices],
                "models": names,
                "sandbox": str(box),
                **keeper.said,
            }

            def announce() -> None:
                click.echo(json.dumps(ready) if as_json else _ready_line(ready))
                keeper.tell_ready()

            reason = daemon.run(announce)
            logging.getLogger(__name__).info("ended: %s", reason)
    except NNBurstError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    if group.threads:  # one is inside a run that does not return, and the interpreter would wait for it
        logging.getLogger(__name__).warning("ended in the middle of a run that does not return")
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def _settle_environment() -> None:
    """Begin again with the environment of a service, since libraries read theirs when they are loaded."""
    from ...service import service_environment

    env = service_environment(os.environ)
    if env != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)


def _ready_line(ready: dict[str, Any]) -> str:
    line = f"nnburst serve: ready at {ready['socket']} (pid {ready['pid']}); devices: {', '.join(ready['devices'])}"
    line += f"; models: {', '.join(ready['models'])}" if ready["models"] else ""
    line += f"; {ready['metrics']}" if "metrics" in ready else ""
    return line + "".join(f"; {protocol} at port {port}" for protocol, port in ready.get("oip", {}).items())


# ---- options ---------------------------------------------------------------------------------------------------


def _address(name: str | None, path: str | None) -> str:
    if name is not None and path is not None:
        raise InvalidArgument("give --name or --socket, not both")
    if path is not None:
        return f"unix:{path}"
    return "nnburst" if name is None else name


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals or not value:
            raise InvalidArgument(f"{option} {text}: write it as {option} KEY=VALUE")
        if key in pairs:
            raise InvalidArgument(f"{option}: {key!r} is given twice")
        pairs[key] = value
    return pairs


def _quotas(texts: Sequence[str]) -> tuple[Quotas, Quotas]:
    """Return those of a connection and those of a user, whose keys begin with ``user.``."""
    from ...service import PER_USER, Quotas

    given = {key: value if (n := whole_number(value)) is None else n for key, value in _pairs(texts, "--quota").items()}
    users: dict[str, Any] = {key.removeprefix("user."): n for key, n in given.items() if key.startswith("user.")}
    own: dict[str, Any] = {key: n for key, n in given.items() if not key.startswith("user.")}
    return Quotas().changed(own, "--quota"), PER_USER.changed(users, "--quota user", of_user=True)


def _uid(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid if (uid := whole_number(user)) is None else uid
    except KeyError:
        raise InvalidArgument(f"--allow-uid {user}: this machine has no such user") from None


def _gid(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid if (gid := whole_number(group)) is None else gid
    except KeyError:
        raise InvalidArgument(f"--allow-gid {group}: this machine has no such group") from None


def _raise_descriptor_limit() -> None:
    """Each pool of a client takes a descriptor here."""
    import resource

    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if most == resource.RLIM_INFINITY else min(most, 65536)
    if limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


# ---- named models ----------------------------------------------------------------------------------------------


def _load(local: Service, files: dict[str, str]) -> NamedDevice:
    from ...devices import NamedDevice

    named = NamedDevice(local.devices)
    for name, file in files.items():
        _publish(local, named, name, file)
    return named


def _function_device(targets: Sequence[str], local: Service) -> list[Device]:
    """Return what runs the Python functions that are named, if any are."""
    from ...devices.function import FunctionDevice

    if not targets:
        return []
    device = FunctionDevice(targets)
    if device.name in (other.name for other in local.devices):
        raise InvalidArgument(f"--device {device.name} and {targets[0]}: give all functions as FILE.py:FUNCTION")
    return [device]


def _places(files: Mapping[str, str]) -> list[str]:
    """Where named models are read, also again: the directories of their files, but for a home, of which only these."""
    home = Path("~").expanduser().resolve()
    places = {Path(path) for file in files.values() for path in (os.path.abspath(file), os.path.realpath(file))}
    found = {path if home.is_relative_to(path.parent) else path.parent for path in places}
    return [str(path) for path in found if path.exists()]  # else loading says what is missing


def _names(files: dict[str, str], devices: Sequence[Device]) -> list[str]:
    """Return the names of all models that clients may open by name."""
    from ...devices.function import FunctionDevice

    functions = [name for device in devices if isinstance(device, FunctionDevice) for name in device.functions]
    if both := sorted(files.keys() & set(functions)):
        raise InvalidArgument(f"--model {both[0]}: a function has that name, too")
    return sorted([*files, *functions])


def _reload(local: Service, named: NamedDevice, files: dict[str, str]) -> None:
    """Compile every file again; a model whose file is bad now is served as it was."""
    log = logging.getLogger(__name__)
    for name, file in files.items():
        try:
            _publish(local, named, name, file)
            log.info("model %s: %s was loaded again", name, file)
        except NNBurstError as error:
            log.error("%s; it is served as before", error)


def _publish(local: Service, named: NamedDevice, name: str, file: str) -> None:
    from ...runtime.compile.model_files import imported

    try:
        with imported(local, None, file) as (device, found):
            named.publish(name, device, found)
    except NNBurstError as error:
        raise error_for(error.status, f"model {name} of {file}: {error}") from error
