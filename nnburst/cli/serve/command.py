"""The `nnburst serve` command: run a service that other programs connect to."""

from __future__ import annotations

import contextlib
import difflib
import grp
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import InvalidArgument
from ..targets import Seconds, parse_pairs, user_number, whole_number

if TYPE_CHECKING:
    from ..._options import LogLevel, SandboxMode
    from .repository import Batching

_MOST_FDS = 1 << 18


@contextlib.contextmanager
def _handle_startup_signals() -> Iterator[None]:
    """Let SIGTERM and SIGINT raise `SystemExit` during the start, and keep SIGHUP pending.

    `SystemExit` releases all resources. A second signal has no effect.
    """
    hangup, ends = {signal.SIGHUP}, (signal.SIGTERM, signal.SIGINT)

    def leave(*_: object) -> None:
        for number in ends:
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, hangup)
    before = {number: signal.signal(number, leave) for number in (*ends, *hangup)}  # under nohup, SIGHUP stays ignored
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.sigtimedwait(hangup, 0)  # this discards a pending SIGHUP
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _pairs(table: dict[str, object], before: str = "") -> Iterator[str]:
    """Yield ``KEY=VALUE`` for each entry of a table. An entry of a nested table gets a key such as ``user.models``."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _pairs(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={value}"


def _read_config(context: click.Context, parameter: click.Parameter, file: Path | None) -> None:
    """Read defaults of options from a file. A repeatable option has a list or a table."""
    import tomllib

    if file is None:
        return
    takes_many = {each.name: each.multiple or each.nargs != 1 for each in context.command.params if each != parameter}
    found: dict[str, str | list[str]] = {}
    try:
        for key, value in tomllib.loads(file.read_text(encoding="utf-8")).items():
            name = key.replace("-", "_")
            if name not in takes_many:
                near = difflib.get_close_matches(name, takes_many)
                raise click.NoSuchOption(key, f"{file} has {key}; nnburst serve has no such option.", near)
            if name in found:
                raise click.BadParameter(f"{file} has {key} twice")
            if isinstance(value, dict | list) is not takes_many[name]:
                form = "a list or a table" if takes_many[name] else "a single value"
                raise click.BadParameter(f"{file} has {key} = {value!r}; this option takes {form}")
            words = _pairs(value) if isinstance(value, dict) else map(str, value) if isinstance(value, list) else None
            found[name] = str(value) if words is None else list(words)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{file} is no TOML: {error}") from None
    context.default_map = found


@click.command(context_settings={"auto_envvar_prefix": "NNBURST_SERVE"})
@click.option(
    "--config", type=click.Path(dir_okay=False, exists=True, path_type=Path), metavar="FILE.toml", is_eager=True,
    expose_value=False, callback=_read_config,
    help="Read options from this file. A variable such as NNBURST_SERVE_NAME takes precedence over the file.",
)  # fmt: skip
@click.argument("functions", nargs=-1, metavar="[FILE.py:FUNCTION]...")
@click.option("--name", default="nnburst", show_default=True, help="The name that programs connect to.")
@click.option("--socket", metavar="PATH", help="Listen at this path instead of under a name.")
@click.option("--device", multiple=True, metavar="NAME", help="A device to offer; may be repeated.")
@click.option("--model", multiple=True, metavar="NAME=FILE", help="A model to compile once for all clients.")
@click.option("--models", metavar="DIR", help="Serve a directory of models, NAME/VERSION/FILE.")
@click.option("--batch", multiple=True, metavar="[NAME=]N", help="Run up to N rows of a model's requests together.")
@click.option("--batch-wait", multiple=True, metavar="[NAME=]TIME", help="Longest wait for a batch, such as 1ms.")
@click.option("--allow-uid", multiple=True, metavar="USER", help="Serve this user, too (name or number).")
@click.option("--allow-gid", multiple=True, metavar="GROUP", help="Serve this group, too (name or number).")
@click.option("--quota", multiple=True, metavar="KEY=N", help="Quota of each connection (KEY) or user (user.KEY).")
@click.option(
    "--max-run",
    type=Seconds(0, 1e6, min_open=True),
    help="Cancel a run after S seconds [default: none]. Has no effect on Python functions.",
)
@click.option(
    "--max-compile", type=Seconds(0, 1e6, min_open=True), default=600.0, show_default=True,
    help="End a process that compiles a client's model for longer than S seconds.",
)  # fmt: skip
@click.option("--idle-exit", type=Seconds(0, 1e6, min_open=True), help="Stop after S seconds without a client.")
@click.option(
    "--metrics", metavar="[HOST:]PORT|unix:PATH",
    help="Serve Prometheus metrics at this address (PORT alone: on loopback); needs nnburst[metrics].",
)  # fmt: skip
@click.option(
    "--oip", metavar="HOST:PORT|unix:PATH",
    help="Serve the named models by the Open Inference Protocol over gRPC; needs nnburst[oip].",
)  # fmt: skip
@click.option("--oip-rest", metavar="HOST:PORT|unix:PATH", help="Serve the Open Inference Protocol over HTTP.")
@click.option("--token-file", metavar="FILE", help="File of NAME:TOKEN lines; network clients must send a token.")
@click.option("--oip-cert", type=click.Path(), metavar="FILE.pem", help="Certificate and chain, to serve over TLS.")
@click.option("--oip-key", type=click.Path(), metavar="FILE.pem", help="Private key of --oip-cert, without a password.")
@click.option(
    "--oip-keepalive", type=Seconds(1, 86400), default=75.0, show_default=True,
    help="Close an HTTP connection after S seconds without a request; ping a gRPC client that is silent for S seconds.",
)  # fmt: skip
@click.option("--oip-control", is_flag=True, help="Let network clients load and unload models.")
@click.option(
    "--oip-drain", type=Seconds(0, 1e6), default=20.0, show_default=True,
    help="When the service is stopped, let running network requests take up to S seconds more.",
)  # fmt: skip
@click.option("--oip-shared-memory", is_flag=True, help="Let network clients pass tensors in shared memory.")
@click.option("--scheduler", metavar="POLICY:N", help="Real-time policy and priority, such as fifo:20 or rr:1.")
@click.option(
    "--sandbox", type=click.Choice(("strict", "on", "off")), default="on", show_default=True,
    help="Sandbox the processes that run models. With strict, start only if the kernel supports all parts.",
)  # fmt: skip
@click.option(
    "--isolate", type=click.Choice(("user", "connection", "none")), default="user", show_default=True,
    help="Run clients' own models in a process for each user, for each connection, or for all clients (none).",
)  # fmt: skip
@click.option(
    "--log-level", type=click.Choice(("debug", "info", "warning", "error")), default="warning", show_default=True
)
@click.option(
    "--log-format", type=click.Choice(("text", "json")), default="text", show_default=True,
    help="Write log lines as text or as JSON.",
)  # fmt: skip
@click.option("--json", is_flag=True, help="Print the ready line as JSON.")
@_handle_startup_signals()
def serve(
    functions: tuple[str, ...],
    name: str,
    socket: str | None,
    device: tuple[str, ...],
    model: tuple[str, ...],
    models: str | None,
    batch: tuple[str, ...],
    batch_wait: tuple[str, ...],
    allow_uid: tuple[str, ...],
    allow_gid: tuple[str, ...],
    quota: tuple[str, ...],
    max_run: float | None,
    max_compile: float,
    idle_exit: float | None,
    metrics: str | None,
    oip: str | None,
    oip_rest: str | None,
    token_file: str | None,
    oip_cert: str | None,
    oip_key: str | None,
    oip_keepalive: float,
    oip_control: bool,
    oip_drain: float,
    oip_shared_memory: bool,
    scheduler: str | None,
    sandbox: SandboxMode,
    isolate: str,
    log_level: LogLevel,
    log_format: str,
    json: bool,
) -> None:
    """Run a service that programs of this machine share, until SIGTERM or Ctrl-C.

    \b
    nnburst serve --name vision --model detector=detector.onnx
    nnburst serve --name vision filters.py:edges
    python -c 'import nnburst; print(nnburst.connect("vision").session("detector").get_inputs())'

    FILE.py:FUNCTION is a Python function declared with @declare. The model has the function's name.

    Prints one line when the service is ready. After SIGTERM, the service completes executions in progress. On SIGHUP,
    the service compiles the files of the named models again.
    """
    _settle_environment()
    from ..._core.errno import this_process
    from ...runtime.service import DEFAULT_DEVICES
    from ...service.process.broker import AccessPolicy, Broker, activated_sockets, notify_systemd
    from ...service.process.discovery import claim
    from ...service.process.launch import start_child
    from ...service.process.limited_log import begin_log
    from ...service.process.workers import Isolation, WorkerPool
    from .children import gateway, start_metrics
    from .repository import Repository

    this_process.name = "the service"
    begin_log("nnburst serve", log_level.upper(), log_format)
    policy_and_priority = None if scheduler is None else _policy(scheduler)
    address = name if socket is None else f"unix:{socket}"
    policy = AccessPolicy(
        frozenset(user_number(user, "--allow-uid") for user in allow_uid), frozenset(map(_gid, allow_gid))
    )
    limits, user_limits = _quotas(quota)
    files = parse_pairs(model, "--model")
    repository = Repository(files, models, _batching(files, models, batch, batch_wait))
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(sock) for sock in activated_sockets()]
        claimed = None
        if not listeners:
            claimed = stack.enter_context(contextlib.closing(claim(address, wider=policy.wider)))
            listeners = [claimed.listener]
        where = str(listeners[0].getsockname())
        _raise_descriptor_limit()
        start = partial(
            start_child,
            timeout=None,
            warm=True,
            quotas=limits,
            max_run=max_run,
            max_compile=max_compile,
            log_level=log_level,
            scheduler=policy_and_priority,
            sandbox=sandbox,
        )
        workers = partial(
            WorkerPool,
            start=start,
            name=address,
            devices=[*(device or [*DEFAULT_DEVICES, *_needed_devices(files)]), *_functions(device, functions)],
            named=not repository.is_empty,
            prepare=repository.prepare,
            isolation=Isolation(isolate),
            user_quotas=user_limits,
        )
        broker = Broker(listeners, workers, policy=policy, idle_exit=idle_exit)
        stack.callback(broker.close)
        shared = broker.workers.shared
        beside = stack.enter_context(contextlib.ExitStack())  # the gateway and metrics end first
        log = {"log_level": log_level.upper(), "log_format": log_format, "token_file": token_file}
        watched = start_metrics(metrics, log)
        if watched is not None:
            beside.callback(watched.close)
        running = gateway(
            models is not None or bool(shared.list_models()),
            {
                "address": f"unix:{where}", "grpc": oip, "rest": oip_rest, "shared_memory": oip_shared_memory,
                "control": oip_control, "drain": oip_drain, "keepalive": oip_keepalive, "cert": oip_cert,
                "key": oip_key, **log,
            },
        )  # fmt: skip
        if running is not None:
            beside.callback(running.close)
        if claimed is not None:
            claimed.write(str(shared.sandbox))
        ready: dict[str, Any] = {
            "name": address,
            "socket": where,
            "pid": os.getpid(),
            "devices": [device.name for device in shared.devices],
            "models": list(shared.list_models()),
            "sandbox": str(shared.sandbox),
            "accounts": str(broker.workers.groups or "counted by the service"),
        }
        if watched is not None:
            port = watched.ports["metrics"]
            host = watched.options["metrics"].rpartition(":")[0]
            ready["metrics"] = port if isinstance(port, str) else f"http://{host}:{port}/metrics"
        if running is not None:
            ready["oip"] = running.ports

        def change(name: str | None, unload: bool) -> None:
            try:
                repository.change(broker.workers.shared, name, unload)
            finally:
                for child in filter(None, (watched, running)):
                    child.options["unloaded"] = repository.unloaded  # a restarted gateway reads it
                    child.renew()

        def announce() -> None:
            click.echo(dumps(ready) if json else _ready_line(ready))
            logging.getLogger(__name__).info("accounts of users: %s", ready["accounts"])
            notify_systemd()

        reason = broker.run(announce, change=change, finish=beside.close)
        logging.getLogger(__name__).info("ended: %s", reason)


def _settle_environment() -> None:
    """Restart this process with a service's environment variables: NumPy then starts no threads that take signals."""
    from ...service.process.command import interpreter, service_environment

    env = service_environment(os.environ)
    if env != dict(os.environ):
        python = interpreter()
        os.execve(python, [python, *sys.orig_argv[1:]], env)


