"""The trust store when it is damaged, replaced or shared, and what it is asked before memory is."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst.cache import CacheReason, CacheRejected, TrustStore, device_cache, place_of, sealed_copy
from nnburst.cache.container import HEADER_SIZE, Header, overhead
from nnburst.cache.trust_store import EntryRecord
from nnburst.devices import DeviceCacheHome, caching
from support.caches import DATA, FINGERPRINT, MODEL, TOKEN, Rig, contents
from support.waiting import PATIENCE

R = CacheReason
DEVICE = "test-device"
OLD, NEW = b"o" * 16, b"n" * 16


def record(generation: bytes, live: bool) -> EntryRecord:
    return EntryRecord(TOKEN, DEVICE, generation, bytes(32), bytes(32), (), live, int(time.time()))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def spoil(state: Path) -> None:
    for path in state.glob("trust.sqlite3*"):
        path.write_bytes(os.urandom(8192))


def set_aside(state: Path) -> list[str]:
    return sorted(path.name for path in state.iterdir() if "damaged" in path.name and "sqlite3-" not in path.name)


# ---- damage, and what is none ---------------------------------------------------------------------------------------


def test_store_is_not_set_aside_for_want_of_descriptors(state: Path) -> None:
    first = TrustStore(state)
    first.put(record(OLD, True))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = 0
    for more in range(8):
        unused = os.dup(0)
        os.close(unused)
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused + more, hard))
        try:
            TrustStore(state).close()
        except CacheRejected as error:
            assert error.reason is R.NO_STORE
            refused += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert refused > 2
    assert set_aside(state) == []
    second = TrustStore(state)
    assert first.knows(TOKEN, DEVICE)
    assert second.knows(TOKEN, DEVICE)
    first.close()
    second.close()


def test_store_that_is_locked_is_not_set_aside(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TrustStore(state)
    first.put(record(OLD, True))
    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: real(*args, **{**options, "timeout": 0}))
    with first._using(), pytest.raises(CacheRejected, match="locked"):
        TrustStore(state)
    assert set_aside(state) == []
    first.close()


def test_store_that_somebody_else_repaired_is_not_set_aside(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage at the first look; at the second, under the lock, it is repaired and merely busy."""
    TrustStore(state).close()
    answers = iter([sqlite3.DatabaseError("malformed"), sqlite3.OperationalError("database is locked")])

    def connected(self: TrustStore, directory: int) -> Any:
        raise next(answers)

    with monkeypatch.context() as patch:
        patch.setattr(TrustStore, "_connected", connected)
        with pytest.raises(CacheRejected, match="locked"):
            TrustStore(state)
    assert set_aside(state) == []


def test_THR_07_store_that_is_set_aside_while_it_is_opened_is_made_anew(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TrustStore(state).close()
    look, moved = os.stat, []

    def stat(path: Any, **options: Any) -> os.stat_result:
        if path == "trust.sqlite3" and not moved:
            moved.append(os.replace(state / path, state / "aside"))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    with contextlib.closing(TrustStore(state)) as store:
        assert moved
        assert not store.knows(TOKEN, DEVICE)


def test_THR_07_services_that_find_damage_together_share_one_new_store(state: Path) -> None:
    TrustStore(state).close()
    spoil(state)
    stores: list[TrustStore] = []
    both = threading.Barrier(4)

    def open_it() -> None:
        both.wait(PATIENCE)
        stores.append(TrustStore(state))

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set_aside(state)) == 1
    stores[0].put(record(NEW, True))
    assert all(store.get(TOKEN, DEVICE, NEW) is not None for store in stores)
    stores[1].revoke(TOKEN, DEVICE)
    assert not any(store.knows(TOKEN, DEVICE) for store in stores)
    for store in stores:
        store.close()


