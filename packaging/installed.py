"""Runs the tests on what is published, under each CPython at hand. See `make test-wheel`.

The tests are those of the sdist, and the package beside them is the wheel as pip has installed it: the commit that is
checked out. The tree may change meanwhile.

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
"""Tests of what the tree alone has."""


def claim(folder: Path) -> None:
    """Make the folder and keep it until this process ends: another run would take the package from its tests."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{folder} is in use by another run; wait for its end, or name another folder")


def build(folder: Path, tag: str) -> tuple[Path, Path]:
    """Build the sdist and the wheel of one platform, and return both."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, ROOT / "packaging" / "wheels.py", "--only", tag, "--out", folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def lay_out(sdist: Path, package: Path, tree: Path) -> None:
    """Unpack the sdist, with the installed package in place of its own."""
    shutil.rmtree(tree, ignore_errors=True)
    unpack(sdist, tree.with_name("unpacked")).rename(tree)
    shutil.rmtree(tree / "nnburst")
    (tree / "nnburst").symlink_to(package)


def interpreter(version: str) -> Path | None:
    """Return the path of a CPython of this version that runs; a name on the PATH may be a mere shim."""
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
    """Make the environment if it is not there, put the wheel into it, and return where the package is."""
    python = home / "bin" / "python"
    if not python.exists():
        run(base, "-m", "venv", home)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "uninstall", "--yes", "nnburst")
    run(*pip, "install", "--only-binary", "nnburst", f"{wheel}[test]", env=os.environ | {"CC": "false"})
    return Path(run(python, "-c", "import nnburst; print(nnburst.__path__[0])", cwd=home).strip())


def main() -> int:
    """Run the tests under one Python after the other; what failed under any of them is the exit status."""
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
