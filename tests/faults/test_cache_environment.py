"""A cache directory and its surroundings in every odd state: nothing of it makes a compilation fail."""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_cache_directory import COUNTS, fill, name

import nnburst
from nnburst.cache import directory as _directory
from nnburst.cache.directory import Cache, Limits
from nnburst.cache.files import default_cache_directory, default_state_directory, lock
from nnburst.cache.reasons import CacheReason, CacheRejected
from nnburst.cache.trust_store import TrustStore
from nnburst.cli import main
from nnburst.errors import InvalidArgument
from support.cache_worker import build, compile_once
from support.caches import at_most
from support.users import beside, in_forked_child
from support.waiting import until

R = CacheReason


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    for variable in ("NNBURST_CACHE", "NNBURST_CACHE_DIR", "NNBURST_CACHE_MAX_BYTES"):
        monkeypatch.delenv(variable, raising=False)


# ---- where it is ----------------------------------------------------------------------------------------------------


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a user id that nobody knows."""

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "NNBURST_STATE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_user_without_a_home_compiles(tmp_path: Path) -> None:
    for options in ({"token": bytes(32)}, {"cache_dir": tmp_path / "c"}):
        with nnburst.in_process() as service, service.session(build(), **options) as session:  # type: ignore[arg-type]
            assert (session.cache_report.outcome, session.cache_report.reason) == ("NOT_SAVED", R.NO_STORE)


@pytest.mark.usefixtures("homeless")
def test_user_without_a_home_is_told_by_the_commands() -> None:
    for command in (["ls"], ["prune"], ["path"]):
        done = CliRunner().invoke(main, ["cache", *command])
        assert (done.exit_code, done.exception.__class__) == (3, SystemExit), done.output
        assert "NNBURST_CACHE_DIR" in done.output


@pytest.mark.parametrize("home", ["", "relative"])
def test_home_that_is_no_directory_is_not_the_root(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    for variable in ("NNBURST_STATE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", home)
    real = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert default_cache_directory() == real / ".cache/nnburst/v1"
    assert default_state_directory() == real / ".local/state/nnburst/v1"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_directory() == real / ".cache/nnburst/v1"


def test_path_that_is_none_is_an_argument_error(tmp_path: Path) -> None:
    with nnburst.in_process() as service:
        with pytest.raises(InvalidArgument, match="NUL"):
            service.session(build(), cache_dir="a\0b")
        with nnburst.nnapi.Compilation(build(), service) as compilation, pytest.raises(InvalidArgument, match="NUL"):
            compilation.set_caching("a\0b", bytes(32))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("2G", 2 << 30),
        ("500m", 500 << 20),
        ("1.5 KiB", 1536),
        ("77", 77),
        ("²", 2 << 30),
        ("-1", 2 << 30),
        ("x", 2 << 30),
        ("9" * 400, 2 << 30),
    ],
)
def test_limit_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str, expected: int
) -> None:
    monkeypatch.setenv("NNBURST_CACHE_MAX_BYTES", given)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert Limits.from_environment().max_bytes == expected
    assert len(caplog.records) == (given in ("²", "-1", "x", "9" * 400))


def test_directories_above_are_private_whatever_the_mask_is(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        assert compile_once(Cache(tmp_path / "a" / "b" / "c"), build()).startswith("SAVED")
        TrustStore(tmp_path / "s" / "t" / "u")
    finally:
        os.umask(previous)
    for place in ("a", "a/b", "a/b/c", "s", "s/t", "s/t/u"):
        assert stat.S_IMODE((tmp_path / place).stat().st_mode) == 0o700, place


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_THR_14_directory_of_others_and_a_link_in_it_are_not_touched(tmp_path: Path) -> None:
    directory, victim = tmp_path / "c", tmp_path / "victim"
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    victim.write_text("precious")
    for target in (victim, tmp_path / "new"):
        (directory / "declined").symlink_to(target)
        assert compile_once(Cache(directory), build()) == "NOT_SAVED/UNSAFE_PATH/-"
        Cache(directory).decline(name(1), R.DECLINED)
        assert [path.name for path in directory.iterdir()] == ["declined"]
        (directory / "declined").unlink()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "new").exists()


DECLINED: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda file, victim: file.symlink_to(victim),
    "a directory": lambda file, victim: file.mkdir(),
    "garbage": lambda file, victim: file.write_bytes(os.urandom(5000)),
    "a word that is no reason": lambda file, victim: file.write_text(f"{name(1)} BECAUSE\n{name(1)}\n" * 4),
}


@pytest.mark.parametrize("make", DECLINED.values(), ids=DECLINED.keys())
def test_THR_14_list_of_what_was_declined_that_makes_no_sense_keeps_nothing_from_being_saved(
    tmp_path: Path, make: Callable[[Path, Path], object]
) -> None:
    cache, victim = Cache(tmp_path / "c"), tmp_path / "victim"
    fill(cache, name(1))
    victim.write_text("precious")
    make(tmp_path / "c" / "declined", victim)
    for n in (1, 2):
        cache.decline(name(n), R.DECLINED)
        fill(cache, name(n))
    assert victim.read_text() == "precious"
    assert len(cache.entries()) == 2


def test_list_of_what_was_declined_begins_anew_when_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_directory, "_MOST_DECLINED", 300)
    cache = Cache(tmp_path / "c")
    for n in range(20):
        cache.decline(name(n), R.DECLINED)
        assert not (tmp_path / "c" / "declined").exists() or (tmp_path / "c" / "declined").stat().st_size <= 300


# ---- the entries ----------------------------------------------------------------------------------------------------


STRANGE: dict[str, Callable[[Path], object]] = {
    "file": lambda objects: (objects / ".DS_Store").write_text("x"),
    "file like a shard": lambda objects: (objects / "0f").write_text("x"),
    "link": lambda objects: (objects / "0e").symlink_to("/"),
    "directory": lambda objects: (objects / "lost+found").mkdir(mode=0o777),
    "shard that others may write": lambda objects: (objects / "ab").mkdir() or (objects / "ab").chmod(0o777),
    "directory in a shard": lambda objects: (objects / "00" / "nothing").mkdir(),
    "entry without files": lambda objects: (objects / "00" / f"{name(99)}.{'0' * 32}").mkdir(mode=0o700),
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE.keys())
def test_stray_things_among_the_entries_are_passed_over(tmp_path: Path, make: Callable[[Path], object]) -> None:
    cache = Cache(tmp_path / "c", Limits(max_entries=3))
    fill(cache, name(1))
    make(tmp_path / "c" / "objects")
    for n in range(2, 8):
        fill(cache, name(n))
        cache.enforce_limits()
    assert 1 <= len(cache.entries()) <= 3
    done = CliRunner().invoke(main, ["cache", "--dir", str(tmp_path / "c"), "ls"])
    assert (done.exit_code, "used" in done.output) == (0, True)
    assert cache.prune(max_bytes=0).entries >= 2


def test_entry_that_is_written_late_counts_with_its_size(tmp_path: Path) -> None:
    """The client published empty files; what the device made of them is looked at when limits are."""
    cache = Cache(tmp_path / "c", Limits(max_bytes=20_000))
    made = fill(cache, name(1), 0)
    os.truncate(made / "data.00", 30_000)
    fill(cache, name(2), used=2000)
    cache.enforce_limits()
    assert {info.entry for info in cache.entries()} == {name(2)}


def test_hit_is_a_use(tmp_path: Path) -> None:
    """It keeps an entry from being the next to go."""
    cache = Cache(tmp_path / "c", Limits(max_entries=2))
    assert compile_once(cache, build()) == "SAVED/SAVED/-"
    (made,) = (tmp_path / "c").glob("objects/*/*")
    os.utime(made, (1000, 1000))
    assert [info.used for info in cache.entries()] == [1000]
    for n in (1, 2):
        fill(cache, name(n), used=2000)
    assert compile_once(cache, build()) == "HIT/HIT/-"
    assert cache.prune().entries == 2
    assert made.exists()


# ---- descriptors and locks ------------------------------------------------------------------------------------------


def test_no_descriptor_is_lost_where_there_are_too_few(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    fill(cache, name(1))
    before, failed = len(os.listdir("/proc/self/fd")), 0
    for more in range(14):
        with at_most(more):
            for attempt in (
                lambda: cache.stage(name(2), (3, 3)),
                lambda: next(cache.look_up(name(1), COUNTS)),  # type: ignore[call-overload]
            ):
                try:
                    opened = attempt()
                except CacheRejected as error:
                    assert error.reason is R.IO_ERROR
                    failed += 1
                else:
                    opened.close()
        # Without a descriptor to look with, those of files are closed by threads: their servers might not answer.
        until(lambda: len(os.listdir("/proc/self/fd")) == before, "every descriptor to be closed")
    assert failed > 10


def test_lock_does_not_outlive_its_holder_in_a_forked_child(tmp_path: Path) -> None:
    place = os.open(tmp_path, os.O_RDONLY)
    held = lock(place, "a", shared=False)
    assert held is not None
    with beside(None, contextlib.nullcontext):  # a child that was forked
        assert lock(place, "a", shared=False) is None
        held.close()
        again = lock(place, "a", shared=False)
        assert again is not None
        again.close()
    os.close(place)


def test_forked_child_does_not_let_go_of_the_lock_of_its_parent(tmp_path: Path) -> None:
    place = os.open(tmp_path, os.O_RDONLY)
    held = lock(place, "a", shared=False)
    assert held is not None
    in_forked_child(held.close)
    assert lock(place, "a", shared=False) is None
    held.close()
    os.close(place)


def test_directory_that_cannot_be_used_is_warned_of_once_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_directory, "_warned_of", set())
    for reason in (R.DISK_FULL, R.READ_ONLY, R.DISK_FULL, R.DECLINED):
        Cache(tmp_path).warn_of(reason)
    assert [record.levelname for record in caplog.records if record.levelname == "WARNING"] == ["WARNING"] * 2
    fd = os.open(tmp_path, os.O_RDONLY)
    Cache(fd).stage("a" * 64, (1, 1)).close()
    os.close(fd)


def test_remains_of_a_removal_that_was_killed_go_with_the_next_save(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    cache.stage("a" * 64, (1, 1)).close()
    staging = tmp_path / "c" / "staging"
    for left in ("trash-1", "1-old", "1-new"):
        (staging / left).mkdir()
        (staging / left / "model.00").write_bytes(b"x" * 100)
    os.utime(staging / "1-old", (0, 0))
    cache.stage("b" * 64, (1, 1)).close()
    assert [path.name for path in staging.iterdir()] == ["1-new"]
