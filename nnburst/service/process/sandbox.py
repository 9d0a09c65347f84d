"""The sandbox of a service process, in force before the client's first message.

Directories of code stay readable, because more code may be loaded later. The client sends descriptors of all other
files. docs/security.md explains the sandbox.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from glob import glob
from pathlib import Path

from ..._core._nnburst import lib
from ..._core.errno import check, this_process
from ...cache.files import default_state_directory, make_directories
from ...cache.reasons import CacheRejected
from ...devices.interfaces import Device, Needs
from ...errors import DeviceUnavailable
from ..wire.protocol import Sandbox

_log = logging.getLogger(__name__)
_BROUGHT = {1: "files", 2: "renaming", 3: "truncating files", 4: "TCP", 5: "devices", 6: "abstract sockets and signals"}
"""Rights that Landlock can restrict, by the version that introduced them."""
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_MACHINE = (
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    "/sys/kernel/mm/transparent_hugepage",
    "/etc/localtime",
    "/dev/urandom",
    "/dev/zero",
)
"""Files in which libraries find the number of processors and similar facts."""
_RESOLVER = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/ssl")
_HINT = (
    "the sandbox of this service does not allow it: have the device say what it needs (Device.needs, or "
    "@declare(needs=Needs(read=[…], write=[…], programs=[…], network=True)) above a function), "
    "or start the service with sandbox='off'"
)


def close_door(
    mode: str,
    devices: Iterable[Device],
    *,
    outputs: Sequence[int] = (1, 2),
    may_cache: bool = True,
    start_threads: Callable[[Callable[[], object]], object] = lambda give_up: give_up(),
) -> Sandbox:
    """Close the sandbox: give up, for ever, all rights that this process does not need to run models.

    Call it when everything is loaded and opened, before this package starts threads.

    Args:
        mode: ``"on"`` for the Landlock and seccomp rules that this kernel supports, ``"strict"`` to require all of
            them, ``"off"`` for no sandbox.
        devices: Devices of this service, which keep the rights that they declare.
        outputs: Descriptors for output. Terminals are reopened for writing only.
        may_cache: True to keep access to the trust store, for devices that cache.
        start_threads: Function that starts threads. It must first call its argument, which gives up capabilities:
            threads that are started earlier would keep their capabilities. After `start_threads`, seccomp is enabled
            for all threads.

    Raises:
        DeviceUnavailable: The mode is strict and the kernel lacks rules, or a file that a device needs is missing.
    """
    if mode == "off":
        start_threads(lambda: None)
        return Sandbox(mode)
    devices = tuple(devices)
    wanted = {device.name: device.needs for device in devices}
    needs = Needs.sum(wanted.values())
    may = (lib.NNB_MAY_EXECUTE if needs.programs else 0) | (lib.NNB_MAY_CONNECT if needs.network else 0)
    missing: list[str] = []
    if not needs.network:  # without network, epoll is refused: the kernel limits its watches per user, not per process
        selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc, assignment]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file may contain clients' memory
    _turn_terminals_outwards(outputs)
    landlock = lib.nnb_landlock_version()
    if landlock:
        _close_files(may, needs, _state(devices) if may_cache else None, missing)
    missing += [f"Landlock for {what}" for version, what in _BROUGHT.items() if version > landlock]
    if not missing:
        may |= lib.NNB_MAY_SIGNAL  # Landlock already keeps all threads from signalling other processes
    start_threads(lambda: check(lib.nnb_capabilities_drop(), "giving up capabilities"))
    calls = lib.nnb_seccomp_close(may)
    if calls < 0:
        missing.append(f"seccomp ({os.strerror(-calls)})")
    box = Sandbox(
        mode, landlock, calls >= 0, tuple(f"{name} {need}" for name, need in wanted.items() if need != Needs()),
        tuple(missing),
    )  # fmt: skip
    if missing and mode == "strict":
        raise DeviceUnavailable(
            f"sandbox='strict' is more than this kernel or container can do: it lacks {', '.join(missing)}; "
            "use sandbox='on', which goes on with what there is"
        )
    if landlock or calls >= 0:
        this_process.refusals = _HINT
        this_process.refused = PermissionError if needs.network else (PermissionError, socket.gaierror)
    return box


def log_sandbox(box: Sandbox) -> None:
    """Log the sandbox, as a warning if the kernel lacks a part of it."""
    _log.log(logging.WARNING if box.missing else logging.INFO, "sandbox %s", box)


def _close_files(may: int, needs: Needs, state: Path | None, missing: list[str]) -> None:
    """Enable Landlock's rules. If some threads escape them, add a message to `missing`."""
    rules = check(lib.nnb_landlock_rules(may), "Landlock")
    read, write, execute = lib.NNB_MAY_READ, lib.NNB_MAY_WRITE, lib.NNB_MAY_EXECUTE
    loader = glob("/lib*/ld-*.so*") if needs.programs else []  # the kernel loads it with each program
    try:
        for paths, rights in (
            (find_code(), read),
            (_LIBRARIES, read),
            (_MACHINE, read),
            (_RESOLVER if needs.network else (), read),
            (("/dev/null", *(() if state is None else (state,))), read | write),
            (loader, read | execute),
        ):
            for path in paths:
                with contextlib.suppress(OSError):  # the path does not exist
                    _allow(rules, path, rights)
        asked = (needs.read, read), (needs.write, read | write), (needs.programs, read | execute)
        for needed, rights in asked:
            for path in needed:
                try:
                    _allow(rules, path, rights)
                except OSError as error:
                    raise DeviceUnavailable(
                        f"a device needs {path}, which cannot be opened: {error.strerror}; make it before the service "
                        "starts, or take it out of its Needs"
                    ) from error
        # This stays open: the kernel may recreate a process's directory, and the rule would not apply to the new one.
        check(lib.nnb_landlock_allow(rules, os.open("/proc/self", os.O_PATH | os.O_CLOEXEC), read), "/proc/self")
        for_all = check(lib.nnb_landlock_close(rules), "Landlock")
    finally:
        os.close(rules)
    if not for_all and (threads := len(os.listdir("/proc/self/task"))) > 1:
        missing.append(f"Landlock for {threads - 1} threads that libraries have started while they were loaded")


