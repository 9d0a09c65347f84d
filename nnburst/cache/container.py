"""The format of a cache file: a header, the payload (encrypted or not), and an authentication code over both.

::

    0  magic "NNBCACHE"   8  version u16   10  state u16 (0 dirty, 1 complete)
    12 kind u16 (1 model, 2 data)   14 index u16   16 count u16   18 cipher u16 (0, 1 AES-256-GCM)
    20 header length u32 (224)   24 payload length u64   32 stored length u64   40 cache key[32]   72 generation[16]
    88 epoch[32]   120 model fingerprint[32]   152 salt[32]   184 key id[8]   192 SHA-256 of the payload[32]
    224 payload, as it is or encrypted
    end-16  AES-256-GMAC or AES-256-GCM code; the associated data are the header and, if not encrypted, the payload

Each save has its own salt, and the key is derived from the salt and the cipher. The nonces are made from kind and
index. A key therefore makes at most 64 codes and never uses a nonce twice. A forged file of n bytes is accepted with
probability n / 2^132 (2^-101 for 2 GiB, the limit of an entry).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from .reasons import CacheReason, CacheRejected
from .trust_store import MasterKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

MAGIC = b"NNBCACHE"
VERSION = 2
HEADER_SIZE = 224
CODE_SIZE = 16
_CHUNK = 256 << 10
"""Number of bytes that are read and authenticated at once. They fit into the processor's cache."""
DIRTY, COMPLETE = 0, 1

_FORMAT = struct.Struct("<8sHHHHHHIQQ32s16s32s32s32s8s32s")
assert _FORMAT.size == HEADER_SIZE


def overhead() -> int:
    """Return the size in bytes of a file's header and authentication code."""
    return HEADER_SIZE + CODE_SIZE


class Header(Struct, frozen=True):
    """The header of a file: untrusted until the file's authentication code is checked."""

    kind: int
    index: int
    count: int
    payload: int
    cache_key: bytes
    generation: bytes
    epoch: bytes
    fingerprint: bytes
    salt: bytes
    key_id: bytes
    digest: bytes
    encrypted: bool = False
    state: int = COMPLETE

    def encode(self) -> bytes:
        stored = self.payload + overhead()
        return _FORMAT.pack(
            MAGIC, VERSION, self.state, self.kind, self.index, self.count, self.encrypted, HEADER_SIZE, self.payload,
            stored, self.cache_key, self.generation, self.epoch, self.fingerprint, self.salt, self.key_id, self.digest,
        )  # fmt: skip

    @classmethod
    def decode(cls, raw: bytes, size: int) -> Header:
        """Read the header of a file of `size` bytes. Raises `CacheRejected` for a damaged header or another version."""
        if size < overhead() or len(raw) < HEADER_SIZE:
            raise CacheRejected(CacheReason.BAD_LENGTH if size else CacheReason.DIRTY, f"a file of {size} bytes")
        (magic, version, state, kind, index, count, cipher, length, payload, stored, *rest) = _FORMAT.unpack(
            raw[:HEADER_SIZE]
        )
        if magic != MAGIC or version != VERSION or length != HEADER_SIZE or cipher > 1 or kind not in (1, 2):
            raise CacheRejected(CacheReason.BAD_MAC, "not a cache file of this version")
        if state != COMPLETE:
            raise CacheRejected(CacheReason.DIRTY, "a save was cut off")
        if stored != size or payload != size - overhead():
            raise CacheRejected(CacheReason.BAD_LENGTH, f"a file of {size} bytes says that it has {stored}")
        return cls(kind, index, count, payload, *(*rest, bool(cipher)))


def is_encrypted(fd: int) -> bool:
    """Return True if a file claims to be an encrypted cache file."""
    raw = os.pread(fd, HEADER_SIZE, 0)
    return raw.startswith(MAGIC) and raw[18:20] == b"\x01\x00"


def chunks_of(payload: memoryview) -> Iterator[memoryview]:
    return (payload[start : start + _CHUNK] for start in range(0, len(payload), _CHUNK))


def seal(header: Header, payload: memoryview, master: MasterKey) -> Iterator[bytes | memoryview]:
    """Yield the parts of a file that follow its header. The header's salt must be new."""
    context = _cipher(header, master).encryptor()
    context.authenticate_additional_data(header.encode())
    for chunk in chunks_of(payload):
        if header.encrypted:
            yield context.update(chunk)
        else:
            context.authenticate_additional_data(chunk)
            yield chunk
    context.finalize()
    yield context.tag


class Opening:
    """The decryption and verification of one payload, part by part."""

    def __init__(self, header: Header, master: MasterKey) -> None:
        self._encrypted = header.encrypted
        self._context: AEADDecryptionContext = _cipher(header, master).decryptor()
        self._context.authenticate_additional_data(header.encode())

    def add(self, chunk: memoryview) -> None:
        """Add the next part, decrypting it in place."""
        if self._encrypted:
            self._context.update_into(chunk, chunk)
        else:
            self._context.authenticate_additional_data(chunk)

    def finish(self, code: bytes) -> None:
        """Compare the authentication codes. Raises `CacheRejected` if they differ: the payload must not be used."""
        from cryptography.exceptions import InvalidTag

        try:
            self._context.finalize_with_tag(code)
        except InvalidTag:
            raise CacheRejected(CacheReason.BAD_MAC, "the authentication code of a file does not match") from None


def _cipher(header: Header, master: MasterKey) -> Cipher[GCM]:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    key = master.derive("gcm" if header.encrypted else "gmac", header.salt)
    return Cipher(AES(key), GCM(struct.pack("<HH8x", header.kind, header.index)))
