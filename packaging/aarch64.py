"""Run the tests for aarch64 in an emulator, with the wheel and Debian's Python. See `make test-aarch64`.

All files are in one folder, and root is not needed. apt downloads Debian's packages, which are unpacked but not
installed; pip downloads wheels for aarch64. In the tests, `sys.executable` is a script that starts the emulator, so
programs can start Python again.

    python packaging/aarch64.py build/aarch64 test -x tests/unit/test_fmq_queue.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from installed import build, claim, lay_out
from wheels import run

SUITE, VERSION = "trixie", "3.13"
"""The Debian release, and its Python version."""
PACKAGES = (f"python{VERSION}", "libstdc++6")
LIMIT = 1200
"""Seconds that a test may take, as an emulator is ten to fifty times slower.

All waits of a test together may take three quarters of this time (`tests/support/waiting.py`)."""
UNLIKE = (
    # After a SIGBUS without a handler, or one sent again, the emulator ends in another way than a process.
    "tests/unit/test_memory_pools.py::test_fault_outside_of_guarded_memory_still_ends_the_process",
    "tests/unit/test_memory_pools.py::test_guard_survives_a_handler_that_is_installed_after_it",
    # RLIMIT_AS does not limit the emulated program's address space.
    "tests/unit/test_memory_pools.py::test_address_space_that_is_full_is_a_typed_error",
)
"""Tests of features in which the emulator differs from a kernel."""
TESTS = tuple(
    f"tests/unit/test_{name}.py"
    for name in (
        *("core", "event_flag", "fmq_queue", "fmq_processes", "fmq_model", "burst", "burst_guarded", "listener_group"),
        *("memory_doors", "reference_kernels", "fence", "events", "nncache", "cache_store"),
    )
)
"""Tests of features that depend on the architecture: atomics, futexes, shared memory, arithmetic."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PLATFORMS = ("manylinux_2_34_aarch64", "manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")


def apt_of(folder: Path, architecture: str) -> dict[str, str]:
    """Return the environment in which apt uses only this folder and architecture."""
    for part in ("lists/partial", "archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(f"deb [signed-by={KEYRING}] http://deb.debian.org/debian {SUITE} main\n")
    (folder / "apt.conf").write_text(
        f"""APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Sandbox::User "";
APT::Install-Recommends "false";
Dir::State "{folder}";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}";
Dir::Etc::SourceList "{folder}/sources.list";
Dir::Etc::SourceParts "-";
Dir::Etc::Main "-";
Dir::Etc::Parts "-";
"""
    )
    return os.environ | {"APT_CONFIG": str(folder / "apt.conf")}


def unpack(names: tuple[str, ...], architecture: str, into: Path, *, whole: bool) -> None:
    """Unpack Debian packages into a folder; with `whole`, their dependencies, too."""
    folder = into.with_name(f"apt-{architecture}")
    env = apt_of(folder, architecture)
    run("apt-get", "--quiet", "update", env=env)
    archives = folder / "archives"
    if whole:
        run("apt-get", "--quiet", "--yes", "--download-only", "install", *names, env=env)
    else:
        run("apt-get", "--quiet", "download", *names, env=env, cwd=archives)
    for archive in archives.glob("*.deb"):
        run("dpkg-deb", "--extract", archive, into)


def make_emulator(folder: Path) -> Path:
    """Install the emulator and return its path."""
    emulator = folder / "emulator"
    if not emulator.exists():
        unpack(("qemu-user",), "amd64", folder / "emulator.new", whole=False)
        (folder / "emulator.new").rename(emulator)
    return emulator / "usr" / "bin" / "qemu-aarch64"


def make_python(folder: Path) -> Path:
    """Install Python, the wheel and the tests' requirements, and unpack the tests. Return the path of Python."""
    emulator, system, home = make_emulator(folder), folder / "system", folder / "python"
    if not system.exists():
        unpack(PACKAGES, "arm64", folder / "system.new", whole=True)
        (folder / "system.new" / "lib").symlink_to("usr/lib")  # an installed system has this link, too
        (folder / "system.new").rename(system)
    python = home / "bin" / "python"
    packages = home / "lib" / f"python{VERSION}" / "site-packages"
    sdist, wheel = build(folder / "dist", "manylinux_2_17_aarch64")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-compile", f"--target={packages}"]
    foreign = ["--only-binary", ":all:", *(f"--platform={name}" for name in PLATFORMS)]
    foreign += ["--implementation", "cp", "--python-version", VERSION]
    if not python.exists():
        run(*install, *foreign, f"{wheel}[test]")
        (home / "bin").mkdir(parents=True)
        (home / "pyvenv.cfg").write_text(f"home = {system}/usr/bin\nversion = {VERSION}\n")
        command = f'{emulator} -0 "$0" -L {system} {system}/usr/bin/python{VERSION}'
        python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        python.chmod(0o755)
    else:
        shutil.rmtree(packages / "nnburst")
        run(*install, *foreign, "--no-deps", wheel)
    lay_out(sdist, packages / "nnburst", folder / "tree")
    return python


def main() -> int:
    """Fill the folder and run the tests. A second run uses the same folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=("emulator", "test"), help="the emulator alone, or run unit tests, too")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest, instead of these tests")
    options = parser.parse_args()
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if missing or not KEYRING.exists():
        sys.exit(f"aarch64: needs {missing or KEYRING}: a machine with Debian's packages")
    folder = options.folder.resolve()
    claim(folder)
    if options.what == "emulator":
        print(make_emulator(folder))
        return 0
    # Keep compiled modules, because compiling takes long.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["NNBURST_TEST_PATIENCE"] = str(LIMIT * 3 // 4)
    command: list[str | Path] = [make_python(folder), "-m", "pytest", "-q", "-o", f"timeout={LIMIT}"]
    command += ["-p", "no:cacheprovider", "-m", "not (nightly or soak)"]
    command += [part for test in UNLIKE for part in ("--deselect", test)]
    return subprocess.run([*command, *(options.arguments or TESTS)], cwd=folder / "tree", env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
