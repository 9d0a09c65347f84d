"""One cache file: a header, the payload, and an authentication code over both.

::

    0  magic "NNBCACHE"   8  version u16   10  state u16 (0 dirty, 1 complete)
    12 kind u16 (1 model, 2 data)   14 index u16   16 count u16   18 cipher u16 (0)   20 header length u32 (192)
    24 payload length u64   32 stored length u64   40 token[32]   72 generation[16]   88 epoch[32]
    120 model fingerprint[32]   152 salt[32]   184 key id[8]
    192 payload
    end-32  HMAC-SHA256(key for this salt, header ‖ digest of the payload)

The digest of a payload is the SHA-256 over its length and the SHA-256 of each MiB of it. So every byte is hashed once,
and two threads can share the work; the code over header and digest binds all of it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from .reasons import CacheReason, CacheRejected

MAGIC = b"NNBCACHE"
VERSION = 1
HEADER_SIZE = 192
MAC_SIZE = 32
CHUNK = 1 << 20
DIRTY, COMPLETE = 0, 1

_FORMAT = struct.Struct("<8sHHHHHHIQQ32s16s32s32s32s8s")
assert _FORMAT.size == HEADER_SIZE

_PARALLEL_FROM = 2 * CHUNK
"""Bytes from which a second thread pays."""


def overhead() -> int:
    """Bytes that a file has beyond its payload."""
    return HEADER_SIZE + MAC_SIZE


class Header(Struct, frozen=True):
    """What a file says of itself. Nothing of it is believed before the code over it was checked."""

    kind: int
    index: int
    count: int
    payload: int
    token: bytes
    generation: bytes
    epoch: bytes
    fingerprint: bytes
    salt: bytes
    key_id: bytes
    state: int = COMPLETE

    def encode(self) -> bytes:
        """Return the 192 bytes."""
        stored = self.payload + overhead()
        return _FORMAT.pack(
            MAGIC, VERSION, self.state, self.kind, self.index, self.count, 0, HEADER_SIZE, self.payload, stored,
            self.token, self.generation, self.epoch, self.fingerprint, self.salt, self.key_id,
        )  # fmt: skip

    @classmethod
    def decode(cls, raw: bytes, size: int) -> Header:
        """Read a header of a file of that size.

        Raises:
            CacheRejected: It is none, of another version, cut off, or does not match the size.
        """
        if size < overhead() or len(raw) < HEADER_SIZE:
            raise CacheRejected(CacheReason.BAD_LENGTH if size else CacheReason.DIRTY, f"a file of {size} bytes")
        (magic, version, state, kind, index, count, cipher, length, payload, stored, *rest) = _FORMAT.unpack(
            raw[:HEADER_SIZE]
        )
        if magic != MAGIC or version != VERSION or length != HEADER_SIZE or cipher != 0 or kind not in (1, 2):
            raise CacheRejected(CacheReason.BAD_MAC, "not a cache file of this version")
        if state != COMPLETE:
            raise CacheRejected(CacheReason.DIRTY, "a save was cut off")
        if stored != size or payload != size - overhead():
            raise CacheRejected(CacheReason.BAD_LENGTH, f"a file of {size} bytes says that it has {stored}")
        token, generation, epoch, fingerprint, salt, key_id = rest
        return cls(kind, index, count, payload, token, generation, epoch, fingerprint, salt, key_id)


def digest_of(payload: memoryview | bytes, ready: Callable[[int], None] | None = None) -> bytes:
    """Return the digest of a payload.

    Args:
        payload: All bytes.
        ready: Called with the end of each chunk before it is looked at; makes its bytes be there.
    """
    view = memoryview(payload).cast("B") if payload else memoryview(b"")
    size = len(view)
    starts = range(0, size, CHUNK)

    def one(start: int) -> bytes:
        return hashlib.sha256(view[start : start + CHUNK]).digest()

    top = hashlib.sha256(struct.pack("<Q", size))
    if size < _PARALLEL_FROM:
        for start in starts:
            if ready is not None:
                ready(min(size, start + CHUNK))
            top.update(one(start))
        return top.digest()
    with ThreadPoolExecutor(1) as helper:
        # The helper hashes the bytes read so far while this thread reads on, and hashes itself when it is ahead.
        pending = []
        for start in starts:
            if ready is not None:
                ready(min(size, start + CHUNK))
            pending.append(helper.submit(one, start))
        results: list[bytes] = [b""] * len(pending)
        for i in reversed(range(len(pending))):
            results[i] = one(starts[i]) if pending[i].cancel() else pending[i].result()
    for part in results:
        top.update(part)
    return top.digest()


def seal(header: Header, digest: bytes, key: bytes) -> bytes:
    """Return the code that ends a file."""
    return hmac.digest(key, header.encode() + digest, "sha256")


def verify_mac(header: Header, digest: bytes, code: bytes, key: bytes) -> None:
    """Check it, in constant time.

    Raises:
        CacheRejected: Header or payload are not those that were sealed.
    """
    if not hmac.compare_digest(seal(header, digest, key), code):
        raise CacheRejected(CacheReason.BAD_MAC, "the authentication code of a file does not match")
