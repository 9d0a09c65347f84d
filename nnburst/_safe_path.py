"""Where modules come from when this package is the program: never from the working directory.

A SIGHUP that `nnburst serve` gets waits from here on, too, until the service handles it: importing the libraries takes
longer than anything else before that.

People run the command in the directory of a model, which may hold files that they have not looked at. ``python -m``
and entries of PYTHONPATH that are empty or relative put that directory before the libraries. `nnburst` imports this
module before any library; in other programs it changes nothing, since their paths are their own.
"""

from __future__ import annotations

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PROGRAMS = ("nnburst", os.path.join(_ROOT, "nnburst", "service", "process", "bootstrap.py"))


def absolute(entry: str) -> str:
    """Return a path as it is without the working directory; an entry of a directory that is gone names nothing."""
    try:
        return os.path.abspath(entry)
    except FileNotFoundError:
        return entry


def absolute_entries(path: str) -> str:
    """Return a PYTHONPATH without the entries that depend on the working directory."""
    return os.pathsep.join(filter(os.path.isabs, path.split(os.pathsep)))


def _protect() -> None:
    argv = getattr(sys, "argv", [""])
    # While Python looks for the module of -m, argv[0] is "-m"; in orig_argv its name comes before the arguments.
    as_module = argv[0] == "-m" and sys.orig_argv[-len(argv)].removeprefix("-m").split(".")[0] == "nnburst"
    if not as_module and argv[0] != _PROGRAMS[1] and os.path.basename(argv[0]) != _PROGRAMS[0]:
        return
    if argv[1:2] == ["serve"]:
        import signal

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    given = os.environ.get("PYTHONPATH", "")
    unsafe = {absolute(entry) for entry in given.split(os.pathsep) if given and not os.path.isabs(entry)}
    if as_module and not getattr(sys.flags, "safe_path", False):
        unsafe.add(sys.path[0])
    unsafe.difference_update(absolute_entries(given).split(os.pathsep))  # written out in full, it is meant
    # Libraries that were installed into the directory of the package are found, after all others.
    sys.path[:] = dict.fromkeys([*(entry for entry in sys.path if absolute(entry) not in unsafe), _ROOT])


_protect()
