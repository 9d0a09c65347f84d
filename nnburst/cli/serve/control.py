"""The commands `nnburst ls`, `nnburst kick` and `nnburst stop`."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import click

from ..._core.deadline import Deadline
from ..._core.fds import wait_readable
from ...errors import DeviceUnavailable
from ..targets import Seconds, user_number

_TIMEOUT = click.option("--timeout", type=Seconds(0, 1e6), default=30.0, show_default=True, help="Seconds to wait.")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def ls(as_json: bool) -> None:
    """List the services that this user can connect to by name."""
    from ...service.process.discovery import running_services

    found = list(running_services())
    if as_json:
        rows = [
            {
                "name": service.name,
                "socket": str(service.path) if service.path.exists() else None,
                "pid": service.pid or None,
                "running": None if service.pid is None else service.pid > 0,
                "sandbox": service.sandbox,
            }
            for service in found
        ]
        click.echo(json.dumps(rows))
        return
    if not found:
        click.echo("no services; start one with: nnburst serve --name NAME")
    for service in found:
        states = {None: "see its service manager", 0: "ended, left its socket"}
        state = states.get(service.pid, f"pid {service.pid}")
        removed = "" if service.path.exists() else " was removed: end the process, and start it again"
        click.echo(f"{service.name:20} {state:24} {service.path}{removed}")
        if service.sandbox:
            click.echo(f"{'':20} sandbox {service.sandbox}")


@click.command()
@click.argument("address", metavar="NAME|unix:PATH")
@click.argument("pid", type=click.IntRange(1), required=False)
@click.option("--user", metavar="USER", help="End all connections of this user (name or number) instead.")
@_TIMEOUT
@click.option("--trust-uid", type=click.IntRange(0), multiple=True, metavar="UID", help="Trust services of user UID.")
def kick(address: str, pid: int | None, user: str | None, timeout: float, trust_uid: tuple[int, ...]) -> None:
    """End the connections of one process, or of one user, to a service. `nnburst top` shows the connections.

    The service cancels the clients' runs. The clients get a DeadObject error, and can connect again. With --user, the
    service also ends the process that runs the user's own models. Only the service's user and root can use kick.
    """
    from ...service.client.connection import send_order
    from ...service.wire.protocol import EndClients

    if (pid is None) is (user is None):
        raise click.UsageError("give the id of a process, or --user USER")
    whom = f"user {user}" if pid is None else f"process {pid}"
    uid = None if user is None else user_number(user, "--user")
    ended = send_order(address, EndClients(pid or 0, uid), timeout=timeout, trust_uid=trust_uid).connections
    if not ended:
        raise click.ClickException(f"{whom} is no client of {address!r}; `nnburst top` shows who is")
    click.echo(f"ended {ended} connection{'s' if ended > 1 else ''} of {whom} to {address}")


@click.command()
@click.argument("address", metavar="NAME|unix:PATH")
@_TIMEOUT
@click.option("--kill", is_flag=True, help="End the service at once, without waiting for its runs.")
@click.option("--trust-uid", type=click.IntRange(0), multiple=True, metavar="UID", help="Trust services of user UID.")
def stop(address: str, timeout: float, kill: bool, trust_uid: tuple[int, ...]) -> None:
    """Stop a service that was started with `nnburst serve`, and wait until it has ended.

    Without --kill, running executions finish first.
    """
    from ...service.process.discovery import dial, owner_of, peer_of, peer_pidfd

    deadline = Deadline.after(timeout)
    with dial(address, timeout, trust_uid) as sock:
        pid, pidfd = peer_of(sock).pid, peer_pidfd(sock)
    if pidfd is None:
        raise DeviceUnavailable(f"the process behind {address!r} cannot be seen from here")
    if owner_of(address, trust_uid) != pid:
        os.close(pidfd)
        raise DeviceUnavailable(f"{address!r} was started by a service manager; stop it there (systemctl stop)")
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL if kill else signal.SIGTERM)
        if not wait_readable([pidfd], deadline.left()):
            raise click.ClickException(
                f"process {pid} was told to end and still runs after {timeout:g} s: see what it does, or use --kill"
            )
    except PermissionError:
        raise click.ClickException(f"process {pid} belongs to another user, who has to stop it") from None
    finally:
        os.close(pidfd)
    click.echo(f"stopped {address} (pid {pid})")
