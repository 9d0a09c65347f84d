"""The secret that makes cache files believable, kept where no client writes."""

from __future__ import annotations

import hashlib
import os
import stat

from .reasons import CacheReason, CacheRejected

_SIZE = 32


class MasterKey:
    """32 random bytes in a file of the service's own. Everything else is derived from it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = hashlib.sha256(b"nnburst-key-id" + secret).digest()[:8]

    @classmethod
    def open(cls, directory: int) -> MasterKey:
        """Read the key of a state directory, or make one; `CacheRejected` if the file is not the user's alone."""
        try:
            try:
                fd = os.open("key", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            except FileNotFoundError:
                _create(directory)
                fd = os.open("key", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            with os.fdopen(fd, "rb") as file:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                    raise CacheRejected(CacheReason.NO_STORE, "the key file is not a private file of this user")
                secret = file.read(_SIZE + 1)
        except OSError as error:
            raise CacheRejected(
                CacheReason.NO_STORE, f"the key of the cache cannot be used: {error.strerror}"
            ) from error
        if len(secret) != _SIZE:
            raise CacheRejected(CacheReason.NO_STORE, f"the key file has {len(secret)} bytes, not {_SIZE}")
        return cls(secret)

    def derive(self, label: str, salt: bytes = b"") -> bytes:
        """Return a key of 32 bytes for one purpose (HKDF-SHA256)."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(hashes.SHA256(), 32, salt, f"nnburst {label} v1".encode()).derive(self._secret)


def _create(directory: int) -> None:
    """Publish a complete key by a link, so that no reader sees half of one; the second to come uses the first's."""
    name = f"key.{os.getpid()}.{os.urandom(4).hex()}"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(os.urandom(_SIZE))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(name, "key", src_dir_fd=directory, dst_dir_fd=directory)
        except FileExistsError:
            return
        os.fsync(directory)
    finally:
        os.unlink(name, dir_fd=directory)
