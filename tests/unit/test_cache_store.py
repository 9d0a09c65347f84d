"""The trust store when it is damaged, replaced or shared, and what it is asked before memory is."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nnburst.cache import device_cache, sealed_copy, trust_store
from nnburst.cache.container import HEADER_SIZE, Header, overhead
from nnburst.cache.files import reason_of
from nnburst.cache.reasons import CacheReason, CacheRejected
from nnburst.cache.sealed_copy import place_of
from nnburst.cache.trust_store import EntryRecord, TrustStore
from support.caches import DATA, FINGERPRINT, MODEL, OTHER, TOKEN, Rig, at_most, contents

R = CacheReason
DEVICE = "test-device"
OLD, NEW = b"o" * 16, b"n" * 16


def record(generation: bytes, live: bool = True, place: bytes = b"") -> EntryRecord:
    return EntryRecord(generation, bytes(32), bytes(32), (), live, int(time.time()), place)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def known(store: TrustStore, token: bytes = TOKEN) -> set[bytes]:
    return {record.generation for record in store.records(token, DEVICE)}


def file_of(state: Path, token: bytes = TOKEN) -> Path:
    (found,) = state.glob(f"trust/*/{trust_store.entry_name(token)}")
    return found


# ---- damage, and what is none ---------------------------------------------------------------------------------------


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda raw: os.urandom(len(raw)),
    "longer": lambda raw: raw + b"x",
    "shorter": lambda raw: raw[:-1],
    "a few bytes": lambda raw: raw[:20],
    "the code": lambda raw: bytes([raw[0] ^ 1]) + raw[1:],
    "what it says": lambda raw: raw.replace(OLD, NEW),
    "the place": lambda raw: raw.replace(b"here", b"hare"),
    "the code alone": lambda raw: raw[:32],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_THR_24_changed_file_is_refused_until_the_next_save(state: Path, change: Callable[[bytes], bytes]) -> None:
    store = TrustStore(state)
    for token in (TOKEN, OTHER):
        store.put(token, DEVICE, record(OLD, place=b"here"))
    file_of(state).write_bytes(change(file_of(state).read_bytes()))
    for ask in (lambda: store.records(TOKEN, DEVICE), lambda: store.confirm(TOKEN, DEVICE, OLD)):
        with pytest.raises(CacheRejected, match="changed") as error:
            ask()
        assert error.value.reason is R.NO_ROW
    assert known(store, OTHER) == {OLD}
    store.put(TOKEN, DEVICE, record(NEW))
    assert known(store) == {NEW}
    file_of(state).write_bytes(change(file_of(state).read_bytes()))
    store.revoke(TOKEN, DEVICE, NEW)
    assert known(store) == set()


@pytest.mark.parametrize("other", ["token", "device", "key"])
def test_THR_05_24_file_in_the_place_of_another_is_refused(state: Path, tmp_path: Path, other: str) -> None:
    store = TrustStore(state)
    store.put(TOKEN, DEVICE, record(OLD))
    source = TrustStore(tmp_path / "another") if other == "key" else store
    token, device = (OTHER if other == "token" else TOKEN), ("another" if other == "device" else DEVICE)
    source.put(token, device, record(NEW))
    ours = file_of(state) if other != "device" else None
    (theirs,) = (
        path
        for path in source.directory.glob(f"trust/*/{trust_store.entry_name(token)}")
        if path != ours and NEW in path.read_bytes()
    )
    (mine,) = (path for path in state.glob(f"trust/*/{trust_store.entry_name(TOKEN)}") if OLD in path.read_bytes())
    shutil.copy(theirs, mine)
    with pytest.raises(CacheRejected, match="changed"):
        store.records(TOKEN, DEVICE)


@pytest.mark.parametrize("what", ["link", "directory"])
def test_THR_14_24_link_or_directory_in_the_place_of_a_file_is_not_read(state: Path, tmp_path: Path, what: str) -> None:
    store = TrustStore(state)
    store.put(TOKEN, DEVICE, record(OLD))
    file = file_of(state)
    file.rename(tmp_path / "elsewhere")
    if what == "link":
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.mkdir()
    with pytest.raises(CacheRejected) as error:
        store.records(TOKEN, DEVICE)
    assert error.value.reason is R.NO_STORE


def test_store_is_as_before_for_want_of_descriptors(state: Path) -> None:
    store = TrustStore(state)
    store.put(TOKEN, DEVICE, record(OLD))
    refused = 0
    for more in range(8):
        try:
            with at_most(more):
                store.put(OTHER, DEVICE, record(NEW))
        except CacheRejected as error:
            assert error.reason is R.NO_STORE
            refused += 1
    assert refused > 2
    assert known(store) == {OLD}


@pytest.mark.parametrize("step", ["write", "fsync", "rename"])
def test_THR_22_24_write_that_fails_leaves_what_was_there(
    state: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = TrustStore(state)
    store.put(TOKEN, DEVICE, record(OLD))

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        if step == "write":
            patch.setattr(trust_store.hmac, "digest", lambda *args: fail())
        else:
            patch.setattr(os, step, fail)
        with pytest.raises(CacheRejected) as error:
            store.put(TOKEN, DEVICE, record(NEW))
        assert error.value.reason is R.NO_STORE
    assert known(store) == {OLD}
    store.put(TOKEN, DEVICE, record(NEW))
    assert known(store) == {NEW}


@pytest.mark.parametrize("step", ["open", "fsync", "rename"])
def test_THR_22_killed_while_it_writes_is_before_or_after(state: Path, step: str) -> None:
    store = TrustStore(state)
    store.put(TOKEN, DEVICE, record(OLD))
    child = os.fork()
    if not child:
        real, left = getattr(os, step), {"open": 5, "fsync": 1, "rename": 0}[step]

        def die(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(os, step, die)
        store.put(TOKEN, DEVICE, record(NEW))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert known(store) == ({NEW} if step == "fsync" else {OLD})
    store.put(TOKEN, DEVICE, record(NEW))
    assert known(store) == {NEW}


@pytest.mark.parametrize("how", ["moved", "removed", "directory removed"])
def test_THR_07_running_service_follows_a_store_that_was_replaced(state: Path, tmp_path: Path, how: str) -> None:
    """Two services with two stores would each accept what the other has revoked."""
    first = TrustStore(state)
    first.put(TOKEN, DEVICE, record(OLD))
    if how == "moved":
        (state / "trust").rename(tmp_path / "aside")
    else:
        shutil.rmtree(state if how == "directory removed" else state / "trust")
    second = TrustStore(state)
    assert known(first) == set()
    second.put(TOKEN, DEVICE, record(NEW))
    assert known(first) == {NEW}
    assert first.key.id == second.key.id
    first.revoke(TOKEN, DEVICE)
    assert known(second) == set()


# ---- what counts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", ["replaced", "revoked"])
def test_THR_07_confirming_brings_nothing_back(state: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    """What another service wants to write while an entry is confirmed comes before or after."""
    first, second = TrustStore(state), TrustStore(state)
    first.put(TOKEN, DEVICE, record(OLD, live=False))
    real, begun = trust_store._read, threading.Event()

    def other() -> None:
        begun.set()
        if meanwhile == "replaced":
            second.put(TOKEN, DEVICE, record(NEW))
        else:
            second.revoke(TOKEN, DEVICE)

    thread = threading.Thread(target=other)

    def read(*args: Any) -> Any:
        found = real(*args)
        if not begun.is_set():
            thread.start()
            begun.wait()
            time.sleep(0.02)  # long enough to write, if nothing kept it from that
        return found

    monkeypatch.setattr(trust_store, "_read", read)
    assert first.confirm(TOKEN, DEVICE, OLD)
    thread.join()
    assert known(second) == ({NEW} if meanwhile == "replaced" else set())
    assert not first.confirm(TOKEN, DEVICE, OLD)


def test_THR_07_confirmed_is_the_only_one_of_its_place(state: Path) -> None:
    store = TrustStore(state)
    for one in (record(OLD), record(NEW, live=False), record(b"t" * 16, place=b"there")):
        store.put(TOKEN, DEVICE, one)
    assert known(store) == {OLD, NEW, b"t" * 16}
    for _ in range(2):
        assert store.confirm(TOKEN, DEVICE, NEW)
    assert [(one.generation, one.live) for one in store.records(TOKEN, DEVICE)] == [(b"t" * 16, True), (NEW, True)]
    store.revoke(TOKEN, DEVICE, NEW)
    assert known(store) == {b"t" * 16}


def test_oldest_go_when_there_are_too_many(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_store, "_MOST_ENTRIES", 20)
    monkeypatch.setattr(trust_store, "_MOST_GENERATIONS", 3)
    store = TrustStore(state)
    tokens = [bytes([n]) * 32 for n in range(30)]
    for n, token in enumerate(tokens):
        store.put(token, DEVICE, record(OLD))
        os.utime(file_of(state, token), (n, n))
    left = [token for token in tokens if known(store, token)]
    assert left == tokens[-len(left) :]
    assert 18 <= len(left) <= 20
    for n in range(5):
        store.put(TOKEN, DEVICE, record(bytes([n]) * 16, place=bytes([n])))
    assert known(store) == {bytes([n]) * 16 for n in (2, 3, 4)}
    for n in range(5, 10):
        store.put(TOKEN, DEVICE, record(bytes([n]) * 16, live=False))
    assert known(store) == {bytes([n]) * 16 for n in (3, 4, 9)}


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
    real = sealed_copy._copy

    def copied(fd: int, header: Header, key: bytes) -> Any:
        sizes.append(header.payload)
        return real(fd, header, key)

    monkeypatch.setattr(sealed_copy, "_copy", copied)
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
        fields = {name: getattr(found, name) for name in ("st_mode", "st_uid", "st_dev", "st_ino", "st_size")}
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
    rig.save()
    held = rig.load()
    rig.save(name="b")  # replaces it
    assert rig.refusal() is R.ROLLED_BACK
    assert contents(rig.load(name="b")) == contents(held) == (MODEL, DATA)
    rig.cache._store.revoke(TOKEN, rig.cache._device)
    assert rig.refusal() is rig.refusal(name="b") is R.NO_ROW


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


def test_quota_that_is_used_up_is_a_full_disk() -> None:
    assert reason_of(OSError(errno.EDQUOT, "quota exceeded")) is R.DISK_FULL


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
