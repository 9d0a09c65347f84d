"""The wheels are what their names say, the same sources give the same bytes, and one wheel serves every CPython."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ziglang", reason="needs what `make wheels` installs")

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PROGRAM = """
import numpy as np, nnburst
x = np.arange(4, dtype=np.float32)
b = nnburst.ModelBuilder()
b.output("y", b.add(nnburst.OperationType.RELU, [b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (4,))]))
with nnburst.Session(b.build()) as session:
    assert session.run(None, {"x": x - 2})[0].tolist() == [0, 0, 0, 1]
print(nnburst.__file__)
"""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


PLATFORMS = tuple(f"{libc}_{arch}" for arch in ("x86_64", "aarch64") for libc in ("manylinux_2_17", "musllinux_1_2"))


def build(out: Path) -> Path:
    command = [sys.executable, ROOT / "packaging" / "wheels.py", "--out", out]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


def wheel_for(platform: str, built: Path) -> Path:
    (wheel,) = built.glob(f"*-cp310-abi3-{platform}.whl")
    return wheel


@pytest.mark.parametrize("platform", PLATFORMS)
def test_wheel_is_what_its_name_says(platform: str, built: Path) -> None:
    command = [Path(sys.executable).with_name("auditwheel"), "show", wheel_for(platform, built)]
    said = " ".join(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert f'platform tag: "{platform}"' in said


def test_same_sources_give_the_same_bytes(built: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again")
    assert sorted(file.name for file in again.iterdir()) == sorted(file.name for file in built.iterdir())
    for file in again.iterdir():
        assert file.read_bytes() == (built / file.name).read_bytes(), file.name


def interpreter(version: str) -> str | None:
    """Return the path of a CPython of this version that runs; a name on the PATH may be a mere shim."""
    found = shutil.which(f"python{version}")
    asked = [found, "-c", "import sys, venv, ensurepip; print(sys.executable)"]
    environment = os.environ | {"PYENV_VERSION": os.environ.get("PYENV_VERSION", "") or _shimmed(version)}
    done = subprocess.run(asked, capture_output=True, text=True, env=environment) if found else None
    return done.stdout.strip() if done and not done.returncode else None


def _shimmed(version: str) -> str:
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next((folder.name for folder in sorted(root.glob(f"{version}.*"))), "system")


@pytest.mark.parametrize("version", PYTHONS)
def test_wheel_runs_in_a_fresh_environment(version: str, built: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no CPython {version} here")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    fresh = tmp_path / "venv" / "bin" / "python"
    install = [
        fresh,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary",
        "nnburst",
        wheel_for("manylinux_2_17_x86_64", built),
    ]
    subprocess.run(install, check=True, env=os.environ | {"CC": "false"})
    done = subprocess.run([fresh, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
