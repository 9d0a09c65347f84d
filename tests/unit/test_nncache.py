"""When `NNCache` saves: at the end of a process, after a failure, in a forked child."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnburst.blobs import NNCache, nncache
from support.processes import run_python
from support.users import in_forked_child
from support.waiting import meanwhile, until


def opened(path: Path) -> NNCache:
    cache = NNCache(build="test")
    cache.set_cache_filename(path)
    cache.initialize(64, 1000, 10_000)
    return cache


def stored(path: Path, key: bytes) -> bool:
    cache = opened(path)
    try:
        return cache.get_blob(key) > 0
    finally:
        cache.terminate()


def test_what_is_left_is_saved_when_the_process_ends(tmp_path: Path) -> None:
    program = f"""
from nnburst.blobs import NNCache
cache = NNCache(build="test")
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
    cache = opened(path)
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
    cache = opened(tmp_path / "nowhere" / "blobs")
    cache.set_blob(b"key", b"value")
    assert not cache.flush()
    assert cache._timer is not None
    cache.terminate()
    assert cache._timer is None


def test_forked_child_saves_what_it_stores_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's timer is pending at the fork, and another of its threads uses the cache all the time."""
    monkeypatch.setattr(nncache, "_SECONDS", 600.0)
    cache = opened(tmp_path / "blobs")
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
