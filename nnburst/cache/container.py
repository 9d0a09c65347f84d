"""One cache file: a header, the payload, and an authentication code over both.

::

    0  magic "NNBCACHE"   8  version u16   10  state u16 (0 dirty, 1 complete)
    12 kind u16 (1 model, 2 data)   14 index u16   16 count u16   18 cipher u16 (0)   20 header length u32 (224)
    24 payload length u64   32 stored length u64   40 token[32]   72 generation[16]   88 epoch[32]
    120 model fingerprint[32]   152 salt[32]   184 key id[8]   192 SHA-256 of the payload[32]
    224 payload
    end-16  AES-256-GMAC(key for this salt, header ‖ payload)

Each save has a salt of its own and so a key of its own; the files of a save have different nonces, made from kind and
index. So no nonce is used twice with a key, and a key makes 64 codes at most. Someone without the key who tries a file
of n bytes has a chance of n / 2^132 (2^-101 for the 2 GiB that an entry may have); GCM itself allows 2^61 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from msgspec import Struct

from .reasons import CacheReason, CacheRejected

MAGIC = b"NNBCACHE"
VERSION = 2
HEADER_SIZE = 224
CODE_SIZE = 16
_CHUNK = 256 << 10
"""Bytes that are authenticated at once: they are still in the processor's cache when they have just been read."""
DIRTY, COMPLETE = 0, 1

_FORMAT = struct.Struct("<8sHHHHHHIQQ32s16s32s32s32s8s32s")
assert _FORMAT.size == HEADER_SIZE


def overhead() -> int:
    """Bytes that a file has beyond its payload."""
    return HEADER_SIZE + CODE_SIZE


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
    digest: bytes
    state: int = COMPLETE

    def encode(self) -> bytes:
        """Return the bytes that a file begins with."""
        stored = self.payload + overhead()
        return _FORMAT.pack(
            MAGIC, VERSION, self.state, self.kind, self.index, self.count, 0, HEADER_SIZE, self.payload, stored,
            self.token, self.generation, self.epoch, self.fingerprint, self.salt, self.key_id, self.digest,
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
        return cls(kind, index, count, payload, *rest)


def chunks_of(payload: memoryview) -> Iterator[memoryview]:
    """Yield the parts of a payload that `code_of` takes one after the other."""
    return (payload[start : start + _CHUNK] for start in range(0, len(payload), _CHUNK))


def code_of(header: Header, chunks: Iterable[memoryview], key: bytes) -> bytes:
    """Return the code that ends a file. Chunks may be read while they are asked for: each is looked at once.

    Args:
        header: Of the file.
        chunks: The payload.
        key: For the salt of the header, and for nothing else.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    context = Cipher(AES(key), GCM(struct.pack("<HH8x", header.kind, header.index))).encryptor()
    context.authenticate_additional_data(header.encode())
    for chunk in chunks:
        context.authenticate_additional_data(chunk)
    context.finalize()
    return context.tag
