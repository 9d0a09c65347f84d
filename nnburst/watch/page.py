"""The statistics page of a service (a piece of shared memory): the code of the processes that write it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import threading
from typing import TYPE_CHECKING

from .._core import ffi, lib
from .._core.errno import check
from .._core.fds import close_fds
from ..errors import DeviceUnavailable
from .stats import ACCOUNT, COUNTERS, HISTOGRAMS, RowKind, RowStats, row_stats

if TYPE_CHECKING:
    from .._core._nnburst import CData

MEMORY_NAME = "nnburst-watch"
MAGIC = b"nnbwatch"
_F_SEAL_FUTURE_WRITE = 0x10  # `fcntl` has the name from Python 3.13 on
_F_SEAL_SEAL = 0x1
MOST_ROWS = 2048
"""Maximum number of rows of a statistics page: enough for all bursts and models of two users."""
_MOST_BUCKETS = 1 << 18
"""Maximum number of filled histogram buckets of a page. Each row has 2112 buckets; a real service fills a few dozen."""


_PLACES = {**COUNTERS, **ACCOUNT}


def stride() -> int:
    return -(-ffi.sizeof("nnb_row") // 64) * 64


def map_page(fd: int, size: int, protection: int) -> CData:
    """Map a statistics page until the result is dropped."""
    mapping = ffi.gc(ffi.new("nnb_mapping *"), lib.nnb_unmap)
    check(lib.nnb_map(mapping, fd, 0, size, protection, False), "a statistics page")
    return mapping


class Row:
    """A row of the statistics page. `close` adds the row's numbers to the parent row."""

    def __init__(self, pointer: CData, page: Page | None = None, parent: Row | None = None) -> None:
        """Use `Page.open` or `make_private_row` instead."""
        self.pointer = pointer
        self._page = page
        self._keep = None if page is None else page.memory
        self._parent = parent

    def count(self, name: str, n: int = 1) -> None:
        """Add `n`, which can be negative, to a counter. A thread that serves a burst must not call this method."""
        page = self._page
        if page is not None:
            with page.lock:
                if self._page is not None:
                    lib.nnb_row_count(self.pointer, _PLACES[name], n % (1 << 64))

    def time_execution(self, ns: int) -> None:
        """Count an execution without a burst, which took `ns` nanoseconds."""
        page = self._page
        if page is not None:
            with page.lock:
                lib.nnb_histogram_add(ffi.addressof(self.pointer.histograms, lib.NNB_EXECUTION), ns, 1)

    def mark_left(self) -> None:
        """Record that the client awaits no more answers. The row stays in use until the client's last run ends."""
        page = self._page
        if page is not None:
            with page.lock:
                self.pointer.has_left = self._page is not None

    def close(self) -> None:
        """Add the row's numbers to the parent row, and free the row. No thread may write it afterwards. Idempotent."""
        page, self._page = self._page, None
        if page is not None:
            page.free(self, self._parent)


def make_private_row() -> Row:
    """Return a row of statistics in private memory, for a burst that no reader watches."""
    pointer = ffi.new("nnb_row *")
    pointer.number = 1
    pointer.kind = RowKind.BURST
    return Row(pointer)