@pytest.mark.parametrize("how", ["set aside", "removed", "directory removed"])
def test_THR_07_running_service_follows_a_store_that_was_replaced(state: Path, how: str) -> None:
    """Two services with two stores would each accept what the other has revoked."""
    first = TrustStore(state)
    first.put(record(OLD, True))
    if how == "set aside":
        for path in sorted(state.glob("trust.sqlite3*")):
            path.rename(path.with_name(path.name + ".damaged"))
    else:
        for path in list(state.iterdir()) if how == "directory removed" else list(state.glob("trust.sqlite3*")):
            path.unlink()
        if how == "directory removed":
            state.rmdir()
    second = TrustStore(state)
    assert not first.knows(TOKEN, DEVICE)
    second.put(record(NEW, True))
    assert first.get(TOKEN, DEVICE, NEW) is not None
    first.revoke(TOKEN, DEVICE)
    assert not second.knows(TOKEN, DEVICE)
    first.close()
    second.close()


def test_last_three_that_were_damaged_are_kept(state: Path) -> None:
    kept: list[str] = []
    for _ in range(5):
        TrustStore(state).close()
        spoil(state)
        TrustStore(state).close()
        kept.extend(name for name in set_aside(state) if name not in kept)
    assert len(kept) == 5
    assert set_aside(state) == kept[2:]
    assert not [path for path in state.iterdir() if any(path.name.startswith(name) for name in kept[:2])]


