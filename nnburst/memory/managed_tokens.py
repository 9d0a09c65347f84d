"""Tokens: how clients name driver-managed buffers."""

from __future__ import annotations

import collections

from .._core.leaving import ProcessLock
from ..errors import InvalidArgument, ResourceExhausted
from .managed import ManagedBuffer

_SLOT_BITS = 20
_GENERATIONS = 1 << 11  # 20 + 11 bits: a token is a positive int32
_RESTING = 64


class _Tokens(ProcessLock):
    """Numbers of buffers: a slot, and how often the slot was used before. Unlike each other in the whole process."""

    def __init__(self) -> None:
        super().__init__()
        self._generations = [0]  # slot 0 is never used, so that no token is 0
        self._free: collections.deque[int] = collections.deque()

    def take(self) -> int:
        """Return a number in 1..2**31 - 1; `ResourceExhausted` if too many are in use."""
        with self.lock:
            if len(self._free) > _RESTING or (self._free and len(self._generations) == 1 << _SLOT_BITS):
                slot = self._free.popleft()  # freed slots rest, so that numbers come again as late as possible
                self._generations[slot] = (self._generations[slot] + 1) % _GENERATIONS
            elif len(self._generations) < 1 << _SLOT_BITS:
                slot = len(self._generations)
                self._generations.append(0)
            else:
                raise ResourceExhausted("the process has no room for another buffer; close some")
            return self._generations[slot] << _SLOT_BITS | slot

    def give_back(self, token: int) -> None:
        """The buffer is gone; the number comes again after 2**11 uses of its slot."""
        with self.lock:
            self._free.append(token & ((1 << _SLOT_BITS) - 1))


_tokens = _Tokens()


class BufferTracker:
    """The buffers of one device by token."""

    def __init__(self) -> None:
        self._buffers: dict[int, ManagedBuffer] = {}

    def add(self, buffer: ManagedBuffer) -> int:
        """Register a buffer and return its token, which no other buffer of the process has."""
        token = _tokens.take()
        self._buffers[token] = buffer
        return token

    def remove(self, token: int) -> None:
        """Forget a token and close its buffer; an execution that uses it finishes first. Idempotent."""
        buffer = self._buffers.pop(token, None)
        if buffer is not None:
            buffer.close()
            _tokens.give_back(token)

    def resolve(self, token: int) -> ManagedBuffer:
        """Return the buffer of a token; `InvalidArgument` if there is none."""
        buffer = self._buffers.get(token)
        if buffer is None:
            raise InvalidArgument(f"no buffer has token {token}; it was never given out here, or its buffer is closed")
        return buffer

    def __len__(self) -> int:
        return len(self._buffers)
