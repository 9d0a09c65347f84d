"""A bounded table of blobs by key, for devices that cache on their own."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator

from msgspec import Struct

from .file import BlobFileError, pack_blobs, unpack_blobs

Writable = bytearray | memoryview
Allocator = Callable[[int], Writable | None]


class Select(enum.Enum):
    """Which entry goes first."""

    RANDOM = "random"
    LRU = "lru"


class Capacity(enum.Enum):
    """How much goes, once something has to."""

    HALVE = "halve"
    """Down to half of the limit. A new entry that does not fit even then is dropped, after the eviction."""
    FIT = "fit"
    """Just as much as the new entry needs."""
    FIT_HALVE = "fit_halve"
    """Down to half of the limit, and further until the new entry fits."""


class Policy(Struct, frozen=True):
    """How to evict."""

    select: Select = Select.RANDOM
    capacity: Capacity = Capacity.HALVE


class BlobCache:
    """Values by key, as bytes. Not for several threads at once: see `NNCache`.

    Args:
        max_key: Bytes that a key may have.
        max_value: Bytes that a value may have.
        max_total: Bytes of all keys and values together.
    """

    def __init__(
        self, max_key: int, max_value: int, max_total: int, policy: Policy | None = None, *, seed: int | None = None
    ) -> None:
        self.max_key, self.max_value, self.max_total = max_key, max_value, max_total
        self.policy = policy or Policy()
        self._random = random.Random(seed)
        self._values: dict[bytes, bytes] = {}
        """In the order of their last use, the least recent first."""
        self._total = 0

    # ---- using ---------------------------------------------------------------------------------------------------

    def set(self, key: bytes, value: bytes) -> None:
        """Store a value, or do nothing if key, value or both are empty or too large.

        The old value stays if the new one is too large. A value need not be there afterwards: under
        `Capacity.HALVE` it may be dropped, and later ones may push it out.
        """
        if not (0 < len(key) <= self.max_key and 0 < len(value) <= self.max_value):
            return
        if len(key) + len(value) > self.max_total:
            return
        key, value = bytes(key), bytes(value)
        needed = len(key) + len(value)
        old = self._values.get(key)
        if old is not None and self._total - len(old) + len(value) <= self.max_total:
            self._remove(key)
        elif self._total + needed > self.max_total and not self._make_room(key, needed):
            return
        elif key in self._values:  # it survived the eviction
            self._remove(key)
        self._values[key] = value
        self._total += needed

    def get(self, key: bytes, out: Writable | None = None) -> int:
        """Copy a value into a buffer, if it fits there.

        Args:
            out: Where to; None to learn the size.

        Returns:
            Size of the value, whether it was copied or not; 0 if there is none. Only a copy counts as a use.
        """
        return self.get_with(key, lambda size: out)[0]

    def get_with(self, key: bytes, allocate: Allocator) -> tuple[int, Writable | None]:
        """Copy a value into a buffer of its size that the caller makes.

        Args:
            allocate: Called with the size, if there is a value; None: it could not.

        Returns:
            (size, buffer): the size is 0 if there is no value; the buffer None if there is none, or it failed.
        """
        value = self._values.get(bytes(key)) if len(key) <= self.max_key else None
        if value is None:
            return 0, None
        out = allocate(len(value))
        if out is None or len(out) < len(value):
            return len(value), None
        self._touch(bytes(key))
        out[: len(value)] = value
        return len(value), out

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._values)

    @property
    def total(self) -> int:
        """Bytes of all keys and values."""
        return self._total

    def clear(self) -> None:
        self._values.clear()
        self._total = 0

    # ---- as bytes ------------------------------------------------------------------------------------------------

    def flattened_size(self) -> int:
        """Bytes that `flatten` needs, exactly."""
        return len(pack_blobs(self._values.items(), device_version=0, build="", key=b""))

    def flatten(self, out: Writable, *, device_version: int = 1, build: str = "", key: bytes = b"") -> None:
        """Write everything, in the order of use, into a buffer; `BlobFileError` and nothing if it is too small."""
        data = pack_blobs(self._values.items(), device_version=device_version, build=build, key=key)
        if len(out) < len(data):
            raise BlobFileError(f"{len(out)} bytes for a cache that takes {len(data)}")
        out[: len(data)] = data

    def unflatten(self, data: bytes | Writable, *, device_version: int = 1, build: str = "", key: bytes = b"") -> None:
        """Replace everything by what `flatten` wrote. Entries that exceed the limits of this cache are left out.

        What another build or device version wrote is no error: the cache is empty then.

        Raises:
            BlobFileError: It is damaged, or something else; the cache is empty then.
        """
        self.clear()
        for name, value in unpack_blobs(data, device_version=device_version, build=build, key=key):
            self.set(name, value)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _make_room(self, key: bytes, needed: int) -> bool:
        """Evict as the policy says; whether an entry of that size fits afterwards."""
        capacity, half = self.policy.capacity, self.max_total // 2
        if capacity is Capacity.HALVE and self._total <= half:
            return False
        victims = list(self._values)
        if self.policy.select is Select.RANDOM:
            self._random.shuffle(victims)
        for victim in victims:
            over_half = capacity is not Capacity.FIT and self._total > half
            no_fit = capacity is not Capacity.HALVE and self._total + needed - self._size_of(key) > self.max_total
            if not over_half and not no_fit:
                break
            self._remove(victim)
        return self._total + needed - self._size_of(key) <= self.max_total

    def _size_of(self, key: bytes) -> int:
        value = self._values.get(key)
        return 0 if value is None else len(key) + len(value)

    def _remove(self, key: bytes) -> None:
        self._total -= len(key) + len(self._values.pop(key))

    def _touch(self, key: bytes) -> None:
        self._values[key] = self._values.pop(key)
