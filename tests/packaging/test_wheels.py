"""The wheels are what their names say, the same sources give the same bytes, and one wheel serves every CPython."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from installed import PYTHONS, interpreter
from wheels import EXTENSION

from nnburst._version import VERSION
from support import ROOT

pytest.importorskip("ziglang", reason="needs what `make wheels` installs")

PROGRAM = """
import numpy as np, nnburst
x = np.arange(4, dtype=np.float32)
b = nnburst.ModelBuilder()
b.output("y", b.relu(b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (4,))))
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
    (wheel,) = built.glob(f"*-cp311-abi3-{platform}.whl")
    return wheel


@pytest.mark.parametrize("platform", PLATFORMS)
def test_wheel_is_what_its_name_says(platform: str, built: Path) -> None:
    command = [Path(sys.executable).with_name("auditwheel"), "show", wheel_for(platform, built)]
    said = " ".join(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert f'platform tag: "{platform}"' in said


@pytest.mark.parametrize("platform", PLATFORMS)
def test_wheel_holds_the_package_and_its_module_and_nothing_that_builds_it(platform: str, built: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "nnburst"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    package = {name for name in listed.split() if not name.endswith(".h")}
    with zipfile.ZipFile(wheel_for(platform, built)) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == package | {EXTENSION}


@pytest.mark.parametrize("url", ["", "https://host.test/nnburst"])
def test_page_is_one_that_a_registry_takes(url: str, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "packaging" / "wheels.py", "--only", "none", "--out", tmp_path]
    subprocess.run(command, check=True, env=os.environ | {"NNBURST_URL": url})
    (sdist,) = tmp_path.glob("*.tar.gz")
    twine = [Path(sys.executable).with_name("twine"), "check", "--strict", sdist]
    assert b"PASSED" in subprocess.run(twine, check=True, capture_output=True).stdout
    shown = subprocess.run(["tar", "-xOf", sdist, "--wildcards", "nnburst-*/PKG-INFO"], check=True, capture_output=True)
    metadata = shown.stdout.decode()
    assert ("Project-URL: Source, https://host.test/nnburst\n" in metadata) == bool(url)
    assert not re.findall(r"\]\((?!https://host\.test/nnburst/)", metadata)


def test_parts_of_an_installation_have_versions(built: Path) -> None:
    parts = json.loads((built / "nnburst.cdx.json").read_text())
    components = [parts["metadata"]["component"], *parts["components"]]
    versions = {part["name"].lower(): part.get("version", "") for part in components}
    assert versions["nnburst"] == VERSION
    assert {"cffi", "numpy", "msgspec", "pycparser"} <= versions.keys()
    assert all(re.match(r"\d+\.", version) for version in versions.values()), versions


def test_same_sources_give_the_same_bytes(built: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again")
    assert sorted(file.name for file in again.iterdir()) == sorted(file.name for file in built.iterdir())
    for file in again.iterdir():
        assert file.read_bytes() == (built / file.name).read_bytes(), file.name


@pytest.mark.parametrize("version", PYTHONS)
def test_wheel_runs_in_a_fresh_environment(version: str, built: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no CPython {version} here")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    fresh = tmp_path / "venv" / "bin" / "python"
    install = "-m pip install --quiet --disable-pip-version-check --only-binary nnburst".split()
    wheel = wheel_for("manylinux_2_17_x86_64", built)
    subprocess.run([fresh, *install, wheel], check=True, env=os.environ | {"CC": "false"})
    done = subprocess.run([fresh, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
