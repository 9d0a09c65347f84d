"""The client's cache directory when things go wrong: death, races, full disks, links, odd surroundings."""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import nnburst
from nnburst.cache import directory as _directory
from nnburst.cache.directory import Cache, Limits, Pruned
from nnburst.cache.files import default_cache_directory, default_state_directory, lock
from nnburst.cache.names import entry_name
from nnburst.cache.reasons import CacheReason, CacheRejected
from nnburst.cache.trust_store import TrustStore
from nnburst.cli import main
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.registry import create_device
from nnburst.errors import InvalidArgument
from nnburst.runtime.compile.cache_sources import DirectoryCache, Job
from nnburst.runtime.compile.caching import compile_with_cache
from support import ROOT
from support.cache_worker import build, compile_once
from support.caches import at_most
from support.users import beside, in_forked_child
from support.waiting import PATIENCE, meanwhile, together, until

COUNTS = (1, 1)
R = CacheReason


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    for variable in ("NNBURST_CACHE", "NNBURST_CACHE_DIR", "NNBURST_CACHE_MAX_BYTES"):
        monkeypatch.delenv(variable, raising=False)


def worker(directory: Path, step: str = "-", what: str = "-", rounds: int = 1) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "cache_worker.py"), str(directory), step, what, str(rounds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def outcomes(process: subprocess.Popen[str], code: int = 0) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out.split()


def fill(cache: Cache, entry: str, size: int = 1000, *, used: int = 1000) -> Path:
    """Put an entry into a directory without asking a device; return its place."""
    staged, generation = cache.stage(entry, COUNTS), os.urandom(16)
    with contextlib.closing(staged):
        os.pwrite(staged.data_fds[0], bytes(size), 0)
        staged.publish(generation)
        staged.finish(generation)
    made = Path(cache.path, "objects", entry[:2], f"{entry}.{generation.hex()}")
    os.utime(made, (used, used))
    return made


def name(n: int) -> str:
    return f"{n:064x}"


@pytest.mark.check
@pytest.mark.parametrize("step", ["staged", "published", "confirmed"])
def test_THR_22_killed_at_a_step_of_a_publication(tmp_path: Path, step: str) -> None:
    directory = tmp_path / "c"
    outcomes(worker(directory, step, "kill"), -signal.SIGKILL)
    first, second = outcomes(worker(directory)), outcomes(worker(directory))
    assert first == (["SAVED/SAVED/-"] if step == "staged" else ["HIT/HIT/-"])
    assert second == ["HIT/HIT/-"]


@pytest.mark.check
def test_THR_27_second_process_waits_and_loads(tmp_path: Path) -> None:
    directory = tmp_path / "c"

    def wait_for(step: str) -> None:
        until(lambda: Path(f"{directory}.{step}").exists(), step, 2 * PATIENCE)

    first = worker(directory, "staged", "hold")
    wait_for("staged")  # it has compiled, and nobody sees it yet
    others = [worker(directory, "waits", "tell") for _ in range(2)]
    wait_for("waits")
    Path(f"{directory}.go").touch()
    assert outcomes(first) == ["SAVED/SAVED/-"]
    assert [outcomes(other) for other in others] == [["HIT/HIT/-"]] * 2
    assert len(list(directory.glob("objects/*/*"))) == 1


def test_THR_27_threads_compile_once(tmp_path: Path) -> None:
    """Also those that look before the entry is there and come to the lock after it was let go."""
    found: list[str] = []
    model, cache = build(), Cache(tmp_path / "c")
    together(8, lambda n: found.append(compile_once(cache, model)))
    assert sorted(found) == ["HIT/HIT/-"] * 7 + ["SAVED/SAVED/-"]


def test_entry_that_came_between_look_up_and_lock_is_used(tmp_path: Path) -> None:
    cache, model = Cache(tmp_path / "c"), build()
    real, first = cache.stage, iter([True])

    def stage(*args: Any, **options: Any) -> Any:
        if next(first, False):
            assert compile_once(Cache(tmp_path / "c"), model) == "SAVED/SAVED/-"
        return real(*args, **options)

    cache.stage = stage  # type: ignore[method-assign]
    assert compile_once(cache, model) == "HIT/HIT/-"


def test_THR_27_wait_leaves_time_to_compile(tmp_path: Path) -> None:
    """At most half of what is left until the deadline; then the model is compiled and not saved."""
    cache, real, waits = Cache(tmp_path / "c"), Cache._lock, list[float]()

    def lock(entry: str, kind: str, *, shared: bool, timeout: float = 0.0) -> Any:
        waits.append(timeout)
        return real(cache, entry, kind, shared=shared)

    cache._lock = lock  # type: ignore[method-assign]
    asked = CompileJob(deadline_ns=time.monotonic_ns() + 40_000_000_000)
    job = Job(create_device("nnburst-reference"), build(), asked)
    source = DirectoryCache(cache, bytes(32))
    with contextlib.closing(Cache(tmp_path / "c").stage(entry_name(source.cache_key(job, b"")), COUNTS)):
        prepared, report = compile_with_cache(job, source)
    assert 0 < max(waits) <= 20
    assert (report.outcome, report.reason) == ("NOT_SAVED", R.BUSY)
    prepared.close()


@pytest.mark.check
@pytest.mark.parametrize("rounds", [20, pytest.param(100, marks=pytest.mark.nightly)])
def test_THR_27_two_processes_race_for_one_token(tmp_path: Path, rounds: int) -> None:
    """Rounds of compile or restore and, half of the time, remove: every result is right."""
    both = [worker(tmp_path / "c", rounds=rounds) for _ in range(2)]
    found = [outcomes(process) for process in both]
    assert [len(lines) for lines in found] == [rounds, rounds]
    kinds = {line.split("/")[0] for lines in found for line in lines}
    assert {"HIT", "SAVED"} <= kinds
    assert not list((tmp_path / "c" / "staging").iterdir())


@contextlib.contextmanager
def small_disk(place: Path, size: str, *options: str) -> Iterator[Path]:
    """A file system of that size; skips where that is not allowed."""
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", "mode=700", *options)), "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("kib", [4, 16, 64, 128, 256, 320, 340, 352, 360, 368, 384, 400, 448])
def test_THR_20_disk_is_full_at_every_write(tmp_path: Path, kib: int) -> None:
    """The sizes fall into every step: directories, files. The compilation succeeds in all."""
    with small_disk(tmp_path / "disk", f"{kib}k") as disk:
        cache = Cache(disk / "c")
        outcome = compile_once(cache, build())
        assert outcome.split("/")[0] in ("SAVED", "NOT_SAVED"), outcome
        if outcome.startswith("NOT_SAVED"):
            assert outcome.split("/")[1] in ("DISK_FULL", "IO_ERROR")
            assert not list((disk / "c").glob("objects/*/*"))


def test_read_only_directory(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        cache = Cache(disk / "c")
        assert compile_once(cache, build()) == "NOT_SAVED/READ_ONLY/-"
        assert compile_once(cache, build()) == "NOT_SAVED/READ_ONLY/-"


def moved_away(file: Path, victim: Path) -> None:
    moved = victim.with_name("moved")
    file.parent.rename(moved)
    file.parent.symlink_to(moved)


STRANGE_FILES: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda file, victim: file.unlink() or file.symlink_to(victim),
    "second name": lambda file, victim: os.link(file, victim.with_name("other")),
    "directory": lambda file, victim: file.unlink() or file.mkdir(),
    "fifo": lambda file, victim: file.unlink() or os.mkfifo(file, 0o600),
    "open to others": lambda file, victim: file.chmod(0o666),
    "link to directory": moved_away,
    "none": lambda file, victim: file.unlink(),
}


@pytest.mark.parametrize("what", STRANGE_FILES)
def test_THR_14_15_links_and_strange_files_are_not_touched(tmp_path: Path, what: str) -> None:
    cache, victim = Cache(tmp_path / "c"), tmp_path / "victim"
    assert compile_once(cache, build()).startswith("SAVED")
    victim.write_text("precious")
    (file,) = (tmp_path / "c").glob("objects/*/*/data.00")
    STRANGE_FILES[what](file, victim)
    assert compile_once(cache, build()).startswith("SAVED")
    assert what == "directory" or compile_once(cache, build()) == "HIT/HIT/-"  # a directory is not removed
    assert victim.read_text() == "precious"


def test_THR_23_everything_is_private(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        compile_once(Cache(tmp_path / "c"), build())
    finally:
        os.umask(previous)
    for path in (tmp_path / "c").rglob("*"):
        allowed = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) & ~allowed == 0, path
    assert bytes(32).hex() not in "".join(map(str, (tmp_path / "c").rglob("*")))


def test_trust_store_that_is_lost_makes_a_miss_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "c")
    assert compile_once(cache, build()) == "SAVED/SAVED/-"
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "another"))
    assert compile_once(cache, build()) == "SAVED/SAVED/NO_ROW"
    assert compile_once(cache, build()) == "HIT/HIT/-"
    (tmp_path / "bad").write_text("a file")
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "bad"))
    assert compile_once(cache, build()) == "REJECTED/NO_STORE/NO_STORE"


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", Limits(max_bytes=10_000))
    for n in range(8):
        fill(cache, name(n), 1000, used=100 - n)
    assert cache.prune() == Pruned(0, 0, 0)
    assert cache.prune(max_bytes=5000) == Pruned(4, 4000, 0)
    assert {info.entry for info in cache.entries()} == {name(n) for n in range(4)}
    fill(cache, name(9), 0)
    assert cache.prune(max_bytes=0) == Pruned(5, 4000, 0)


