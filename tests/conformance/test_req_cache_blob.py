"""REQ-CACHE 101 … 136: the blob cache, for all policies, without the defects E1 … E12, and when `NNCache` saves."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnburst import InvalidArgument
from nnburst.blobs import NNCache, nncache
from nnburst.blobs.table import BlobCache, BlobFileError, Policy
from support.processes import run_python
from support.users import in_forked_child
from support.waiting import meanwhile, together, until

MAX_KEY, MAX_VALUE, MAX_TOTAL = 6, 8, 13
CAPACITIES = ["halve", "fit", "fit_halve"]
POLICIES = [*itertools.product(["random", "lru"], CAPACITIES)]


@pytest.fixture(params=POLICIES, ids="-".join)
def policy(request: pytest.FixtureRequest) -> Policy:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def cache(policy: Policy) -> BlobCache:
    return BlobCache(MAX_KEY, MAX_VALUE, MAX_TOTAL, policy, seed=1)


def value_of(cache: BlobCache, key: bytes) -> bytes | None:
    out = bytearray(cache.get(key))
    return bytes(out) if cache.get(key, out) else None


def fill(cache: BlobCache, count: int = MAX_TOTAL // 2) -> None:
    for i in range(count):
        cache.set(bytes([i]), bytes([i]))


def test_REQ_CACHE_101_E12_one_value(cache: BlobCache) -> None:
    out = bytearray(b"\xee" * 4)
    cache.set(b"abcd", b"efgh")
    assert cache.get(b"abcd", out) == 4
    assert out == b"efgh"


def test_REQ_CACHE_102_103_106_107_121_two_values_their_sizes_and_allocators(cache: BlobCache) -> None:
    cache.set(b"ab", b"cd")
    cache.set(b"ef", b"ghi")
    assert (value_of(cache, b"ab"), value_of(cache, b"ef")) == (b"cd", b"ghi")
    assert cache.get_with(b"ab", bytearray) == (2, bytearray(b"cd"))
    assert cache.get_with(b"ef", bytearray) == (3, bytearray(b"ghi"))
    assert (cache.get(b"ab"), cache.get(b"ef")) == (2, 3)
    assert cache.get_with(b"ef", lambda size: None) == (3, None)
    assert cache.get_with(b"no", lambda size: pytest.fail("asked")) == (0, None)


def test_REQ_CACHE_104_105_only_inside_a_buffer_that_is_large_enough(cache: BlobCache) -> None:
    cache.set(b"abcd", b"efgh")
    whole = bytearray(b"\xee" * 6)
    assert cache.get(b"abcd", memoryview(whole)[1:5]) == 4
    assert whole == b"\xeeefgh\xee"
    small = bytearray(b"\xee" * 3)
    assert cache.get(b"abcd", small) == 4
    assert small == b"\xee" * 3


def test_REQ_CACHE_108_109_later_values(cache: BlobCache) -> None:
    cache.set(b"ab", b"cdef")
    cache.set(b"ab", b"xyzw")
    assert value_of(cache, b"ab") == b"xyzw"
    cache.set(b"ab", b"z" * (MAX_VALUE + 1))
    assert value_of(cache, b"ab") == b"xyzw"


def test_REQ_CACHE_110_111_112_what_is_too_large(cache: BlobCache) -> None:
    called = []
    for key, value in ((b"k" * 7, b"v"), (b"k", b"v" * 9), (b"k" * 6, b"v" * 8)):
        cache.set(key, value)
        out = bytearray(b"\xee")
        assert cache.get(key, out) == 0
        assert out == b"\xee"
        assert cache.get_with(key, lambda size: called.append(size)) == (0, None)  # type: ignore[func-returns-value]
    assert not called
    assert len(cache) == 0


@pytest.mark.parametrize(("key", "value"), [(6, 1), (1, 8), (6, 7), (1, 1)])
def test_REQ_CACHE_113_to_116_extremes_that_fit(cache: BlobCache, key: int, value: int) -> None:
    cache.set(b"k" * key, b"v" * value)
    assert value_of(cache, b"k" * key) == b"v" * value


def test_REQ_CACHE_117_total_is_kept(cache: BlobCache) -> None:
    for i in range(256):
        cache.set(bytes([i]), b"v")
    assert sum(cache.get(bytes([i])) > 0 for i in range(256)) <= MAX_TOTAL // 2
    assert cache.total <= MAX_TOTAL


def test_REQ_CACHE_118_119_one_more_than_fits(cache: BlobCache, policy: Policy) -> None:
    fill(cache)
    cache.set(b"\x06", b"x")
    if policy[1] == "fit":
        assert len(cache) == 6
    else:
        assert len(cache) == 4
        if policy[0] == "lru":
            assert set(cache) == {bytes([i]) for i in (3, 4, 5, 6)}


def test_REQ_CACHE_120_large_entry_when_full(cache: BlobCache, policy: Policy) -> None:
    fill(cache)
    cache.set(b"\x06", b"x" * MAX_VALUE)
    if policy[1] == "halve":
        assert value_of(cache, b"\x06") is None
        assert len(cache) == 3
    else:
        assert value_of(cache, b"\x06") == b"x" * MAX_VALUE
        assert len(cache) == 3  # two of the small ones fit beside it


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_REQ_CACHE_122_least_recently_used_goes(capacity: Any) -> None:
    cache = BlobCache(MAX_KEY, MAX_VALUE, MAX_TOTAL, ("lru", capacity))
    fill(cache)
    order = [3, 1, 5, 0, 4, 2]
    for i in order:
        cache.get(bytes([i]), bytearray(1))
        cache.get(bytes([3]))  # asking for a size is no use
    cache.set(b"\x06", b"x")
    left = [key[0] for key in cache]
    assert left[-1] == 6
    assert left[:-1] == order[len(order) - len(left) + 1 :]


def flat(cache: BlobCache) -> bytearray:
    out = bytearray(cache.flattened_size())
    cache.flatten(out)
    return out


def test_REQ_CACHE_123_124_125_there_and_back(cache: BlobCache, policy: Policy) -> None:
    fill(cache)
    before = list(cache)
    data = flat(cache)
    assert list(cache) == before
    other = BlobCache(MAX_KEY, MAX_VALUE, MAX_TOTAL, policy)
    other.set(b"old", b"old")
    other.unflatten(data)
    assert list(other) == before
    assert all(value_of(other, bytes([i])) == bytes([i]) for i in range(MAX_TOTAL // 2))


def test_REQ_CACHE_126_E4_buffer_that_is_too_small(cache: BlobCache) -> None:
    cache.set(b"abcd", b"efgh")
    for size in (0, 10, cache.flattened_size() - 1):
        out = bytearray(size)
        with pytest.raises(BlobFileError):
            cache.flatten(out)
        assert out == bytes(size)


def test_REQ_CACHE_127_bad_magic(cache: BlobCache) -> None:
    cache.set(b"abcd", b"efgh")
    data = flat(cache)
    data[1] ^= 0xFF
    with pytest.raises(BlobFileError):
        cache.unflatten(data)
    assert (len(cache), cache.total) == (0, 0)


@pytest.mark.parametrize("at", [8, 12, 32], ids=["REQ_CACHE_128_version", "REQ_CACHE_129_device", "build"])
def test_other_version_is_empty_and_no_error(cache: BlobCache, at: int) -> None:
    cache.set(b"abcd", b"efgh")
    data = flat(cache)
    data[at] ^= 0xFF
    cache.unflatten(data)
    assert len(cache) == 0


def test_REQ_CACHE_130_E1_E2_cut_off_anywhere(cache: BlobCache) -> None:
    fill(cache)
    data = flat(cache)
    for size in range(len(data)):
        with pytest.raises(BlobFileError):
            cache.unflatten(data[:size])
        assert (len(cache), cache.total) == (0, 0)
        fill(cache, 8)  # a wrong total would evict from an empty list here
        assert 0 < cache.total <= MAX_TOTAL


def test_E3_order_of_use_survives() -> None:
    cache = BlobCache(MAX_KEY, MAX_VALUE, MAX_TOTAL, ("lru", "fit"))
    fill(cache)
    cache.get(b"\x00", bytearray(1))
    other = BlobCache(MAX_KEY, MAX_VALUE, MAX_TOTAL, ("lru", "fit"))
    other.unflatten(flat(cache))
    other.set(b"\x06", b"x")
    assert b"\x00" in other
    assert b"\x01" not in other


def test_E5_every_byte_is_determined(cache: BlobCache) -> None:
    fill(cache)
    assert flat(cache) == flat(cache)
    out = bytearray(b"\xee" * (cache.flattened_size() + 9))
    cache.flatten(out)
    assert out[cache.flattened_size() :] == b"\xee" * 9


def test_E9_E10_every_changed_byte_is_noticed(cache: BlobCache) -> None:
    fill(cache)
    data = flat(cache)
    for at in range(len(data)):
        spoilt = bytearray(data)
        spoilt[at] ^= 0x55
        try:
            cache.unflatten(spoilt)
        except BlobFileError:
            pass
        assert len(cache) == 0


def test_E11_key_makes_forgery_impossible(cache: BlobCache) -> None:
    cache.set(b"abcd", b"efgh")
    out = bytearray(cache.flattened_size())
    cache.flatten(out, key=b"secret")
    for key in (b"", b"another"):
        with pytest.raises(BlobFileError):
            cache.unflatten(out, key=key)
    cache.unflatten(out, key=b"secret")
    assert value_of(cache, b"abcd") == b"efgh"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=7), st.binary(max_size=9), st.booleans()), max_size=60))
def test_lru_fit_against_a_model(steps: list[tuple[bytes, bytes, bool]]) -> None:
    cache = BlobCache(MAX_KEY, MAX_VALUE, MAX_TOTAL, ("lru", "fit"))
    model: dict[bytes, bytes] = {}
    for key, value, is_get in steps:
        if is_get:
            found = value_of(cache, key)
            assert found == model.get(key)
            if key in model:
                model[key] = model.pop(key)
            continue
        cache.set(key, value)
        small = 0 < len(key) <= MAX_KEY and 0 < len(value) <= MAX_VALUE and len(key) + len(value) <= MAX_TOTAL
        if small:
            need = len(key) + len(value)
            while sum(len(k) + len(v) for k, v in model.items() if k != key) + need > MAX_TOTAL:
                model.pop(next(iter(model)))
            model.pop(key, None)
            model[key] = value
        assert list(cache) == list(model)
        assert cache.total == sum(len(k) + len(v) for k, v in model.items())


# ---- NNCache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(policy: Policy) -> Iterator[NNCache]:
    cache = NNCache()
    cache.initialize(MAX_KEY, MAX_VALUE, MAX_TOTAL, policy)
    yield cache
    cache.terminate()


def test_REQ_CACHE_131_uninitialised_cache_misses() -> None:
    cache, out = NNCache(), bytearray(b"\xee" * 4)
    cache.set_blob(b"abcd", b"efgh")
    assert cache.get_blob(b"abcd", out) == 0
    assert out == b"\xee" * 4
    assert cache.get_blob_with(b"abcd", lambda size: pytest.fail("asked")) == (0, None)


def test_REQ_CACHE_132_133_initialised_cache_hits_until_it_is_terminated(shared: NNCache) -> None:
    out = bytearray(4)
    shared.set_blob(b"abcd", b"efgh")
    assert shared.get_blob(b"abcd", out) == 4
    assert out == b"efgh"
    shared.terminate()
    assert shared.get_blob(b"abcd") == 0
    shared.set_blob(b"abcd", b"efgh")
    assert shared.get_blob(b"abcd") == 0


def test_REQ_CACHE_134_policy_reaches_the_cache(shared: NNCache, policy: Policy) -> None:
    for i in range(6):
        shared.set_blob(bytes([i]), bytes([i]))
    shared.set_blob(b"\x06", b"x" * MAX_VALUE)
    assert (shared.get_blob(b"\x06") > 0) == (policy[1] != "halve")


@pytest.mark.parametrize("policy", [None, "lru", ("mru", "fit"), ("lru", "all")])
def test_policy_that_is_none_is_refused(policy: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"choose \('random', 'halve'\), \('random', 'fit'\), .* or "):
        NNCache().initialize(MAX_KEY, MAX_VALUE, MAX_TOTAL, policy)


def opened(name: Path | str, key: int = MAX_KEY, value: int = MAX_VALUE, total: int = 100, *policy: Policy) -> NNCache:
    """A cache with a file, and its limits."""
    cache = NNCache()
    cache.set_cache_filename(name)
    cache.initialize(key, value, total, *policy)
    return cache


def test_REQ_CACHE_135_136_values_are_back_after_a_new_start(tmp_path: Path, policy: Policy) -> None:
    name = tmp_path / "blobs"
    cache = opened(name, MAX_KEY, MAX_VALUE, 100, policy)
    cache.set_blob(b"abcd", b"efgh")
    cache.set_blob(b"k" * 6, b"v" * 8)
    cache.initialize(1, 1, 2, policy)  # without terminate: the old limits stay
    cache.terminate()
    assert name.stat().st_mode & 0o777 == 0o600
    cache.initialize(4, 4, 100, policy)
    assert cache.get_blob_with(b"abcd", bytearray) == (4, bytearray(b"efgh"))
    out = bytearray(4)
    assert cache.get_blob(b"abcd", out) == 4
    cache.terminate()
    cache.initialize(MAX_KEY, MAX_VALUE, 100, policy)
    assert cache.get_blob(b"k" * 6) == 8  # nothing was stored meanwhile, so the file is as it was
    cache.terminate()


def test_saved_by_itself_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nncache, "_SECONDS", 0.05)
    cache = opened(tmp_path / "blobs")
    cache.set_blob(b"abcd", b"efgh")
    until(lambda: (tmp_path / "blobs").exists())
    other = opened(tmp_path / "blobs")
    assert other.get_blob(b"abcd") == 4
    other.terminate()
    cache.terminate()


@pytest.mark.parametrize("what", ["garbage", "cut off", "empty", "huge", "link", "directory", "fifo", "open to others"])
def test_E6_E8_file_that_is_not_ours_is_no_error(tmp_path: Path, what: str) -> None:
    name = tmp_path / "blobs"
    cache = opened(name)
    cache.set_blob(b"abcd", b"efgh")
    cache.terminate()
    good = name.read_bytes()
    name.unlink()
    {
        "garbage": lambda: name.write_bytes(random.Random(1).randbytes(500)),
        "cut off": lambda: name.write_bytes(good[:-1]),
        "empty": lambda: name.write_bytes(b""),
        "huge": lambda: name.write_bytes(good + bytes(100_000)),
        "link": lambda: (tmp_path / "real").write_bytes(good) and name.symlink_to(tmp_path / "real"),
        "directory": lambda: name.mkdir(),
        "fifo": lambda: os.mkfifo(name),
        "open to others": lambda: (name.write_bytes(good), name.chmod(0o666)),
    }[what]()
    cache.initialize(MAX_KEY, MAX_VALUE, 100)
    assert cache.get_blob(b"abcd") == 0
    cache.set_blob(b"ab", b"cd")
    assert cache.flush() == (what != "directory")
    cache.terminate()


def test_E7_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = tmp_path / "blobs"
    cache = opened(name)
    cache.set_blob(b"abcd", b"efgh")
    assert cache.flush()
    good = name.read_bytes()
    for broken in ("open", "fsync", "replace"):
        cache.set_blob(b"x", broken.encode())

        def fail(*args: object, **options: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as m:
            m.setattr(os, broken, fail)
            assert not cache.flush()
        assert name.read_bytes() == good
        assert list(tmp_path.iterdir()) == [name]
    assert cache.flush()  # what was not saved is saved later
    assert name.read_bytes() != good
    cache.terminate()


def test_many_threads(tmp_path: Path) -> None:
    cache = opened(tmp_path / "blobs", 16, 64, 2000, ("lru", "fit"))

    def work(n: int) -> None:
        generator = random.Random(n)
        for _ in range(300):
            key = bytes([generator.randrange(20)])
            cache.set_blob(key, key * generator.randrange(1, 60))
            size, out = cache.get_blob_with(key, bytearray)
            assert out is None or out == key * size
            if generator.random() < 0.02:
                cache.flush()

    together(6, work)
    cache.terminate()


def _save_often(name: str, n: int) -> None:
    cache = opened(name, MAX_KEY, 64, 1000)
    for i in range(60):
        cache.set_blob(b"who", bytes([n]) * (1 + i % 60))
        cache.flush()
    cache.terminate()


@pytest.mark.check
def test_two_processes_save_one_file(tmp_path: Path) -> None:
    name = str(tmp_path / "blobs")
    spawn = multiprocessing.get_context("spawn")
    both = [spawn.Process(target=_save_often, args=(name, n)) for n in (1, 2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    cache = opened(name, MAX_KEY, 64, 1000)
    size, out = cache.get_blob_with(b"who", bytearray)
    assert size > 0
    assert out in (b"\x01" * size, b"\x02" * size)
    cache.terminate()
    assert [path.name for path in tmp_path.iterdir()] == ["blobs"]


# ---- when NNCache saves --------------------------------------------------------------------------------------------


def stored(path: Path, key: bytes) -> bool:
    cache = opened(path, 64, 1000, 10_000)
    try:
        return cache.get_blob(key) > 0
    finally:
        cache.terminate()


def test_what_is_left_is_saved_when_the_process_ends(tmp_path: Path) -> None:
    program = f"""
