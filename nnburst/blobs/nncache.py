"""A blob cache, kept in a file between runs, for devices that cache on their own.

The file is written four seconds after the first change, by `flush`, by `terminate` and when the process ends. A
failed save is retried.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from itertools import product
from typing import get_args

from .._core.errno import one_of
from .._core.leaving import abandon_when_forked
from .table import Allocator, BlobCache, BlobFileError, Policy, Writable, pack_blobs, read_blob_file, write_blob_file

_log = logging.getLogger("nnburst.blobs")
_SECONDS = 4.0
_MOST_SECONDS = 300.0
"""Longest delay in seconds before a failed save is retried."""


class NNCache:
    """A thread-safe blob cache. Before `initialize` and after `terminate`, the cache is empty and stores nothing.

    Args:
        build: Text that differs between device builds with incompatible blobs.
        key: Secret of the device; files made with another key are rejected. An empty key detects only accidental
            damage, so the file must be where only the device can write.

    Example:
        >>> from nnburst.blobs import NNCache
        >>> cache = NNCache()
        >>> cache.initialize(max_key=64, max_value=1024, max_total=4096)
        >>> cache.set_blob(b"key", b"value")
        >>> value = bytearray(5)
        >>> cache.get_blob(b"key", value), bytes(value)
        (5, b'value')
        >>> cache.terminate()
    """

    def __init__(self, *, build: str = "", key: bytes = b"") -> None:
        self._build, self._key = build, key
        self._lock = threading.RLock()
        self._limits: tuple[int, int, int, Policy] | None = None
        self._filename = ""
        self._cache: BlobCache | None = None
        self._timer: threading.Timer | None = None
        self._saving = threading.Lock()
        self._dirty = False
        self._failures = 0
        """Number of consecutive failures to save."""
        _all[id(self)] = self
        abandon_when_forked(self)

    def initialize(self, max_key: int, max_value: int, max_total: int, policy: Policy = ("random", "halve")) -> None:
        """Set limits and policy. From the first use of the cache until `terminate`, this call has no effect.

        Args:
            max_key: Maximum bytes of a key.
            max_value: Maximum bytes of a value.
            max_total: Maximum bytes of all keys and values together.
            policy: Order and amount of eviction. The order is ``"random"`` or ``"lru"`` (least recently used first).
                The amount ``"halve"`` evicts down to half of `max_total`, and drops a new entry that still does not
                fit. ``"fit"`` evicts until the new entry fits. ``"fit_halve"`` evicts down to half of `max_total`, or
                further if the new entry needs more room.

        Raises:
            InvalidArgument: The policy is unknown.
        """
        one_of(policy, "policy", [*product(*map(get_args, get_args(Policy)))])
        with self._lock:
            if self._cache is None:
                self._limits = max_key, max_value, max_total, policy

    def set_cache_filename(self, name: str | os.PathLike[str]) -> None:
        """Set the file of the cache. The first use reads the file.

        Args:
            name: Path of the file; "" to keep the cache only in memory.
        """
        with self._lock:
            self._filename = os.fspath(name)

    def set_blob(self, key: bytes, value: bytes) -> None:
        """Store a value, which is saved within seconds or by `flush`. Later entries can evict the value.

        Args:
            key, value: The entry. A value that is too large does not replace the old value.
        """
        with self._lock:
            cache = self._used()
            if cache is None:
                return
            cache.set(key, value)
            self._dirty = True
            self._start_timer()

    def get_blob(self, key: bytes, out: Writable | None = None) -> int:
        """Copy a value into a buffer, if it fits.

        Args:
            key: Key of the value.
            out: Buffer for the value; None to get only the size.

        Returns:
            Size of the value, even if it was not copied; 0 if there is no value.
        """
        return self.get_blob_with(key, lambda size: out)[0]

    def get_blob_with(self, key: bytes, allocate: Allocator) -> tuple[int, Writable | None]:
        """Copy a value into a buffer that the caller allocates.

        Args:
            key: Key of the value.
            allocate: Function that returns a buffer of a given size, or None.

        Returns:
            Size and buffer; 0 and None if there is no value.
        """
        with self._lock:
            cache = self._used()
            return (0, None) if cache is None else cache.get_with(key, allocate)

    def flush(self) -> bool:
        """Save now. Return True if the file then contains every stored value."""
        with self._saving:  # Only one thread saves at a time: an older state must not replace a newer one.
            with self._lock:
                self._stop_timer()
                if self._cache is None or not self._filename:
                    return False
                if not self._dirty:
                    return True
                items = [(key, self._cache._values[key]) for key in self._cache]
                name, self._dirty = self._filename, False
            data = pack_blobs(items, device_version=1, build=self._build, key=self._key)
            try:
                write_blob_file(name, data)
            except OSError as error:
                with self._lock:
                    self._dirty = True
                    level = logging.DEBUG if self._failures else logging.WARNING
                    self._failures += 1
                    self._start_timer()
                _log.log(level, "%s: blobs were not saved, which is tried again: %s", name, error.strerror)
                return False
            self._failures = 0
            return True

    def terminate(self) -> None:
        """Save the blobs, and remove them from memory. Idempotent."""
        self.flush()
        with self._lock:
            self._stop_timer()
            self._cache = self._limits = None
            self._dirty = False

    def _start_timer(self) -> None:
        """Schedule a save if none is scheduled. The caller has the lock."""
        if self._filename and self._cache is not None and self._timer is None:
            self._timer = threading.Timer(min(_SECONDS * 2**self._failures, _MOST_SECONDS), self.flush)
            self._timer.daemon = True  # A daemon does not keep the process alive. `_save_all` saves at exit.
            self._timer.start()

    def abandon(self) -> None:
        """Reset the cache in a forked child, so that the child reads the file again."""
        self._lock, self._saving = threading.RLock(), threading.Lock()
        self._cache, self._timer, self._dirty = None, None, False

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _used(self) -> BlobCache | None:
        """Return the cache; the first use creates and loads it. The caller has the lock."""
        if self._limits is None:
            return None
        if self._cache is None:
            self._cache = BlobCache(*self._limits)
            if self._filename:
                self._load(self._cache)
        return self._cache

    def _load(self, cache: BlobCache) -> None:
        try:
            # Entries take at most five times their size in the file, so this cache never writes a larger file.
            data = read_blob_file(self._filename, 5 * cache.max_total + 4096)
            cache.unflatten(data, build=self._build, key=self._key)
        except FileNotFoundError:
            pass
        except BlobFileError as error:
            _log.warning("%s: starting with an empty cache: %s", self._filename, error)


_all: weakref.WeakValueDictionary[int, NNCache] = weakref.WeakValueDictionary()


def _save_all() -> None:
    for cache in filter(None, (ref() for ref in _all.valuerefs())):
        cache.terminate()


atexit.register(_save_all)
