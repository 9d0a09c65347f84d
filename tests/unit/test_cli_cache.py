"""`nnburst cache`: what it shows, what it removes, and its exit codes."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nnburst.cache.directory import Cache
from nnburst.cli import main


def save(cache: Cache, entry: str, used: int) -> None:
    """Put an entry of 1000 bytes into a directory without asking a device."""
    with contextlib.closing(cache.stage(entry, (1, 0))) as staged:
        os.pwrite(staged.model_fds[0], bytes(1000), 0)
        staged.publish(bytes(16))
        os.utime(Path(cache.path, "objects", entry[:2], f"{entry}.{'0' * 32}"), (used, used))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for entry, used in (("a" * 64, 2000), ("b" * 64, 1000)):
        save(Cache(tmp_path / "c"), entry, used)
    return tmp_path / "c"


def call(directory: Path, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["cache", "--dir", str(directory), *arguments])
    assert result.exit_code == code, result.output
    return result


def listed(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call(directory, "ls", "--json").output)["entries"]
    return found


def test_ls_shows_what_is_there_the_longest_unused_first(directory: Path) -> None:
    assert [(row["entry"][0], row["used"], row["nbytes"]) for row in listed(directory)] == [
        ("b", 1000, 1000),
        ("a", 2000, 1000),
    ]
    text = call(directory, "ls").output
    assert "2 entries" in text
    assert "a" * 12 in text


def test_ls_of_nothing_and_of_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir(mode=0o700)
    assert "0 entries" in call(tmp_path / "none", "ls").output
    unused = CliRunner(env={"NNBURST_CACHE_DIR": str(tmp_path / "not yet")}).invoke(main, ["cache", "ls"])
    assert "0 entries" in unused.output
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    call(tmp_path / "open", "ls", code=3)


def test_prune_by_size_and_of_all(directory: Path) -> None:
    assert "0 entries removed" in call(directory, "prune").output
    assert "0 entries removed" in call(directory, "prune", "--max-bytes", "1G").output
    assert "1 entries removed" in call(directory, "prune", "--max-bytes", "1.9 KiB").output
    assert [row["entry"] for row in listed(directory)] == ["a" * 64]
    assert "1 entries removed" in call(directory, "prune", "--all").output
    for wrong in ("lots", "5x", "-1"):
        call(directory, "prune", "--max-bytes", wrong, code=2)


def test_prune_leaves_what_is_in_use(directory: Path) -> None:
    with contextlib.closing(next(Cache(directory).look_up("a" * 64, (1, 0)))):  # type: ignore[call-overload]
        assert "1 entries are in use" in call(directory, "prune", "--all", code=1).output
    assert [row["entry"] for row in listed(directory)] == ["a" * 64]


def test_path_names_both_directories(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    assert call(directory, "path").output.splitlines() == [f"cache {directory}", f"state {tmp_path / 'state'}"]


@pytest.mark.parametrize("command", ["ls", "path", "prune"])
def test_directory_that_does_not_exist_is_a_usage_error(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["cache", "--dir", str(tmp_path / "nope"), command])
    assert result.exit_code == 2
    assert "does not exist" in result.output
    assert not (tmp_path / "nope").exists()