def _ready_line(ready: dict[str, Any]) -> str:
    line = f"nnburst serve: ready at {ready['socket']} (pid {ready['pid']}); devices: {', '.join(ready['devices'])}"
    line += f"; models: {', '.join(ready['models'])}" if ready["models"] else ""
    line += f"; {ready['metrics']}" if "metrics" in ready else ""
    return line + "".join(f"; {protocol} at port {port}" for protocol, port in ready.get("oip", {}).items())


# ---- options ---------------------------------------------------------------------------------------------------


def _quotas(texts: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the quotas of a connection, and the quotas of a user. The keys of the latter begin with ``user.``."""
    from ...service.host.quotas import PER_USER, Quotas

    pairs = parse_pairs(texts, "--quota")
    quotas = {key: value if (n := whole_number(value)) is None else n for key, value in pairs.items()}
    users: dict[str, Any] = {key.removeprefix("user."): n for key, n in quotas.items() if key.startswith("user.")}
    own: dict[str, Any] = {key: n for key, n in quotas.items() if not key.startswith("user.")}
    Quotas().replace(own, "--quota")
    PER_USER.replace(users, "--quota user", of_user=True)
    return own, users


def _needed_devices(files: Mapping[str, str]) -> list[str]:
    """Return the devices that model files need beyond the default devices."""
    return ["nnburst-litert"] if any(file.lower().endswith(".tflite") for file in files.values()) else []


def _functions(devices: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return a list with the device that runs the named functions, or an empty list if no function is named."""
    if targets and any(device.partition(":")[0] == "nnburst-function" for device in devices):
        raise InvalidArgument(f"--device nnburst-function and {targets[0]}: give all functions as FILE.py:FUNCTION")
    return [f"nnburst-function:call={'+'.join(targets)}"] if targets else []


def _policy(text: str) -> tuple[str, int]:
    from ...service.process.options import Scheduling

    policy, _, priority = text.partition(":")
    number = whole_number(priority)
    if number is None:
        raise InvalidArgument(f"--scheduler {text}: write it as POLICY:PRIORITY, such as fifo:20")
    Scheduling.of((policy, number), None)  # this refuses a wrong policy or priority
    return policy, number


def _gid(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid if (gid := whole_number(group)) is None else gid
    except KeyError:
        raise InvalidArgument(f"--allow-gid {group}: this machine has no such group") from None


def _raise_descriptor_limit() -> None:
    """Raise the limit of descriptors. A worker process gets a quarter of it, and needs a descriptor per memory pool."""
    import resource

    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FDS if most == resource.RLIM_INFINITY else min(most, _MOST_FDS)
    if limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


# ---- batches ---------------------------------------------------------------------------------------------------


def _batching(
    files: Mapping[str, str], directory: str | None, batches: Sequence[str], waits: Sequence[str]
) -> dict[str, Batching]:
    """Return the batching of each model from ``--batch`` and ``--batch-wait``. The key "" means all other models."""
    from ..._core import lib
    from .repository import Batching

    most: int = lib.NNB_MOST_BATCHED
    chosen = {"": Batching()}
    for option, texts in (("--batch", batches), ("--batch-wait", waits)):
        for text in sorted(texts, key=lambda text: "=" in text):  # a model's own value comes last, so it wins
            name, equals, value = text.rpartition("=")
            if not files and directory is None:
                raise InvalidArgument(f"{option} {text}: there is no model; give --model NAME=FILE or --models DIR")
            if equals and name not in files and directory is None:
                raise InvalidArgument(f"{option} {text}: no --model has the name {name!r}")
            if option == "--batch":
                rows = whole_number(value)
                if rows is None or not 1 <= rows <= most:
                    raise InvalidArgument(f"{option} {text}: give a number of rows from 1 to {most}")
                change: dict[str, Any] = {"rows": rows}
            else:
                change = {"wait": _seconds(f"{option} {text}", value)}
            for each in (name,) if equals else chosen:
                chosen[each] = chosen.get(each, chosen[""])._replace(**change)
    return chosen


def _seconds(option: str, text: str) -> float:
    """Return a time such as ``1ms``, ``200us`` or ``0.01s`` in seconds. The longest accepted time is one second."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)(us|ms|s)", text)
    seconds = float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]] if found else 2.0
    if seconds > 1:
        raise InvalidArgument(f"{option}: give a time of up to a second, such as 1ms or 200us")
    return seconds
