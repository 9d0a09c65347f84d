"""Outcomes of loading or saving a cache entry."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from ..errors import ErrorStatus, NNBurstError


class CacheReason(enum.StrEnum):
    """The outcome of loading or saving an entry. No outcome makes a compilation fail."""

    HIT = "HIT"
    SAVED = "SAVED"
    NO_INFO = "NO_INFO"
    """The client did not ask for caching."""
    UNSUPPORTED = "UNSUPPORTED"
    """The device does not support caching."""
    DISABLED = "DISABLED"
    """The environment or a limit of 0 turned caching off."""
    MISSING = "MISSING"
    PARTIAL_SET = "PARTIAL_SET"
    DIRTY = "DIRTY"
    """A save stopped before its end."""
    BAD_LENGTH = "BAD_LENGTH"
    BAD_MAC = "BAD_MAC"
    BAD_DIGEST = "BAD_DIGEST"
    OTHER_ENTRY = "OTHER_ENTRY"
    BAD_EPOCH = "BAD_EPOCH"
    """Another build of the device wrote the entry."""
    BAD_CONTENT = "BAD_CONTENT"
    """The entry is authentic, but the device cannot read it."""
    ROLLED_BACK = "ROLLED_BACK"
    """The files belong to an older generation, or to several generations."""
    OTHER_MODEL = "OTHER_MODEL"
    """The cache key was used for another model."""
    BAD_FD = "BAD_FD"
    """A descriptor is not a regular file open for reading and writing, or the number of descriptors is wrong."""
    REMOTE_FILES = "REMOTE_FILES"
    """The files are on a file system that could block the service forever; see ``NNBURST_REMOTE_FILES``."""
    UNSAFE_PATH = "UNSAFE_PATH"
    """A path leads through a link, or to another user's file."""
    NO_ROW = "NO_ROW"
    """The trust store does not know the entry."""
    KEY_CHANGED = "KEY_CHANGED"
    OTHER_CIPHER = "OTHER_CIPHER"
    """The client asked for an encrypted entry and the entry is not encrypted, or the reverse."""
    NO_STORE = "NO_STORE"
    """The directory of the trust store or of the cache is missing or unusable."""
    DEADLINE = "DEADLINE"
    BUSY = "BUSY"
    """Another process is writing this entry."""
    DISK_FULL = "DISK_FULL"
    TOO_BIG = "TOO_BIG"
    CHANGED = "CHANGED"
    """Constants changed during the compilation, so the compiled model is not the requested one."""
    DECLINED = "DECLINED"
    """The device does not cache this model."""
    READ_ONLY = "READ_ONLY"
    IO_ERROR = "IO_ERROR"
    DEAD_SERVICE = "DEAD_SERVICE"


SPOILT = frozenset(
    CacheReason(name)
    for name in (
        "PARTIAL_SET", "DIRTY", "BAD_LENGTH", "BAD_MAC", "BAD_DIGEST", "OTHER_ENTRY", "BAD_EPOCH", "BAD_CONTENT",
        "ROLLED_BACK", "OTHER_MODEL", "NO_ROW", "KEY_CHANGED", "OTHER_CIPHER", "TOO_BIG", "DEAD_SERVICE",
    )
)  # fmt: skip
"""Reasons to remove an entry: it can never be restored."""

_STATUS = {
    CacheReason.DEADLINE: ErrorStatus.MISSED_DEADLINE_TRANSIENT,
    CacheReason.BUSY: ErrorStatus.DEVICE_UNAVAILABLE,
}


class CacheRejected(NNBurstError, RuntimeError):
    """A cache entry was not accepted. The caller compiles instead.

    Attributes:
        reason: The outcome, such as MISSING.
    """

    def __init__(self, reason: CacheReason, message: str = "", *, status: ErrorStatus | None = None) -> None:
        super().__init__(
            f"{message or 'the cache entry was not accepted'} [{reason.value}]",
            status=status or _STATUS.get(reason, ErrorStatus.GENERAL_FAILURE),
        )
        self.reason = reason


class SaveResult(Struct, frozen=True):
    """The outcome of a save.

    Attributes:
        saved: True if the files are complete.
        reason: SAVED, or the reason for the failure.
        generation: Generation of the files, 16 bytes.
        nbytes: Bytes of all files together.
        seconds: Duration of the save.

    Example:
        >>> from nnburst.cache.reasons import SaveResult
        >>> SaveResult(False, nnburst.runtime.CacheReason.UNSUPPORTED).nbytes
        0
    """

    saved: bool
    reason: CacheReason
    generation: Annotated[bytes, Meta(max_length=16)] = b""
    nbytes: int = 0
    seconds: float = 0.0
