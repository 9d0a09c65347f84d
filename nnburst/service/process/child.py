"""The main function of a child service, which serves its parent alone or is the worker of a broker."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable

from ..._core._nnburst import lib
from ..._core.errno import check, this_process
from ...burst.server.group import ListenerGroup
from ...devices.local import LocalDevice
from ...devices.named import NamedDevice
from ...devices.registry import create_device
from ...errors import NNBurstError
from ...watch.page import MOST_ROWS, Page
from ..host.host import ServiceHost
from ..host.quotas import PER_USER, Quotas
from . import forked
from .limited_log import begin_log
from .options import ServiceOptions
from .sandbox import close_door, find_code, log_sandbox

_MOST_FDS = 65536
_NAMED_PART, _OWN_PART = 2, 4
"""Divisors of the broker's limits: a shared worker gets a half, a user's own worker a quarter."""
_OWN_FIRST, _NAMED_NEXT = 500, 200
"""``oom_score_adj`` of a user's own worker, which is killed first, and of the shared worker."""


def pidfd_of_parent(parent: int) -> int:
    """Return a pidfd of the process that started this one; -1 if that process has ended."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(parent)
        if os.getppid() == parent:  # otherwise another process may have the number now
            return pidfd
        os.close(pidfd)
    return -1


def main() -> int:
    """Serve the client at an inherited socket until that client disconnects. The client may hand over other clients."""
    return serve(ServiceOptions.read(sys.argv[1], path=sys.argv[2:]))


def serve(options: ServiceOptions) -> int:
    """Serve, as `main` does, with parsed options."""
    this_process.name = "the service"
    sock = socket.socket(fileno=options.socket)
    sock.set_inheritable(False)
    for fd in (options.stderr, options.functions, options.faults):
        if fd >= 0:
            os.set_inheritable(fd, False)
    sys.stdout = sys.stderr  # stderr has no buffer: what a function prints is shown at once
    # The kernel kills a direct child with its client, even a stopped child. A zygote's child wakes up and checks.
    check(lib.nnb_signal_when_orphaned(signal.SIGKILL if options.client < 0 else signal.SIGCONT))
    pidfd = pidfd_of_parent(options.parent) if options.client < 0 else options.client
    if pidfd < 0:
        return 0
    try:
        options.scheduling.apply()
    except NNBurstError as error:
        print(error, file=sys.stderr)
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides what Ctrl-C ends
    is_worker = options.worker is not None
    if is_worker:
        _offer_to_oom_killer(_OWN_FIRST if options.own else _NAMED_NEXT)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager signals all; the broker ends this process
    if options.state is not None:
        os.environ["NNBURST_STATE_DIR"] = options.state
    faulthandler.enable()
    if is_worker:
        _leave_to_broker(_OWN_PART if options.own else _NAMED_PART)
    else:  # each pool takes a descriptor
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, min(most, _MOST_FDS)), most))
    begin_log("nnburst service", options.log_level)
    if options.path:
        sys.path[:] = dict.fromkeys([*options.path, *sys.path])
        find_code.cache_clear()
    try:
        quotas = Quotas().replace(options.quotas)
        user_quotas = PER_USER.replace(options.user_quotas, of_user=True) if is_worker else quotas
        if options.own:
            quota_of = {
                resource.RLIMIT_DATA: user_quotas.process_bytes,
                resource.RLIMIT_NOFILE: user_quotas.process_fds,
            }
            for which, quota in quota_of.items():
                _, most = resource.getrlimit(which)
                resource.setrlimit(which, (quota if most == resource.RLIM_INFINITY else min(quota, most),) * 2)
        devices = list(map(create_device, options.devices))
        if options.functions >= 0:
            from ...devices.function import FunctionDevice, decode_functions

            with open(options.functions, "rb") as sent:
                of_functions = devices[options.devices.index(forked.FUNCTIONS)]
                assert isinstance(of_functions, FunctionDevice)
                for function in decode_functions(sent.read()):
                    of_functions.add(function)
        for device in devices if options.warm else ():
            if isinstance(device, LocalDevice):
                device.load_libraries()
        faults = None
        if options.faults >= 0:
            from ..host.faults import FaultPoints

            faults = FaultPoints(socket.socket(fileno=options.faults))
        page = Page() if options.worker is None else Page(options.worker, MOST_ROWS)
        apart = [device for device, spec in zip(devices, options.devices, strict=True) if spec in options.apart]

        def watch(give_up_rights: Callable[[], object]) -> None:
            give_up_rights()
            check(lib.nnb_exit_when_dead(pidfd, -1 if is_worker else sock.fileno()), "watching the client")

        forked.end()  # a function's module may have started a zygote on import, which no sandbox confines
        box = close_door(
            options.sandbox,
            devices,
            outputs=(1, 2, options.stderr),
            may_cache=not apart,
            start_threads=lambda give_up_rights: options.scheduling.run_above(lambda: watch(give_up_rights)),
        )
        group = ListenerGroup() if is_worker else None
        host = ServiceHost(
            [*([NamedDevice(devices)] if options.named else ()), *devices],
            quotas=quotas,
            user_quotas=user_quotas,
            page=page,
            listeners=group,
            max_run=options.max_run,
            max_compile=options.max_compile,
            faults=faults,
            sandbox=box,
            apart=apart,
        )
    except NNBurstError as error:
        print(error, file=sys.stderr)
        return 1
    if options.stderr >= 0:
        os.dup2(options.stderr, 1)
        os.dup2(options.stderr, 2)
        os.close(options.stderr)
    log_sandbox(box)
    client = host.serve(sock, peer_pidfd=pidfd, is_broker=is_worker)
    client.connection.wait_ended()
    host.close("it was told to stop" if is_worker else "")
    if group is not None and group.threads:  # a run does not return, and the interpreter would wait for its thread
        logging.getLogger(__name__).warning("ended in the middle of a run that does not return")
        logging.shutdown()
        os._exit(0)
    return 0


def _leave_to_broker(part: int) -> None:
    """Lower this worker's limits on resources that the kernel counts per user: descriptors in flight, timers, signals.

    The kernel counts what all processes of the user have, and compares this count with the limit of the process that
    asks for more. So a hostile worker is refused at its own limit, below the limit of the broker.
    """
    for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_SIGPENDING):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            resource.setrlimit(which, (limit // part, limit // part))


def _offer_to_oom_killer(most: int) -> None:
    """Raise this process's ``oom_score_adj`` to `most`, so that the kernel kills it before other programs."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+", encoding="utf-8") as adjustment:
        if int(adjustment.read()) < most:
            adjustment.write(str(most))
