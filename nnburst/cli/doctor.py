"""`nnburst doctor`: check whether this machine suits bursts, and recommend remedies.

Each check is a function that returns a `Finding`. A check that raises is reported as failed, and the other checks run.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click

CORE = ("nnburst", "numpy", "cffi", "msgspec", "cryptography")
EXTRAS = {
    "onnx": ("onnxruntime", "onnx"),
    "functions": ("cloudpickle",),
    "litert": ("ai_edge_litert",),
    "metrics": ("prometheus_client", "aiohttp"),
    "oip": ("grpc", "grpc_health", "grpc_reflection", "aiohttp"),
}
OF_EXTRA = {"nnburst-onnxruntime": "onnx", "nnburst-litert": "litert"}
ENOUGH_FDS = 1024


class Level(enum.IntEnum):
    """The grade of a finding. Any FAIL makes the command exit with 1."""

    OK = 0
    WARN = 1
    FAIL = 2


class Finding(NamedTuple):
    """The result of a check, with a remedy for a problem."""

    level: Level
    found: str
    remedy: str = ""


def _ok(found: str) -> Finding:
    return Finding(Level.OK, found)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def check_versions() -> Finding:
    """Check the versions of kernel, Python, package and core libraries."""
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}, Python {sys.version.split()[0]}"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in CORE]
    return _ok(", ".join([machine, *versions]))


def check_device(name: str, *, required: bool = False) -> Finding:
    """Check that a device opens in a service process, and list the rights it needs. Warn if it does not open.

    With `required`, a device that does not open is a failure."""
    from nnburst.errors import DeviceUnavailable
    from nnburst.runtime.open_service import launch

    extra = OF_EXTRA.get(name, "")
    if not required and any(find_spec(module) is None for module in EXTRAS.get(extra, ())):
        return check_extra(extra)
    try:
        with launch(devices=[name]) as service:
            device, box = service.devices[0], service.sandbox
            needs = [sentence.removeprefix(f"{device.name} ") for sentence in box.granted] if box else []
            return _ok(f"opens in a service: {device.version_string}; needs: {', '.join(needs) or 'nothing'}")
    except DeviceUnavailable as error:
        return Finding(Level.FAIL if required else Level.WARN, "cannot be opened", str(error))


def check_extra(extra: str) -> Finding:
    """Check that the modules of an extra can be imported. List the providers of ONNX Runtime."""
    found = []
    for name in EXTRAS[extra]:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            return _ok(f"optional; {name} is not installed (pip install 'nnburst[{extra}]')")
        providers = module.get_available_providers() if name == "onnxruntime" else ()
        found.append(" ".join([name, getattr(module, "__version__", ""), *providers]).strip())
    return _ok(", ".join(found))


def check_cpus() -> Finding:
    """Check that there are two CPUs: both ends of a burst can then run at the same time."""
    allowed = len(os.sched_getaffinity(0))
    found = f"{os.cpu_count()} in this machine, {allowed} for this process"
    if allowed < 2:
        return Finding(
            Level.WARN,
            found + ": bursts never poll by default (each call costs two context switches)",
            "Give the process a second CPU (taskset, cpuset, container CPU limit).",
        )
    quota = (_read("/sys/fs/cgroup/cpu.max") or "max").split()
    if quota[0] != "max" and len(quota) == 2 and int(quota[0]) < 2 * int(quota[1]):
        return Finding(
            Level.WARN,
            found + f", but the control group's quota is {int(quota[0]) / int(quota[1]):.2f} CPUs",
            "Raise the container's CPU limit to 2 or set NNBURST_POLLING_WINDOW_US=0: polling burns the quota.",
        )
    return _ok(found)


def check_sandbox() -> Finding:
    from nnburst.runtime.open_service import launch

    with launch(devices=["nnburst-noop"]) as service:
        box = service.sandbox
    if box and not box.missing:
        return _ok(str(box))
    return Finding(
        Level.WARN,
        str(box),
        "Boot a kernel ≥ 6.12 with Landlock (lsm=landlock,…); allow landlock_* and seccomp in the container's profile.",
    )


def check_limits() -> Finding:
    """Check the limit of descriptors. A burst needs a few descriptors, and each memory pool needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files (at most {hard})"
    if soft < ENOUGH_FDS:
        return Finding(Level.WARN, found, f"ulimit -n {ENOUGH_FDS} (or LimitNOFILE= of the unit).")
    return _ok(found)


CHECKS: dict[str, Callable[[], Finding]] = {
    "versions": check_versions,
    "CPUs": check_cpus,
    "sandbox": check_sandbox,
    "limits": check_limits,
}


def all_checks(more: Sequence[str] = ()) -> dict[str, Callable[[], Finding]]:
    """Return the checks by title. Each installed device and each extra has its own check.

    Args:
        more: Names of devices, with options, that must open.
    """
    from nnburst.devices.registry import device_names

    devices = {f"device {name}": partial(check_device, name) for name in device_names()}
    devices |= {f"device {name}": partial(check_device, name, required=True) for name in more}
    extras = {f"extra {name}": partial(check_extra, name) for name in EXTRAS}
    return {**CHECKS, **devices, **extras}


def run_check(check: Callable[[], Finding]) -> Finding:
    """Run one check. An exception becomes a failed finding with the exception's name."""
    try:
        return check()
    except Exception as error:
        return Finding(Level.FAIL, f"{type(error).__name__}: {error}", "See the failures above it, or report this.")


@click.command()
@click.argument("devices", nargs=-1, metavar="[DEVICE]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(devices: tuple[str, ...], as_json: bool) -> None:
    """Check whether this machine suits nnburst, and recommend remedies.

    Opens each installed device and each DEVICE (such as nnburst-function:call=FILE.py:NAME), and shows what the
    sandbox denies to the device. Exits with 1 if nnburst cannot work here, or if a DEVICE cannot be opened. The last
    line reads "doctor: ok=… warn=… fail=…".
    """
    findings = {name: run_check(check) for name, check in all_checks(devices).items()}
    levels = [finding.level for finding in findings.values()]
    counts = {level.name.lower(): levels.count(level) for level in Level}
    if as_json:
        rows = [
            {"check": name, "level": found.level.name.lower(), "found": found.found, "remedy": found.remedy}
            for name, found in findings.items()
        ]
        click.echo(json.dumps({"checks": rows, **counts}, indent=1))
    else:
        for name, (level, found, remedy) in findings.items():
            mark = click.style(f"{level.name.lower():5}", fg=("green", "yellow", "red")[level])
            click.echo(f"{mark} {name:28} {found}")
            if remedy:
                click.echo(textwrap.indent(f"→ {remedy}", " " * 35))
        click.echo("doctor: " + " ".join(f"{level}={count}" for level, count in counts.items()))
    sys.exit(1 if counts["fail"] else 0)
