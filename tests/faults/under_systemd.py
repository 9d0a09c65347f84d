"""Runs a command under what a systemd unit says of system calls, as systemd itself does it: by libseccomp.

under_systemd.py UNIT... -- COMMAND...  (the settings of the second unit are added to those of the first)
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

ALLOW = 0x7FFF0000
EQUAL, MASKED_EQUAL = 4, 7  # enum scmp_compare
PROT_WRITE, PROT_EXEC = 2, 4
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
OTHER_FAMILIES = range(46)


class Comparison(ctypes.Structure):
    """struct scmp_arg_cmp"""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def settings(*units: Path) -> dict[str, list[str]]:
    """Return the values of each setting of the service, in order."""
    found: dict[str, list[str]] = {}
    for unit in units:
        section = ""
        for line in unit.read_text().splitlines():
            if line.startswith("["):
                section = line
            elif section == "[Service]" and "=" in line and not line.startswith("#"):
                name, _, value = line.partition("=")
                found.setdefault(name, []).append(value)
    return found


def calls_of(name: str) -> set[str]:
    """Return the system calls that a name stands for, as `SystemCallFilter=` has it."""
    if not name.startswith("@"):
        return {name}
    said = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
    names = [line.strip() for line in said.stdout.splitlines()[1:]]
    return set().union(*(calls_of(found) for found in names if found and not found.startswith("#")))


def allowed_calls(lines: list[str]) -> set[str]:
    """Return what a unit allows whose first line is a list of what is allowed."""
    allowed: set[str] = set()
    for line in lines:
        names = set().union(*map(calls_of, line.removeprefix("~").split()))
        allowed = allowed - names if line.startswith("~") else allowed | names
    return allowed


class Filter:
    """One that `load` puts upon this thread and its children for good."""

    def __init__(self, default: int) -> None:
        self._library = ctypes.CDLL("libseccomp.so.2")
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._library.seccomp_init(ctypes.c_uint32(default)))

    def rule(self, action: int, call: str, *comparisons: Comparison) -> None:
        number = self._library.seccomp_syscall_resolve_name(call.encode())
        if number >= 0:  # else this machine has no such call
            them = (Comparison * len(comparisons))(*comparisons)
            arguments = (self._context, ctypes.c_uint32(action), number, len(comparisons), them)
            status = self._library.seccomp_rule_add_array(*arguments)
            assert status == 0, (call, status)

    def load(self) -> None:
        status = self._library.seccomp_load(self._context)
        assert status == 0, status


def refuse(number: int) -> int:
    return 0x00050000 | number


def main() -> None:
    mark = sys.argv.index("--")
    unit = settings(*map(Path, sys.argv[1:mark]))
    calls = Filter(refuse(getattr(errno, unit["SystemCallErrorNumber"][-1])))
    for call in allowed_calls(unit["SystemCallFilter"]):
        calls.rule(ALLOW, call)
    rest = Filter(ALLOW)
    if unit["MemoryDenyWriteExecute"] == ["yes"]:
        for mapping in ("mmap", "mmap2"):
            rest.rule(refuse(errno.EPERM), mapping, Comparison(2, MASKED_EQUAL, *[PROT_WRITE | PROT_EXEC] * 2))
        for protecting in ("mprotect", "pkey_mprotect"):
            rest.rule(refuse(errno.EPERM), protecting, Comparison(2, MASKED_EQUAL, *[PROT_EXEC] * 2))
    families = {FAMILIES[name] for line in unit["RestrictAddressFamilies"] for name in line.split()}
    for family in set(OTHER_FAMILIES) - families:
        rest.rule(refuse(errno.EAFNOSUPPORT), "socket", Comparison(0, EQUAL, family, 0))
    rest.load()
    calls.load()  # after which nothing can be loaded any more
    os.execv(sys.argv[mark + 1], sys.argv[mark + 1 :])


if __name__ == "__main__":
    main()
