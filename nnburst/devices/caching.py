"""Cache files of a device, and a digest that differs between builds of the device."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from .. import _core
from ..cache.device_cache import DeviceCache, VerifiedEntry
from ..cache.files import default_state_directory
from ..cache.names import check_cache_key
from ..cache.reasons import CacheReason, CacheRejected, SaveResult
from ..cache.sealed_copy import place_of
from ..cache.trust_store import TrustStore
from .interfaces import CacheFiles

Payloads = Callable[[], tuple[Sequence[bytes | memoryview], Sequence[bytes | memoryview]] | None]
_log = logging.getLogger("nnburst.cache")


@cache
def _library_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(_core.__file__).parent.glob("_nnburst*.so")):
        digest.update(path.read_bytes())
    return digest.digest()


@cache
def cpu_features() -> str:
    """Return the processor's instruction set as Linux lists it; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def build_epoch(name: str, version: str, *parts: str) -> bytes:
    """Return a digest (32 bytes) of a device's name and version, of nnburst's C library, and of `cpu_features`.

    Args:
        parts: More texts for the digest, such as format versions and options.
    """
    digest = hashlib.sha256(b"nnburst-epoch-v1" + _library_digest())
    for text in (name, version, cpu_features(), *parts):
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


class DeviceCacheHome:
    """The owner of a device's `DeviceCache`. Opens the cache on first use.

    Args:
        epoch: Function that returns the device's `build_epoch`; called on first use.
    """

    def __init__(self, device: str, epoch: Callable[[], bytes], model_files: int, data_files: int) -> None:
        self._device = device
        self._epoch = epoch
        self.counts = model_files, data_files
        self._caches: dict[Path, DeviceCache] = {}

    def get(self) -> DeviceCache:
        """Return the cache. Raises `CacheRejected` if the state directory cannot be used."""
        directory = default_state_directory()
        if directory not in self._caches:
            models, data = self.counts
            opened = DeviceCache(
                TrustStore(directory), device=self._device, epoch=self._epoch(), model_files=models, data_files=data
            )
            self._caches.setdefault(directory, opened)  # Another thread may have been faster.
        return self._caches[directory]

    def load(self, files: CacheFiles) -> VerifiedEntry:
        """Read and verify the files of an entry, and return the entry.

        Raises the errors of `DeviceCache.load`, and `InvalidArgument` for a bad cache key.
        """
        cache_key = check_cache_key(files.cache_key)
        return self.get().load(
            cache_key, files.model_fds, files.data_fds, fingerprint=files.fingerprint, encrypted=files.encrypt
        )

    def save(self, files: CacheFiles, payloads: Payloads, *, compiled: Callable[[], bytes] | None = None) -> SaveResult:
        """Save an entry as `DeviceCache.save` does. An unexpected exception gives a result with the reason IO_ERROR.

        The client sends the fingerprint of the requested model, but the model's memory can change before the
        compilation. If the compiled contents have another fingerprint, nothing is saved.

        Args:
            files: The client's files, their cache key and the model's fingerprint.
            payloads: Function that returns the contents of model files and of data files. If it returns None,
                nothing is saved.
            compiled: Function that returns the fingerprint of the compiled contents; see
                `nnburst.cache.names.model_fingerprint`.
        """
        started = time.perf_counter()
        result = self._save(files, payloads, compiled)
        return replace(result, seconds=time.perf_counter() - started)

    def _save(self, files: CacheFiles, payloads: Payloads, compiled: Callable[[], bytes] | None) -> SaveResult:
        try:
            cache = self.get()
            place = place_of(files.place_fds[0]) if files.place_fds else b""
            made = payloads()
            if made is None:
                return SaveResult(False, CacheReason.DECLINED)
            if files.fingerprint and compiled is not None and compiled() != files.fingerprint:
                return SaveResult(False, CacheReason.CHANGED)
            return cache.save(
                files.cache_key, *made, files.model_fds, files.data_fds, fingerprint=files.fingerprint,
                staged=files.staged, place=place, encrypt=files.encrypt,
            )  # fmt: skip
        except CacheRejected as error:
            return SaveResult(False, error.reason)
        except Exception as error:  # The disk may be full, for example.
            _log.warning("a compilation of %s was not kept: %s: %s", self._device, type(error).__name__, error)
            return SaveResult(False, CacheReason.IO_ERROR)
