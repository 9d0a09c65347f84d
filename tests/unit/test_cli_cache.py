"""`nnburst cache`: what it shows, what it removes, and its exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import nnburst
from nnburst.cache import Cache
from nnburst.cli import main


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))


def compile_into(directory: Path, seed: int, *, encrypt: bool = False) -> None:
    b = nnburst.ModelBuilder()
    weights = np.random.default_rng(seed).normal(size=(50, 50)).astype(np.float32)
    b.output("y", b.fully_connected(b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 50)), weights))
    with nnburst.in_process() as service, nnburst.Compilation(b.build(), service.devices) as compilation:
        compilation.set_caching_auto(directory, always=True, encrypt=encrypt)
        compilation.finish()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for seed in (1, 2, 2):
        compile_into(tmp_path / "c", seed, encrypt=seed == 2)
    return tmp_path / "c"


def call(directory: Path, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["cache", "--dir", str(directory), *arguments])
    assert result.exit_code == code, result.output
    return result


def listed(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call(directory, "ls", "--json").output)["entries"]
    return found


def test_ls_shows_what_is_there(directory: Path) -> None:
    rows = listed(directory)
    assert len(rows) == 2
    assert {row["device"] for row in rows} == {"nnburst-reference"}
    assert not any(row["stale"] or row["pinned"] for row in rows)
    assert all(0 < row["created"] <= row["used"] for row in rows)
    text = call(directory, "ls").output
    assert "2 entries" in text
    assert rows[0]["entry"][:12] in text


HEADERS = {
    "kinds that do not exist": {12: 7},
    "another number of files": {16: 3},
    "another index": {14: 1},
    "all models": {12: 1},
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS.keys())
@pytest.mark.parametrize("quick", [False, True])
def test_verify_believes_nothing_that_a_header_says(directory: Path, change: dict[int, int], quick: bool) -> None:
    bad, _ = sorted(directory.glob("objects/*/*"))
    for name in ("model.00", "data.00"):
        with open(bad / name, "r+b") as file:
            for offset, value in change.items():
                file.seek(offset)
                file.write(bytes([value]))
    options = ["--quick"] if quick else []
    found = call(directory, "verify", *options, code=0 if quick and 14 in change else 1).output
    if not (quick and 14 in change):
        assert "2 entries, 1 not good" in found
    call(directory, "verify", "--fix", code=1)
    assert "1 entries, 0 not good" in call(directory, "verify").output
    assert not bad.exists()


@pytest.mark.parametrize(
    "value", ["1000000000000000000", "1" + "0" * 30, "-1", "1e400", "NaN", "[]", r'"\\ud800\\u001b[2J"']
)
@pytest.mark.parametrize("name", ["created", "nbytes", "used", "compile_ms", "version"])
def test_manifest_that_says_odd_numbers(directory: Path, name: str, value: str) -> None:
    manifest = next(iter(directory.glob("objects/*/*/MANIFEST")))
    manifest.write_text(re.sub(rf'"{name}":[^,}}]*', f'"{name}":{value}', manifest.read_text()))
    assert "2 entries" in call(directory, "ls").output
    assert len(listed(directory)) == 2
    said = CliRunner().invoke(main, ["cache", "--dir", str(directory), "verify"])
    assert (said.exit_code, "2 entries" in said.output) in ((0, True), (1, True))  # its device may not be known
    compile_into(directory, 3)
    call(directory, "prune", "--max-age", "1d", "--dry-run")
    assert len(listed(directory)) == 3


def test_ls_of_nothing_and_of_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir(mode=0o700)
    assert "0 entries" in call(tmp_path / "none", "ls").output
    unused = CliRunner(env={"NNBURST_CACHE_DIR": str(tmp_path / "not yet")}).invoke(main, ["cache", "ls"])
    assert "0 entries" in unused.output
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    call(tmp_path / "open", "ls", code=3)


@pytest.mark.parametrize("quick", [(), ("--quick",)])
def test_verify_finds_what_is_not_good(directory: Path, quick: tuple[str, ...]) -> None:
    assert "0 not good" in call(directory, "verify", *quick).output
    (first, *_) = directory.glob("objects/*/*/data.00")
    os.truncate(first, first.stat().st_size - 1)
    result = call(directory, "verify", *quick, code=1)
    assert "BAD_LENGTH" in result.output
    assert "2 entries, 1 not good" in result.output
    assert "removed" in call(directory, "verify", "--fix", *quick, code=1).output
    assert "1 entries, 0 not good" in call(directory, "verify", *quick).output


def test_only_a_whole_verification_sees_a_changed_byte(directory: Path) -> None:
    (first, *_) = directory.glob("objects/*/*/data.00")
    raw = bytearray(first.read_bytes())
    raw[-100] ^= 1
    first.write_bytes(raw)
    call(directory, "verify", "--quick")
    entry = first.parent.name[:12]
    assert "BAD_MAC" in call(directory, "verify", entry, code=1).output
    call(directory, "verify", "feedbeef", code=2)


def test_verify_without_the_trust_store_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "file"))
    result = call(directory, "verify", code=4)
    assert "only headers and lengths" in result.output


def test_pin_and_prune(directory: Path) -> None:
    one, two = (row["entry"] for row in listed(directory))
    assert "1 entries pinned" in call(directory, "pin", one[:10]).output
    assert "would go" in call(directory, "prune", "--all", "--dry-run").output
    assert len(listed(directory)) == 2
    assert "all: 1 entries" in call(directory, "prune", "--all").output
    assert [row["entry"] for row in listed(directory)] == [one]
    call(directory, "unpin", one)
    call(directory, "pin", two, code=2)
    assert "all: 1 entries" in call(directory, "prune", "--all").output
    assert "nothing to remove" in call(directory, "prune").output


def test_prune_by_size_and_age(directory: Path) -> None:
    assert "nothing to remove" in call(directory, "prune", "--max-bytes", "1G", "--max-age", "30d").output
    assert "nothing to remove" in call(directory, "prune", "--stale").output
    assert "evicted: 2" in call(directory, "prune", "--max-bytes", "100").output
    for wrong in ("lots", "5x", "-1"):
        call(directory, "prune", "--max-bytes", wrong, code=2)


def test_prune_leaves_what_is_in_use(directory: Path) -> None:
    cache = Cache(directory)
    used, other = cache.entries()
    kept = 1 + (used.entry[:2] == other.entry[:2])  # entries of one shard share a lock
    with contextlib.closing(cache.files_of(used)):
        assert f"{kept} entries are in use" in call(directory, "prune", "--all", code=1).output
    assert len(listed(directory)) == kept


def test_path_names_both_directories(directory: Path, tmp_path: Path) -> None:
    assert call(directory, "path").output.splitlines() == [f"cache {directory}", f"state {tmp_path / 'state'}"]


@pytest.mark.parametrize("command", ["ls", "verify", "path", "prune"])
def test_directory_that_does_not_exist_is_a_usage_error(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["cache", "--dir", str(tmp_path / "nope"), command])
    assert result.exit_code == 2
    assert "does not exist" in result.output
    assert not (tmp_path / "nope").exists()