class Page:
    """Rows of statistics in shared memory.

    Only this process can write to the memory. Readers open the memory in ``/proc/PID/fd``.

    Closed rows are reused. A lock guards the allocation of rows. Only one thread at a time may write a row.

    Args:
        name: Name of a shared service; empty for a child service.
        rows: Maximum number of rows, up to `MOST_ROWS`.

    Raises:
        ResourceExhausted: The system has no free descriptor or memory.
    """

    def __init__(self, name: str = "", rows: int = 256) -> None:
        self.lock = threading.RLock()  # a signal handler may open a model while this thread has the lock
        size = lib.NNB_PAGE_HEADER + rows * stride()
        self._fd = check(lib.nnb_memfd_create(MEMORY_NAME.encode(), size, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW))
        try:
            self.memory = map_page(self._fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
            with contextlib.suppress(OSError):  # before Linux 5.1, this user's other programs can write
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | _F_SEAL_SEAL)
        except BaseException:
            os.close(self._fd)
            raise
        self._memory = self.memory.addr
        self._numbers = itertools.count(1)
        self._free = list(range(rows - 1, -1, -1))
        self._header = ffi.cast("nnb_page *", self._memory)
        header = self._header
        header.version, header.row_bytes, header.n_rows = lib.NNB_PAGE_VERSION, stride(), rows
        header.pid, header.since_ns = os.getpid(), lib.nnb_now_ns()
        _set_text(header.name, name)
        service = self.open(RowKind.SERVICE, name)
        assert service is not None
        self.service = service
        ffi.memmove(header.magic, MAGIC, len(MAGIC))

    @property
    def fd(self) -> int:
        """The descriptor of the page's memory. Processes that inherit the descriptor can only read the page."""
        return self._fd

    def open(
        self, kind: RowKind, label: str, parent: Row | None = None, client: tuple[int, int] = (0, 0)
    ) -> Row | None:
        """Return a new row. If all rows are in use, count the failure and return None.

        Args:
            label: Name of the row's subject, cut to 71 bytes.
            parent: The row to which `Row.close` adds the numbers.
            client: Process id and user id of the row's client.
        """
        with self.lock:
            if not self._free or self._fd < 0:
                self._header.unwatched += 1
                return None
            index = self._free.pop()
            self._header.n_used = max(self._header.n_used, index + 1)
            place = lib.NNB_PAGE_HEADER + index * stride()
            row = ffi.cast("nnb_row *", self._memory + place)
            head = ffi.new("nnb_row *")
            head.parent = 0 if parent is None else parent.pointer.number
            head.since_ns, head.kind = lib.nnb_now_ns(), kind
            head.client_pid, head.client_uid = client
            _set_text(head.label, label)
            lib.nnb_row_open(row, head, next(self._numbers))
            return Row(row, self, parent)

    def free(self, row: Row, parent: Row | None) -> None:
        """Free a row. Only `Row.close` calls this."""
        pointer = row.pointer
        with self.lock:
            above = ffi.NULL
            if parent is not None and pointer.number:
                above = (self.service if parent._page is None else parent).pointer  # the parent may be closed
            lib.nnb_row_close(pointer, above)
            place = int(ffi.cast("uintptr_t", pointer)) - int(ffi.cast("uintptr_t", self._memory))
            self._free.append((place - lib.NNB_PAGE_HEADER) // stride())

    def look(self) -> tuple[RowStats, ...]:
        """Read all rows once, like a reader in another process."""
        return look_at_rows(self.memory)

    def close(self) -> None:
        """Hide the page from new readers. The memory stays mapped as long as a row is in use. Idempotent."""
        with self.lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            close_fds([fd])


def look_at_rows(mapping: CData) -> tuple[RowStats, ...]:
    """Read each used row of a mapped page once, in order of row numbers. The page's writer is not trusted.

    Raises:
        DeviceUnavailable: The page contains more than any service writes.
    """
    used = min(ffi.cast("nnb_page *", mapping.addr).n_used, (mapping.size - lib.NNB_PAGE_HEADER) // stride())
    found: dict[int, RowStats] = {}
    buckets = 0
    for place in range(lib.NNB_PAGE_HEADER, lib.NNB_PAGE_HEADER + used * stride(), stride()):
        row = row_stats(ffi.cast("nnb_row *", mapping.addr + place))
        if row is not None:
            buckets += sum(len(getattr(row, name).buckets) for name in HISTOGRAMS)
            if buckets > _MOST_BUCKETS:
                raise DeviceUnavailable("its statistics page has more in it than a service writes")
            found[row.number] = row
    return tuple(found[number] for number in sorted(found))


def _set_text(field: CData, text: str) -> None:
    raw = text.encode(errors="replace")[: lib.NNB_LABEL - 1]
    ffi.memmove(field, raw.ljust(lib.NNB_LABEL, b"\0"), lib.NNB_LABEL)
