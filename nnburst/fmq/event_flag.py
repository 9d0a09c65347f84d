"""Event flags: sticky notification bits with which processes wake each other."""

from __future__ import annotations

import errno
from typing import Any, ClassVar

from .._core._nnburst import ffi, lib
from .._core.deadline import Deadline
from .._core.errno import check
from .._core.leaving import Closing
from ..errors import BadState, InvalidArgument

_ALL_BITS = 0xFFFFFFFF


class EventFlag(Closing):
    """32 sticky bits in shared memory. A bit stays set until a wait clears it.

    Several threads and processes may use a flag at once. If two threads wait for one bit, one clears the bit and the
    other continues to wait.

    Args:
        source: A `MessageQueue`, or a writable buffer in shared memory that contains the 32-bit word.
        offset: Position of the word in the buffer in bytes; a multiple of 4.

    Raises:
        InvalidArgument: The queue has no event word, or the buffer is read-only, too small or misaligned.

    Example:
        >>> from nnburst.fmq import EventFlag, MessageQueue
        >>> with MessageQueue(np.uint8, 4) as queue, EventFlag(queue) as flag:
        ...     flag.wake(flag.NOT_EMPTY)
        ...     flag.wait(flag.NOT_EMPTY) == flag.NOT_EMPTY
        True
    """

    __slots__ = ("_owner", "_word")
    NOT_FULL: ClassVar[int] = lib.NNB_EVENT_NOT_FULL
    """Bit that `MessageQueue.read_blocking` sets after taking elements."""
    NOT_EMPTY: ClassVar[int] = lib.NNB_EVENT_NOT_EMPTY
    """Bit that `MessageQueue.write_blocking` sets after adding elements."""

    def __init__(self, source: Any, offset: int = 0) -> None:
        self._word, self._owner = _find_word(source, offset)

    def wake(self, mask: int) -> None:
        """Set bits, and wake all waiters for bits that were not set before.

        If all bits were already set, no system call is made.

        Args:
            mask: Bits; 0 does nothing.

        Raises:
            InvalidArgument: `mask` has more than 32 bits.
            BadState: The flag is closed.
        """
        check(lib.nnb_event_wake(self._live(), _bits(mask)), "EventFlag.wake")

    def wait(self, mask: int, timeout: float | None = None, retry: bool = True) -> int:
        """Wait until at least one of the bits is set, and clear the bits.

        A bit that is already set is returned at once, whatever the timeout. Signal handlers run while waiting.

        Args:
            mask: Bits, at least one.
            timeout: Seconds; None waits without end.
            retry: False to return 0 as soon as another bit of the word changes or a signal comes.

        Returns:
            The bits of `mask` that were set and are now cleared; 0 only with ``retry=False``.

        Raises:
            MissedDeadline: No bit was set in time.
            InvalidArgument: `mask` is 0 or has more than 32 bits.
            BadState: The flag is closed.
        """
        bits = _bits(mask)
        if not bits:
            raise InvalidArgument("mask is 0: nothing could ever end the wait")
        deadline = Deadline.after(timeout).at_ns
        state = ffi.new("uint32_t *")
        one_round = lib.nnb_event_wait_retry if retry else lib.nnb_event_wait
        while True:
            # Look the word up each time: close() in another thread ends the wait, and `_owner` keeps the mapping for C.
            word, _owner = self._live(), self._owner
            rc = one_round(word, bits, state, deadline)
            if rc == 0:
                return int(state[0])
            if rc == -errno.ERESTART:
                continue
            if not retry and rc in (-errno.EAGAIN, -errno.EINTR):
                return 0
            check(rc, f"EventFlag.wait for bits {bits:#x}")

    def close(self) -> None:
        """Close the flag. A wait in another thread ends with `BadState`. Idempotent."""
        self._word = self._owner = None

    def _live(self) -> Any:
        word = self._word
        if word is None:
            raise BadState("the event flag is closed")
        return word

    def _event_word(self) -> tuple[Any, object]:
        return self._live(), self._owner


def _bits(mask: int) -> int:
    if not 0 <= mask <= _ALL_BITS:
        raise InvalidArgument(f"mask is {mask:#x}; an event flag has 32 bits")
    return mask


def _find_word(source: Any, offset: int) -> tuple[Any, object]:
    """Return the word as ``uint32_t *`` and the object that keeps it mapped."""
    own = getattr(source, "_event_word", None)
    if own is not None:
        return own()  # type: ignore[no-any-return]
    try:
        buffer = ffi.from_buffer("uint8_t[]", source, require_writable=True)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(f"an event flag needs a queue or a writable contiguous buffer: {error}") from error
    if offset < 0 or offset + 4 > len(buffer):
        raise InvalidArgument(f"the event word at offset {offset} is outside the buffer of {len(buffer)} bytes")
    word = ffi.cast("uint32_t *", buffer + offset)
    if int(ffi.cast("uintptr_t", word)) % 4:
        raise InvalidArgument(f"the event word at offset {offset} is not aligned to 4 bytes")
    return word, buffer