def test_damage_that_shows_while_it_runs_is_repaired(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrustStore(state)
    real, broken = TrustStore._got, iter([True])

    def got(self: TrustStore, *args: Any) -> Any:
        if next(broken, False):
            raise sqlite3.DatabaseError("database disk image is malformed")
        return real(self, *args)

    monkeypatch.setattr(TrustStore, "_got", got)
    with pytest.raises(CacheRejected) as error:
        store.get(TOKEN, DEVICE, OLD)
    assert error.value.reason is R.NO_STORE
    before = store._database
    store.put(record(OLD, True))
    assert store._database is not before  # opened and checked again
    assert store.get(TOKEN, DEVICE, OLD) is not None
    store.close()
    with pytest.raises(CacheRejected):
        store.knows(TOKEN, DEVICE)


# ---- one transaction ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", ["replaced", "revoked"])
def test_THR_07_confirming_brings_nothing_back(state: Path, meanwhile: str) -> None:
    """Whatever another service does between two transactions of `confirm` is what counts."""
    first, second = TrustStore(state), TrustStore(state)
    first.put(record(OLD, False))
    begun = 0

    def other() -> None:
        if meanwhile == "replaced":
            second.put(record(NEW, True))
        else:
            second.revoke(TOKEN, DEVICE)

    def trace(statement: str) -> None:
        nonlocal begun
        if statement.startswith("BEGIN"):
            begun += 1
            if begun == 2:
                other()

    first._database.set_trace_callback(trace)
    confirmed = first.confirm(TOKEN, DEVICE, OLD)
    first._database.set_trace_callback(None)
    if begun < 2:
        assert confirmed
        other()
    assert second.get(TOKEN, DEVICE, OLD) is None
    assert (second.get(TOKEN, DEVICE, NEW) is not None) == (meanwhile == "replaced")
    assert not first.confirm(TOKEN, DEVICE, OLD)
    first.close()
    second.close()


def test_THR_07_confirmed_is_the_only_one(state: Path) -> None:
    store = TrustStore(state)
    store.put(record(OLD, True))
    store.put(record(NEW, False))
    assert store.confirm(TOKEN, DEVICE, NEW)
    assert store.confirm(TOKEN, DEVICE, NEW)
    confirmed = store.get(TOKEN, DEVICE, NEW)
    assert confirmed is not None
    assert confirmed.live
    assert store.get(TOKEN, DEVICE, OLD) is None
    store.close()


# ---- memory ---------------------------------------------------------------------------------------------------------


def claim(path: Path, size: int) -> None:
    """Make a file that long, and have its header say so."""
    with open(path, "r+b") as file:
        file.truncate(size)
        file.seek(24)
        file.write(struct.pack("<QQ", size - overhead(), size))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were asked for, copy by copy."""
    sizes: list[int] = []
    real = sealed_copy._copied

    def copied(fd: int, header: Header, key: bytes) -> Any:
        sizes.append(header.payload)
        return real(fd, header, key)

    monkeypatch.setattr(sealed_copy, "_copied", copied)
    return sizes


@pytest.mark.parametrize("size", [700 << 20, 1000, 40_000])
@pytest.mark.parametrize(("kind", "index"), [("model", 0), ("model", 1), ("data", 0)])
def test_THR_17_21_recorded_length_counts_before_memory_is_asked_for(
    rig: Rig, asked: list[int], kind: str, index: int, size: int
) -> None:
    rig.save(fingerprint=FINGERPRINT)
    claim(rig.path(kind, index), size)
    assert rig.refusal() is R.BAD_LENGTH
    assert asked == []


def test_THR_17_21_file_that_grows_after_its_header_was_read(
    rig: Rig, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.save()
    real = device_cache.read_header

    def read_header(fd: int, most: int) -> Any:
        header = real(fd, most)
        os.ftruncate(fd, 700 << 20)
        return header

    with monkeypatch.context() as patch:
        patch.setattr(device_cache, "read_header", read_header)
        assert rig.refusal() is R.BAD_LENGTH
    assert asked == []
    rig.save()
    assert contents(rig.load()) == (MODEL, DATA)
    assert asked == [len(payload) for payload in (*MODEL, *DATA)]


def test_unknown_generation_is_not_copied(rig: Rig, asked: list[int]) -> None:
    rig.save()
    old = rig.snapshot()
    rig.save()
    for path, raw in old.items():
        path.write_bytes(raw)
    assert rig.refusal() is R.ROLLED_BACK
    assert asked == []


def test_copy_that_is_in_use_is_shared(rig: Rig, asked: list[int]) -> None:
    rig.save()
    first = rig.load()
    asked.clear()
    second = rig.load()
    assert asked == []
    assert contents(second) == (MODEL, DATA)
    for one, other in zip((*first.model, *first.data), (*second.model, *second.data), strict=True):
        assert np.frombuffer(one, np.uint8).ctypes.data == np.frombuffer(other, np.uint8).ctypes.data
        assert other.readonly
    array = np.frombuffer(second.data[0], np.uint8)
    del first, second, one, other
    rig.load()
    assert asked == [len(payload) for payload in MODEL]  # the array alone keeps the data file
    del array
    asked.clear()
    assert contents(rig.load()) == (MODEL, DATA)
    assert asked == [len(payload) for payload in (*MODEL, *DATA)]


@pytest.mark.parametrize(("kind", "index"), [("model", 0), ("model", 1), ("data", 0)])
def test_copy_that_is_in_use_does_not_hide_what_became_of_its_file(rig: Rig, kind: str, index: int) -> None:
    rig.save()
    held = rig.load()
    path = rig.path(kind, index)
    before, spoilt = path.stat().st_ctime_ns, rig.bytes_of(kind, index)
    spoilt[HEADER_SIZE + 3] ^= 1
    while path.stat().st_ctime_ns == before:  # as fine as the clock of the file system is
        path.write_bytes(spoilt)
    assert rig.refusal() is R.BAD_MAC
    assert contents(held) == (MODEL, DATA)


def test_copy_that_is_in_use_is_not_taken_for_a_later_save_within_a_tick_of_the_clock(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstat

    def fstat(fd: int) -> Any:
        found = real(fd)
        fields = {name: getattr(found, name) for name in ("st_mode", "st_dev", "st_ino", "st_size")}
        return SimpleNamespace(**fields, st_ctime_ns=0)

    monkeypatch.setattr(os, "fstat", fstat)
    rig.save()
    held = rig.load()
    reversed_data = DATA[0][::-1]
    with rig.files() as fds:
        assert rig.cache.save(TOKEN, MODEL, (reversed_data,), *fds).saved
    assert contents(rig.load()) == (MODEL, (reversed_data,))
    assert contents(held) == (MODEL, DATA)


def test_copy_that_is_in_use_ends_with_its_generation(rig: Rig) -> None:
    old = rig.save()
    held = rig.load()
    rig.save(name="b")  # replaces it
    assert rig.refusal() is R.ROLLED_BACK
    assert contents(rig.load(name="b")) == contents(held) == (MODEL, DATA)
    rig.cache.revoke(TOKEN, old.generation)
    rig.cache.revoke(TOKEN)
    assert rig.refusal() is rig.refusal(name="b") is R.NO_ROW


def test_forked_child_does_not_wait_for_a_thread_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was opening a store when the process was forked."""
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    opening, go_on = threading.Event(), threading.Event()

    def epoch() -> bytes:
        opening.set()
        go_on.wait(PATIENCE)
        return bytes(32)

    thread = threading.Thread(target=lambda: DeviceCacheHome("test-slow", epoch, 1, 1).get())
    thread.start()
    opening.wait(PATIENCE)
    child = os.fork()
    if not child:
        signal.alarm(int(PATIENCE))
        DeviceCacheHome("test-child", lambda: bytes(32), 1, 1).get()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    thread.join()
    assert status == 0
    caching._stores.pop((os.getpid(), tmp_path / "state")).close()


# ---- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
def test_REQ_CACHE_THR_07_each_directory_has_a_newest_entry_of_its_own(tmp_path: Path, staged: bool) -> None:
    """An older save stays rolled back in its directory; another directory of the token is not asked."""
    rig = Rig(tmp_path)

    def save(name: str, place: bytes) -> None:
        result = rig.save(name=name, place=place, staged=staged)
        assert result.saved
        assert rig.cache.confirm(TOKEN, result.generation)

    save("a", b"here")
    older = rig.snapshot("a")
    save("b", b"there")
    assert contents(rig.load(name="a")) == contents(rig.load(name="b")) == (MODEL, DATA)
    save("a", b"here")
    newer = rig.snapshot("a")
    for path, data in older.items():
        path.write_bytes(data)
    assert rig.refusal(name="a") is R.ROLLED_BACK
    for path, data in newer.items():
        path.write_bytes(data)
    assert contents(rig.load(name="a")) == contents(rig.load(name="b"))
    rig.close()


def test_place_of_a_row_is_part_of_its_code(state: Path) -> None:
    store = TrustStore(state)
    store.put(replace(record(OLD, True), place=b"here"))
    with contextlib.closing(sqlite3.connect(state / "trust.sqlite3")) as database, database:
        database.execute("UPDATE entry SET place = ?", (b"ther",))
    with pytest.raises(CacheRejected, match="changed") as error:
        store.get(TOKEN, DEVICE, OLD)
    assert error.value.reason is R.NO_ROW
    store.close()


def test_place_is_what_the_file_system_says_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "alias").symlink_to("one")

    def place(name: str) -> bytes:
        fd = os.open(tmp_path / name, os.O_RDONLY)
        try:
            return place_of(fd)
        finally:
            os.close(fd)

    one = place("one")
    assert one != place("two")
    assert one == place("alias")
    (tmp_path / "one").rename(tmp_path / "moved")
    assert one == place("moved")
    with pytest.raises(CacheRejected) as error:
        place("file")
    assert error.value.reason is R.BAD_FD


def test_store_of_an_older_version_starts_empty(state: Path) -> None:
    TrustStore(state).close()
    with contextlib.closing(sqlite3.connect(state / "trust.sqlite3")) as database, database:
        database.execute("DROP TABLE entry")
        database.execute("CREATE TABLE entry (token BLOB)")
        database.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (struct.pack("<I", 1),))
    store = TrustStore(state)
    assert not store.knows(TOKEN, DEVICE)
    store.put(record(OLD, True))
    assert store.get(TOKEN, DEVICE, OLD) is not None
    store.close()
