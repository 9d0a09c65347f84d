"""Writing and verified reading of a device's cache files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from .container import Header, overhead, seal
from .reasons import CacheReason, CacheRejected, SaveResult
from .sealed_copy import SealedCopies, check_fd, read_header
from .trust_store import EntryRecord, MasterKey, TrustStore

_MODEL, _DATA = 1, 2
_NO_FINGERPRINT = bytes(32)
_MOST_BYTES = 2 << 30
_MOST_FILES = 32
"""Largest number of files of each kind."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class VerifiedEntry(Struct, frozen=True):
    """The verified payloads of an entry, in private read-only memory.

    Attributes:
        model: Read-only views, one per model file. The views keep the memory alive.
        data: Read-only views, one per data file.
        generation: Id of the save that wrote the entry.
        fingerprint: Fingerprint of the model; all zeros if the client sent none.
    """

    model: tuple[memoryview, ...]
    data: tuple[memoryview, ...]
    generation: bytes
    fingerprint: bytes


class DeviceCache:
    """The cache of one device. Thread safe.

    Args:
        store: The trust store, which knows the saved files that the service trusts. All devices of a service share it.
        epoch: 32 bytes for the device's build. Builds with the same bytes can read each other's files.
        model_files: Number of files with the executable part, 0 … 32.
        data_files: Number of files with constants, 0 … 32.
        most_bytes: Largest size of an entry, in bytes.
        hook: Called with the name of each step of a save, for tests.
    """

    def __init__(
        self,
        store: TrustStore,
        *,
        device: str,
        epoch: bytes,
        model_files: int,
        data_files: int,
        most_bytes: int = _MOST_BYTES,
        hook: Callable[[str], None] = lambda step: None,
    ) -> None:
        if not (0 <= model_files <= _MOST_FILES and 0 <= data_files <= _MOST_FILES and model_files + data_files):
            raise ValueError("a cache has 1 to 64 files, at most 32 of each kind")
        if len(epoch) != 32:
            raise ValueError("an epoch has 32 bytes")
        self._store = store
        self._device = device
        self._epoch = epoch
        self._counts = {_MODEL: model_files, _DATA: data_files}
        self._most = most_bytes
        self._hook = hook
        self._copies = SealedCopies()
        store.set_epoch(device, epoch)  # This removes entries of other builds.

    # ---- saving ----------------------------------------------------------------------------------------------

    def save(
        self,
        cache_key: bytes,
        model: Sequence[bytes | memoryview],
        data: Sequence[bytes | memoryview],
        model_fds: Sequence[int],
        data_fds: Sequence[int],
        *,
        fingerprint: bytes = b"",
        staged: bool = False,
        place: bytes = b"",
        encrypt: bool = False,
    ) -> SaveResult:
        """Write an entry into files of the client. An error is not raised: the result contains the reason.

        The trust store records the digests before the first byte is written, so a file that another program changes
        during the save is rejected later (THR-10).

        Args:
            cache_key: 32 bytes that name the entry.
            model, data: Contents of the files.
            model_fds, data_fds: Files, open for reading and writing.
            fingerprint: Fingerprint of the model in 32 bytes, or empty.
            staged: True if the client publishes the files and then calls `confirm`, which invalidates older files.
            place: The client's directory of the entry, from `place_of`. Older files in it become invalid.
            encrypt: True to encrypt the payloads.
        """
        started = time.perf_counter()
        try:
            payloads, fds = (model, data), (model_fds, data_fds)
            generation, nbytes = self._save(cache_key, payloads, fds, fingerprint, staged, place, encrypt)
        except CacheRejected as error:
            return SaveResult(False, error.reason, seconds=time.perf_counter() - started)
        except OSError as error:
            reason = CacheReason.DISK_FULL if error.errno in _DISK_FULL else CacheReason.IO_ERROR
            return SaveResult(False, reason, seconds=time.perf_counter() - started)
        return SaveResult(True, CacheReason.SAVED, generation, nbytes, time.perf_counter() - started)

    def _save(
        self,
        cache_key: bytes,
        payloads: tuple[Sequence[bytes | memoryview], Sequence[bytes | memoryview]],
        fds: tuple[Sequence[int], Sequence[int]],
        fingerprint: bytes,
        staged: bool,
        place: bytes,
        encrypt: bool,
    ) -> tuple[bytes, int]:
        self._check(fds)
        files = [
            (kind, i, memoryview(payload).cast("B") if len(payload) else memoryview(b""), fd)
            for kind, blobs, own_fds in zip((_MODEL, _DATA), payloads, fds, strict=True)
            for i, (payload, fd) in enumerate(zip(blobs, own_fds, strict=True))
        ]
        for _, _, _, fd in files:
            check_fd(fd)
        nbytes = sum(len(payload) + overhead() for _, _, payload, _ in files)
        if nbytes > self._most:
            raise CacheRejected(CacheReason.TOO_BIG, f"an entry of {nbytes} bytes; at most {self._most}")
        generation, salt, key = os.urandom(16), os.urandom(32), self._store.key
        fingerprint = fingerprint or _NO_FINGERPRINT
        headers = [
            Header(
                kind, i, self._counts[kind], len(payload), cache_key, generation, self._epoch, fingerprint, salt,
                key.id, hashlib.sha256(payload).digest(), encrypt,
            )
            for kind, i, payload, _ in files
        ]  # fmt: skip
        self._hook("digests")
        recorded = tuple((header.payload + overhead(), header.digest) for header in headers)
        record = EntryRecord(generation, self._epoch, fingerprint, recorded, not staged, int(time.time()), place)
        self._store.put(cache_key, self._device, record)
        try:
            self._hook("stored")
            for header, (_, _, payload, fd) in zip(headers, files, strict=True):
                self._write(fd, header, payload, key)
        except BaseException:
            with contextlib.suppress(CacheRejected):
                self._store.revoke(cache_key, self._device, generation)
            for _, _, _, fd in files:  # After a failure, no file may look like an entry.
                try:
                    os.ftruncate(fd, 0)
                except OSError:
                    break
            raise
        self._hook("written")
        return generation, nbytes

    def _write(self, fd: int, header: Header, payload: memoryview, key: MasterKey) -> None:
        """Write one file. Mark its header complete once all other bytes are on the disk."""
        size = len(payload) + overhead()
        os.ftruncate(fd, 0)
        self._hook("truncated")
        os.posix_fallocate(fd, 0, size)
        dirty = replace(header, state=0).encode()
        _pwrite(fd, memoryview(dirty), 0)
        self._hook("dirty")
        end = len(dirty)
        for part in seal(header, payload, key):
            _pwrite(fd, memoryview(part), end)
            end += len(part)
        self._hook("payload")
        os.fdatasync(fd)
        _pwrite(fd, memoryview(header.encode()), 0)
        os.fdatasync(fd)
        self._hook("complete")

    # ---- loading ---------------------------------------------------------------------------------------------

    def load(
        self,
        cache_key: bytes,
        model_fds: Sequence[int],
        data_fds: Sequence[int],
        *,
        fingerprint: bytes = b"",
        encrypted: bool = False,
    ) -> VerifiedEntry:
        """Return a verified copy of an entry. All bytes are verified before any is parsed.

        While a payload is in use, further loads of the unchanged file return the same memory, without a copy or check.

        Args:
            cache_key, model_fds, data_fds: See `save`.
            fingerprint: Fingerprint of the requested model in 32 bytes, or empty.
            encrypted: True to accept only encrypted files, False to accept only files that are not encrypted.

        Raises:
            CacheRejected: The files are not from the last save under this key, or are from another device or build.
        """
        self._check((model_fds, data_fds))
        known = self._store.records(cache_key, self._device)
        if not known:
            raise CacheRejected(CacheReason.NO_ROW, "nothing was saved under this cache key")
        fds, headers = (*model_fds, *data_fds), []
        left = self._most
        for fd in fds:
            headers.append(read_header(fd, left))
            left -= headers[-1].payload + overhead()
        # The headers are not authenticated yet: they only select the record, which limits the allocated memory.
        key, first = self._store.key, headers[0]
        if first.key_id != key.id:
            raise CacheRejected(CacheReason.KEY_CHANGED, "the files were written with another key")
        self._check_headers(headers, cache_key, encrypted)
        self._check_recorded(headers, known)
        views = [self._copies.get(fd, header, key) for fd, header in zip(fds, headers, strict=True)]
        if fingerprint and first.fingerprint not in (fingerprint, _NO_FINGERPRINT):
            raise CacheRejected(CacheReason.OTHER_MODEL, "the cache key was used for another model")
        models = self._counts[_MODEL]
        return VerifiedEntry(tuple(views[:models]), tuple(views[models:]), first.generation, first.fingerprint)

    def _check_headers(self, headers: Sequence[Header], cache_key: bytes, encrypted: bool) -> None:
        """Check that all headers come from the same save, for this entry, device and build."""
        first = headers[0]
        places = [(kind, i) for kind in (_MODEL, _DATA) for i in range(self._counts[kind])]
        states = ("not encrypted", "encrypted")
        for header, place in zip(headers, places, strict=True):
            rules = (
                (header.cache_key == cache_key, CacheReason.OTHER_ENTRY, "a file belongs to another entry"),
                (header.epoch == self._epoch, CacheReason.BAD_EPOCH, "a file is from another build of the device"),
                ((header.kind, header.index) == place, CacheReason.BAD_MAC, "files stand in each other's places"),
                (header.count == self._counts[place[0]], CacheReason.BAD_MAC, "the entry has another number of files"),
                (header.generation == first.generation, CacheReason.ROLLED_BACK, "files of different generations"),
                (header.salt == first.salt, CacheReason.ROLLED_BACK, "files of different generations"),
                (
                    header.encrypted == encrypted, CacheReason.OTHER_CIPHER,
                    f"the files are {states[header.encrypted]}; {states[encrypted]} ones were asked for",
                ),
            )  # fmt: skip
            for holds, reason, message in rules:
                if not holds:
                    raise CacheRejected(reason, message)

    def _check_recorded(self, headers: Sequence[Header], known: Sequence[EntryRecord]) -> None:
        """Check that the headers belong to one generation (one save) that the trust store knows."""
        record = next((record for record in known if record.generation == headers[0].generation), None)
        if record is None:
            raise CacheRejected(CacheReason.ROLLED_BACK, "the files are older than the last save")
        if len(record.files) != len(headers):
            raise CacheRejected(CacheReason.BAD_MAC, "the entry has another number of files")
        for header, (length, digest) in zip(headers, record.files, strict=True):
            if header.payload + overhead() != length:
                raise CacheRejected(CacheReason.BAD_LENGTH, f"a file has other than the {length} bytes saved")
            found = header.digest, header.epoch, header.fingerprint
            if found != (digest, record.epoch, record.fingerprint):
                raise CacheRejected(CacheReason.BAD_DIGEST, "the files are not those that were saved")

    def confirm(self, cache_key: bytes, generation: bytes) -> bool:
        """Make a published generation the only valid one of its entry in its directory.

        Returns:
            False if the generation is unknown.
        """
        return self._store.confirm(cache_key, self._device, generation)

    def _check(self, fds: tuple[Sequence[int], Sequence[int]]) -> None:
        if [len(each) for each in fds] != list(self._counts.values()):
            raise CacheRejected(
                CacheReason.BAD_FD,
                f"{len(fds[0])} model and {len(fds[1])} data files; {self._device} needs "
                f"{self._counts[_MODEL]} and {self._counts[_DATA]}",
            )


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
