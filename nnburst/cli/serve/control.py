"""Looks at the shared services of this machine, and ends one, or a client of one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal

import click

from ..._core import Deadline
from ...errors import DeviceUnavailable, NNBurstError


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
def ls(as_json: bool) -> None:
    """List the services that this user can find by name."""
    from ...service import running_services

    found = list(running_services())
    if as_json:
        rows = [
            {"name": s.name, "socket": str(s.path), "pid": s.pid or None, "running": bool(s.pid), "sandbox": s.sandbox}
            for s in found
        ]
        click.echo(json.dumps(rows))
        return
    if not found:
        click.echo("no services; start one with: nnburst serve --name NAME")
    for service in found:
        state = f"pid {service.pid}" if service.pid else "ended, left its socket"
        click.echo(f"{service.name:20} {state:24} {service.path}")
        if service.sandbox:
            click.echo(f"{'':20} sandbox {service.sandbox}")


@click.command()
@click.argument("address", metavar="NAME|unix:PATH")
@click.argument("pid", type=click.IntRange(1))
@click.option(
    "--timeout", type=click.FloatRange(0, 1e6), default=30.0, show_default=True, metavar="S",
    help="Seconds that the service may take to answer.",
)  # fmt: skip
@click.option("--trust-uid", type=click.IntRange(0), multiple=True, metavar="UID", help="Also a service of this user.")
def kick(address: str, pid: int, timeout: float, trust_uid: tuple[int, ...]) -> None:
    """End the connections of one process to a service; `nnburst top` shows the processes.

    What runs for it ends as if it had been killed. The process itself goes on, is told why (DeadObject), and may
    connect again. For the user who runs the service, and root.
    """
    from ...service import connect_to

    try:
        with connect_to(address, timeout=timeout, trust_uid=trust_uid) as service:
            ended = service.end_clients(pid, timeout)
    except NNBurstError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    if not ended:
        raise click.ClickException(f"process {pid} is no client of {address!r}; `nnburst top` shows who is")
    click.echo(f"ended {ended} connection{'s' if ended > 1 else ''} of process {pid} to {address}")


@click.command()
@click.argument("address", metavar="NAME|unix:PATH")
@click.option(
    "--timeout", type=click.FloatRange(0, 1e6), default=30.0, show_default=True, metavar="S",
    help="Seconds that it may take in all.",
)  # fmt: skip
@click.option("--kill", is_flag=True, help="End it at once, whatever it runs.")
@click.option("--trust-uid", type=click.IntRange(0), multiple=True, metavar="UID", help="Also one of this user.")
def stop(address: str, timeout: float, kill: bool, trust_uid: tuple[int, ...]) -> None:
    """End a service that was started with `nnburst serve`, and wait until it is gone.

    Executions that run are finished, unless --kill says otherwise.
    """
    from ...service import connect_to, dial, owner_of, peer_of, peer_pidfd

    deadline = Deadline.after(timeout)
    try:
        with dial(address, timeout, trust_uid) as sock:
            pid, pidfd = peer_of(sock).pid, peer_pidfd(sock)
        if pidfd is None:
            raise DeviceUnavailable(f"the process behind {address!r} cannot be seen from here")
        if owner_of(address) != pid:  # else what holds the name made the socket: one that hangs need not say so
            with connect_to(address, timeout=deadline.left(), trust_uid=trust_uid) as service:
                if service.pid != pid:  # what made the socket is not what serves it
                    os.close(pidfd)
                    raise DeviceUnavailable(
                        f"{address!r} was started by a service manager; stop it there (systemctl stop)"
                    )
    except NNBurstError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL if kill else signal.SIGTERM)
        if not select.select([pidfd], [], [], deadline.left())[0]:
            raise click.ClickException(
                f"process {pid} was told to end and still runs after {timeout:g} s: see what it does, or use --kill"
            )
    except PermissionError:
        raise click.ClickException(f"process {pid} belongs to another user, who has to stop it") from None
    finally:
        os.close(pidfd)
    click.echo(f"stopped {address} (pid {pid})")
