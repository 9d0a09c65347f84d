"""The command lines and environments of this package's processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ...errors import DeviceUnavailable

_DEFAULTS = {
    # Freed large blocks go back to the system.
    "MALLOC_MMAP_THRESHOLD_": str(16 << 20),
    "ORT_DISABLE_TELEMETRY": "1",
}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap.py")


def interpreter() -> str:
    """Return the path of this program's Python: `sys.executable`, or the Python in `sys.prefix`.

    In a program that embeds Python (uWSGI, Blender), `sys.executable` is that program.

    Raises:
        DeviceUnavailable: There is no interpreter, as in a program that is frozen into one file or folder.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable or "", os.path.join(sys.prefix, "bin", version)):
        names = os.path.basename(path), os.path.basename(os.path.realpath(path))
        is_python = any(name.startswith("python") for name in names) and not getattr(sys, "frozen", False)
        if is_python and os.access(path, os.X_OK):
            return path
    raise DeviceUnavailable(
        f"no service process: sys.executable is {sys.executable!r}, not an interpreter; connect() to a service that "
        f"`nnburst serve` runs, use in_process(), or, in uWSGI, give --py-executable"
    )


def safe_command(module: str) -> list[str]:
    """Return the first words of a command line that runs a module of this package.

    The command imports nothing from the working directory.

    Args:
        module: Name of the module, whose `main` reads the rest of the command. The caller must set PYTHONPATH to
            the result of `absolute_entries`.

    Raises:
        DeviceUnavailable: There is no interpreter to run the command.
    """
    flags = ["-P", *["-E"] * sys.flags.ignore_environment, *["-s"] * sys.flags.no_user_site]
    return [interpreter(), *flags, BOOTSTRAP, module]


def absolute_entries(path: str) -> str:
    """Return a PYTHONPATH without the entries that depend on the working directory."""
    return os.pathsep.join(filter(os.path.isabs, path.split(os.pathsep)))


def service_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `env`, with defaults for some variables of libraries (docs/platforms.md)."""
    threads = {} if any(name in env for name in _THREAD_VARIABLES) else dict.fromkeys(_THREAD_VARIABLES, "1")
    return {**_DEFAULTS, **threads, **env}


def child_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that `safe_command` starts."""
    full = {**service_environment(env), "PYTHONPATH": absolute_entries(env.get("PYTHONPATH", ""))}
    full.pop("PYTEST_CURRENT_TEST", None)  # pytest changes it in each test, and the zygote needs the same environment
    return full
