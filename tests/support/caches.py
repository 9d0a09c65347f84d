"""A device cache on files of a temporary directory, and helpers of the cache tests."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from nnburst.cache.device_cache import DeviceCache, VerifiedEntry
from nnburst.cache.reasons import CacheReason, CacheRejected, SaveResult
from nnburst.cache.trust_store import TrustStore
from nnburst.devices.interfaces import CacheFiles

TOKEN, OTHER = bytes(32), bytes([1]) * 32
EPOCH, NEXT_EPOCH = b"e" * 32, b"f" * 32
FINGERPRINT = b"p" * 32
MODEL = (b"the plan" * 20, b"second file")
DATA = (bytes(range(256)) * 64,)


class Rig:
    """A device cache with entries of two model files and one data file."""

    def __init__(self, directory: Path, *, encrypt: bool = False, **options: Any) -> None:
        self.directory = directory
        self.encrypt = encrypt
        self.store = TrustStore(directory / "state")
        self.hook: Callable[[str], None] = lambda step: None
        self.cache = self.device_cache(**options)

    def device_cache(self, store: TrustStore | None = None, **options: Any) -> Any:
        given = {"device": "test-device", "epoch": EPOCH, "model_files": 2, "data_files": 1, **options}
        cache: Any = DeviceCache(store or self.store, hook=lambda step: self.hook(step), **given)
        cache.save, cache.load = partial(cache.save, encrypt=self.encrypt), partial(cache.load, encrypted=self.encrypt)
        return cache

    def path(self, kind: str, index: int, name: str = "a") -> Path:
        return self.directory / f"{name}-{kind}{index}"

    @contextmanager
    def files(self, name: str = "a", flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[tuple[list[int], list[int]]]:
        fds = [os.open(self.path(k, i, name), flags, 0o600) for k, i in (("model", 0), ("model", 1), ("data", 0))]
        try:
            yield fds[:2], fds[2:]
        finally:
            for fd in fds:
                os.close(fd)

    def save(self, token: bytes = TOKEN, name: str = "a", **options: Any) -> SaveResult:
        with self.files(name) as fds:
            return self.cache.save(token, MODEL, DATA, *fds, **options)

    def load(self, token: bytes = TOKEN, name: str = "a", **options: Any) -> VerifiedEntry:
        with self.files(name) as fds:
            return self.cache.load(token, *fds, **options)

    def refusal(self, *args: Any, **options: Any) -> CacheReason:
        """Return the reason why a load is refused. Fail if the load succeeds."""
        try:
            self.load(*args, **options)
        except CacheRejected as error:
            return error.reason
        raise AssertionError("the entry was accepted")

    def bytes_of(self, kind: str, index: int, name: str = "a") -> bytearray:
        return bytearray(self.path(kind, index, name).read_bytes())

    def snapshot(self, name: str = "a") -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.directory.glob(f"{name}-*")}


@contextmanager
def cache_files(directory: Path, fingerprint: bytes = b"") -> Iterator[CacheFiles]:
    """Open one model file and one data file."""
    fds = tuple(os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("model", "data"))
    try:
        yield CacheFiles(fds[:1], fds[1:], TOKEN, fingerprint)
    finally:
        for fd in fds:
            os.close(fd)


def contents(entry: VerifiedEntry) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    return tuple(map(bytes, entry.model)), tuple(map(bytes, entry.data))


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """Let this process open only `more` further descriptors in the ``with`` block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = os.dup(0)  # the lowest free number
    os.close(unused)
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