def test_eviction_never_breaks_a_load(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    fill(cache, name(3), 5000)
    with contextlib.closing(next(iter(cache.look_up(name(3), COUNTS)))) as opened:
        assert cache.prune(max_bytes=0) == Pruned(0, 0, 1)
        assert len(os.pread(opened.data_fds[0], 9000, 0)) == 5000
    assert cache.prune(max_bytes=0) == Pruned(1, 5000, 0)
    with pytest.raises(CacheRejected) as error:
        next(iter(cache.look_up(name(3), COUNTS)))
    assert error.value.reason is R.MISSING


@pytest.mark.check
def test_loads_and_evictions_at_once(tmp_path: Path) -> None:
    cache, model = Cache(tmp_path / "c"), build()
    with meanwhile(lambda: cache.prune(max_bytes=0)):
        kinds = {compile_once(cache, model).split("/")[0] for _ in range(30)}
    assert kinds <= {"HIT", "SAVED", "NOT_SAVED", "REJECTED"}


def test_limit_on_the_number_of_entries_is_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", Limits(max_entries=5))
    for n in range(12):
        fill(cache, name(n))
        cache.enforce_limits()
    assert 4 <= len(cache.entries()) <= 5


def test_third_refusal_of_a_device_ends_the_attempts(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    for _ in range(3):
        cache.stage(name(1), COUNTS).close()
        cache.decline(name(1), R.DECLINED)
    with pytest.raises(CacheRejected) as error:
        cache.stage(name(1), COUNTS)
    assert error.value.reason is R.DECLINED
    cache.stage(name(2), COUNTS).close()


def test_entry_that_somebody_else_writes_is_waited_for_and_then_left(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    with contextlib.closing(cache.stage(name(1), COUNTS)), pytest.raises(CacheRejected) as error:
        cache.stage(name(1), COUNTS, timeout=0.05)
    assert error.value.reason is R.BUSY
    cache.stage(name(1), COUNTS).close()


# ---- its surroundings in every odd state ---------------------------------------------------------------------------


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
    for options in ({"cache_key": bytes(32)}, {"cache_dir": tmp_path / "c"}):
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


def test_privileged_process_heeds_no_variables_that_another_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CACHE_DIR", "/theirs"), ("STATE_DIR", "/theirs"), ("CACHE_MAX_BYTES", "77")):
        monkeypatch.setenv(f"NNBURST_{name}", value)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, "/theirs")
    assert default_cache_directory() == default_state_directory() == Path("/theirs")
    user = os.getuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=f"/home/{uid - user}"))
    assert default_cache_directory() == Path("/home/1/.cache/nnburst/v1")
    assert default_state_directory() == Path("/home/1/.local/state/nnburst/v1")
    assert Limits.from_environment() == Limits()


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
