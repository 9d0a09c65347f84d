"""Run the tests of the sdist on the installed wheel, under each available CPython. See `make test-wheel`.

The sdist and the wheel are built from the commit that is checked out. The working tree may change during the run.

    python packaging/installed.py --python 3.12 build/wheel tests/unit/test_core.py
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from wheels import ROOT, run, unpack

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TESTS = ("tests/unit", "tests/faults")
UNLIKE = ("tests/unit/test_docs.py::test_links_and_paths_of_a_page_exist",)
"""Tests to leave out: they read files that are not in the sdist."""


def claim(folder: Path) -> None:
    """Create the folder and lock it until this process ends, so that no other run replaces the package."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{folder} is in use by another run; wait for its end, or name another folder")


def build(folder: Path, tag: str) -> tuple[Path, Path]:
    """Build the sdist and the wheel of one platform. Return their paths."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, ROOT / "packaging" / "wheels.py", "--only", tag, "--out", folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def lay_out(sdist: Path, package: Path, tree: Path) -> None:
    """Unpack the sdist, and replace its package by the installed one."""
    shutil.rmtree(tree, ignore_errors=True)
    unpack(sdist, tree.with_name("unpacked")).rename(tree)
    shutil.rmtree(tree / "nnburst")
    (tree / "nnburst").symlink_to(package)


def interpreter(version: str) -> Path | None:
    """Return the path of a CPython of this version that works. A name on the PATH may be only a shim."""
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    shimmed = next((folder.name for folder in sorted(installed.glob(f"{version}.*"))), "system")
    done = subprocess.run(
        [found, "-c", "import sys, venv, ensurepip; print(sys.executable)"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYENV_VERSION": shimmed},
    )
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def install(wheel: Path, base: Path, home: Path) -> Path:
    """Create the environment if necessary, install the wheel, and return the path of the package."""
    python = home / "bin" / "python"
    if not python.exists():
        run(base, "-m", "venv", home)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "uninstall", "--yes", "nnburst")
    run(*pip, "install", "--only-binary", "nnburst", f"{wheel}[test]", env=os.environ | {"CC": "false"})
    return Path(run(python, "-c", "import nnburst; print(nnburst.__path__[0])", cwd=home).strip())


def main() -> int:
    """Run the tests under each Python in turn. The exit status is 0 only if they pass under all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", metavar="VERSION", action="append", help="instead of each that is at hand")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=f"for pytest, instead of {' '.join(TESTS)}")
    options = parser.parse_args()
    folder = options.folder.resolve()
    claim(folder)
    bases = {version: interpreter(version) for version in options.python or PYTHONS}
    for version in options.python or ():
        if bases[version] is None:
            sys.exit(f"no CPython {version} with venv and ensurepip is on the PATH")
    sdist, wheel = build(folder / "dist", f"manylinux_2_17_{platform.machine()}")
    failed = 0
    for version, base in bases.items():
        if base is None:
            continue
        home = folder / version
        package = install(wheel, base, home)
        lay_out(sdist, package, home / "tree")
        print(f"CPython {version}: {wheel.name} in {package}", flush=True)
        command = [home / "bin" / "python", "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
        command += ["-m", "not (nightly or soak)"]
        command += [part for test in UNLIKE for part in ("--deselect", test)]
        failed |= subprocess.run([*command, *(options.arguments or TESTS)], cwd=home / "tree").returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
