"""Derive the sandbox's list of system calls from tests under strace, and compare it with the list in C.

Run by hand, for all tests or some::

    python packaging/calls.py tests/conformance tests/real_models
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_CALL = re.compile(r"(\d+) +(?:<\.\.\. )?(\w+)(?:\(| resumed>)(.*)")
_THREAD = re.compile(r"= (\d+)$")
_REFUSED = re.compile(r"= -1 (EPERM|ENOSYS) ")
_SOURCE = Path(__file__).parents[1] / "csrc" / "sandbox.c"
_ROW = re.compile(r"(?<!define )(?:(?:CALL|CALL_IF|NEW)\(|CALL_FOR\(\w+, |\{SYS_)(\w+)[,)]")


def trace_command(command: list[str], trace: Path) -> int:
    """Run a command under strace and return its exit status."""
    return subprocess.run(
        ["strace", "-f", "-qq", "-e", "signal=none", "-o", str(trace), *command], check=False
    ).returncode


def calls_in_sandboxes(trace: Iterable[str]) -> tuple[Counter[str], Counter[str]]:
    """Count the calls of processes whose filter is in force, and the calls that the filter refused.

    Args:
        trace: Lines of strace. Threads older than the filter are not followed.
    """
    inside: set[str] = set()
    made: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for line in trace:
        if not (match := _CALL.match(line)):
            continue
        thread, name, rest = match.groups()
        if thread not in inside:
            if name == "seccomp" and rest.rstrip().endswith("= 0"):
                inside.add(thread)
            continue
        made[name] += "resumed>" not in line
        if _REFUSED.search(rest):
            refused[name] += 1
        elif name == "clone" and (started := _THREAD.search(rest.rstrip())):
            inside.add(started.group(1))
    return made, refused


def allowed() -> list[str]:
    """Return the names of the system calls that the list in C allows."""
    return _ROW.findall(_SOURCE.read_text(encoding="utf-8").partition("#define CALL(name)")[2])


def main(arguments: list[str]) -> int:
    """Run the given tests, or all. Print a line for each system call, and the rows that the list in C needs."""
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "trace")
        status = trace_command([sys.executable, "-m", "pytest", "-q", "-n", "0", *arguments], trace)
        with open(trace, encoding="utf-8", errors="replace") as lines:
            made, refused = calls_in_sandboxes(lines)
    known = set(allowed())
    for name, count in made.most_common():
        print(f"{count:10} {name}{f', {refused[name]} refused' if refused[name] else ''}")
    print("rows for them:", *(f"CALL({name})," for name in sorted(made.keys() - refused.keys())))
    print("refused, in no row:", *sorted(refused.keys() - known))
    print("in a row, not made:", *sorted(known - made.keys()))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