def _allow(rules: int, path: str | os.PathLike[str], rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        check(lib.nnb_landlock_allow(rules, fd, rights), f"{path} in the sandbox")
    finally:
        os.close(fd)


@cache
def find_code() -> tuple[str, ...]:
    """Return the directories of Python modules and libraries, except directories that contain the user's home."""
    home = os.path.realpath(os.path.expanduser("~"))
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *os.environ.get("LD_LIBRARY_PATH", "").split(":")}
    found.update(place for name, module in sys.modules.copy().items() if "." not in name
                 for place in getattr(module, "__path__", ()))  # fmt: skip
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        mapped = {line.split(None, 5)[-1].rstrip("\n") for line in maps if ".so" in line}
    found.update(os.path.dirname(path) for path in mapped if path.startswith("/"))
    places = {os.path.realpath(place) for place in found if os.path.isabs(place)}
    return tuple(place for place in places if not f"{home}/".startswith(f"{place.rstrip('/')}/"))


def _state(devices: Iterable[Device]) -> Path | None:
    """Create and return the state directory, which the cache needs; None if the devices use no cache, or on failure."""
    if all(device.get_number_of_cache_files_needed() == (0, 0) for device in devices):
        return None
    with contextlib.suppress(OSError, CacheRejected):
        state = default_state_directory()
        make_directories(state)
        return state
    return None  # without the directory nothing is cached


def _turn_terminals_outwards(outputs: Sequence[int]) -> None:
    """Reopen terminals for writing only, because the user's input could be read from them."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    for fd in outputs:
        if os.isatty(fd):
            flags = os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC
            try:
                writable = os.open(f"/proc/self/fd/{fd}", flags)
            except OSError:  # the terminal is another user's, or was closed
                writable = os.open(os.devnull, flags)
            os.dup2(writable, fd)
            os.close(writable)