from nnburst.blobs import NNCache
cache = NNCache()
cache.set_cache_filename({str(tmp_path / "blobs")!r})
cache.initialize(64, 1000, 10_000)
cache.set_blob(b"key", b"value")
del cache
"""
    run_python("-c", program, check=True)
    assert stored(tmp_path / "blobs", b"key")


def test_save_that_failed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nncache, "_SECONDS", 0.01)
    path = tmp_path / "later" / "blobs"
    cache = opened(path, 64, 1000, 10_000)
    cache.set_blob(b"key", b"value")
    until(lambda: cache._failures >= 2)
    path.parent.mkdir()
    until(path.exists)
    until(lambda: cache._failures == 0)
    assert stored(path, b"key")
    path.unlink()
    assert cache.flush()  # nothing is left to save
    assert not path.exists()
    cache.terminate()


def test_nothing_is_repeated_after_terminate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path / "nowhere" / "blobs", 64, 1000, 10_000)
    cache.set_blob(b"key", b"value")
    assert not cache.flush()
    assert cache._timer is not None
    cache.terminate()
    assert cache._timer is None


def test_forked_child_saves_what_it_stores_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's timer is pending at the fork, and another of its threads uses the cache all the time."""
    monkeypatch.setattr(nncache, "_SECONDS", 600.0)
    cache = opened(tmp_path / "blobs", 64, 1000, 10_000)
    cache.set_blob(b"parent", b"value")

    def store() -> None:
        cache.set_cache_filename(tmp_path / "child")
        assert not cache._dirty
        monkeypatch.setattr(nncache, "_SECONDS", 0.01)
        cache.set_blob(b"child", b"value")
        until((tmp_path / "child").exists)

    with meanwhile(lambda: cache.set_blob(b"other", b"value")):
        for _ in range(10):
            in_forked_child(store)
            assert stored(tmp_path / "child", b"child")
            (tmp_path / "child").unlink()
    cache.terminate()
    assert stored(tmp_path / "blobs", b"parent")
    assert not stored(tmp_path / "blobs", b"child")
