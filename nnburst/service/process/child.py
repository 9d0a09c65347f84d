"""What a child service does."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence

from ..._core._nnburst import lib
from ..._core.errno import check, name_process
from ...devices import LocalDevice, create_device
from ...errors import NNBurstError
from ...watch import Page
from ..host.host import ServiceHost
from ..host.quotas import Quotas
from .limited_log import LimitedHandler
from .sandbox import close_door, log_sandbox
from .scheduling import Scheduling

_MOST_FDS = 65536

_PARSER = argparse.ArgumentParser(prog="nnburst service")
_PARSER.add_argument("--socket", type=int, required=True, help="inherited end of a socketpair")
_PARSER.add_argument("--parent", type=int, default=0, help="process id of the client")
_PARSER.add_argument("--client", type=int, default=-1, help="pidfd of a client that is not the parent")
_PARSER.add_argument("--stderr", type=int, default=-1, help="becomes stdout and stderr once all is well")
_PARSER.add_argument("--log-level", type=int, default=logging.WARNING, help="a number of `logging`")
_PARSER.add_argument("--quota", action="append", default=[], help="NAME=NUMBER of `Quotas`")
_PARSER.add_argument("--max-run", type=float, default=None, help="seconds that a run may take")
_PARSER.add_argument("--path", action="append", default=[], help="where the client's program finds its modules")
_PARSER.add_argument("--faults", type=int, default=-1, help="where orders of faults come from")
_PARSER.add_argument("--scheduler", default=None, help="POLICY:PRIORITY")
_PARSER.add_argument("--affinity", default=None, help="numbers of CPUs")
_PARSER.add_argument("--sandbox", default="on", help="mode of `close_door`")
_PARSER.add_argument("--warm", action="store_true", help="load at once what the first model will need")
_PARSER.add_argument("devices", nargs="+", metavar="DEVICE")


def pidfd_of_parent(parent: int) -> int:
    """Return a pidfd of the process that has started this one; -1 if it has gone."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(parent)
        if os.getppid() == parent:  # else that number may be another process by now
            return pidfd
        os.close(pidfd)
    return -1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one client over an inherited socket until it goes.

    Started by `start_child`, through `bootstrap` or the zygote; there is no use for it by hand.
    """
    options = _PARSER.parse_args(arguments)

    name_process("the service")
    sock = socket.socket(fileno=options.socket)
    sock.set_inheritable(False)
    for fd in (options.stderr, options.faults):
        if fd >= 0:
            os.set_inheritable(fd, False)
    sys.stdout = sys.stderr  # which shows at once what a function prints
    # Killed with a client that has started it, also while it is stopped; else it looks when it goes on.
    check(lib.nnb_signal_when_orphaned(signal.SIGKILL if options.client < 0 else signal.SIGCONT))
    pidfd = pidfd_of_parent(options.parent) if options.client < 0 else options.client
    if pidfd < 0:
        return 0
    try:
        scheduling = Scheduling.parse(options.scheduler, options.affinity)
        scheduling.apply()
    except NNBurstError as error:
        print(error, file=sys.stderr)
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides what Ctrl-C ends
    faulthandler.enable()
    # Each pool of a client takes a descriptor here, and the usual limit of 1024 is for programs that use select().
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, min(most, _MOST_FDS)), most))
    logging.basicConfig(
        level=options.log_level,
        format="nnburst service %(process)d: %(levelname)s: %(message)s",
        handlers=[LimitedHandler()],
    )

    if options.path:
        sys.path[:] = dict.fromkeys([*options.path, *sys.path])
    try:
        given = {name: int(number) for name, _, number in (text.partition("=") for text in options.quota)}
        quotas = Quotas().changed(given)  # the only connection is all that its user has
        devices = list(map(create_device, options.devices))
        for device in devices if options.warm else ():
            if isinstance(device, LocalDevice):
                device.load_libraries()
        faults = None
        if options.faults >= 0:
            from ..host.faults import FaultPoints

            faults = FaultPoints(socket.socket(fileno=options.faults))
        page = Page()
        box = close_door(
            options.sandbox,
            devices,
            outputs=(1, 2, options.stderr),
            start_threads=lambda: scheduling.above(
                lambda: check(lib.nnb_exit_when_dead(pidfd, sock.fileno()), "watching the client")
            ),
        )
        host = ServiceHost(
            devices, quotas=quotas, user_quotas=quotas, page=page, max_run=options.max_run, faults=faults, sandbox=box
        )
    except NNBurstError as error:
        print(error, file=sys.stderr)
        return 1
    if options.stderr >= 0:
        os.dup2(options.stderr, 1)
        os.dup2(options.stderr, 2)
        os.close(options.stderr)
    log_sandbox(box)
    client = host.serve(sock, peer_pidfd=pidfd)
    client.wait_ended()
    host.close()
    return 0
