"""Readers of the statistics pages of running services."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from msgspec import Struct

from .._core import ffi, lib
from ..errors import DeviceUnavailable
from .page import MAGIC, MEMORY_NAME, MOST_ROWS, look_at_rows, map_page, stride
from .stats import RowKind, ServiceStats, text_of

OF_USER = " of user "
"""The text between the service's name and the user in `name_of_worker`."""
_LINK = f"/memfd:{MEMORY_NAME} (deleted)"


def name_of_worker(service: str, uid: int) -> str:
    """Return the name of a user's worker process: the service's name, cut if too long, and the user."""
    end = f"{OF_USER}{uid}".encode()
    return (service.encode(errors="replace")[: lib.NNB_LABEL - 1 - len(end)] + end).decode(errors="replace")


class FoundPage(Struct, frozen=True):
    """A service whose statistics can be read.

    Attributes:
        pid: Process id of the service.
        path: Path of its statistics page, valid while the process runs.

    Example:
        >>> with nnburst.launch() as service:
        ...     (found,) = nnburst.watch.find_services(service.pid)
        ...     found.pid == service.pid
        True
    """

    pid: int
    path: str


def find_services(pid: int | None = None, *, every_user: bool = False) -> Iterator[FoundPage]:
    """Yield this user's services whose statistics can be read. The search does not disturb the services.

    Args:
        pid: The only process to look at, which may belong to another user.
        every_user: True for services of all users. Only root can read other users' statistics, which may be forged.

    Example:
        >>> with nnburst.launch() as service:
        ...     service.pid in [found.pid for found in nnburst.watch.find_services()]
        True
    """
    is_asked = pid is not None or every_user
    for number in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))) if pid is None else (pid,):
        directory = f"/proc/{number}/fd"
        try:
            names = os.listdir(directory)
        except OSError:  # the process is another user's, or has ended
            continue
        for name in names:
            try:
                path = f"{directory}/{name}"
                if os.readlink(path) == _LINK and (is_asked or os.stat(path).st_uid == os.geteuid()):
                    yield FoundPage(number, path)
                    break  # a service has one page
            except OSError:
                continue


class Viewer:
    """Reader that reads one statistics page repeatedly.

    Attributes:
        pid: Process id of the page's owner.
        name: Name of a shared service; empty for a child service.

    Raises:
        DeviceUnavailable: The service has ended or has another version, or its page contains more than any service
            writes (too many rows, or impossible numbers). `look` raises this error, too.
    """

    def __init__(self, found: FoundPage) -> None:
        self.pid = found.pid
        try:
            fd = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceUnavailable(f"process {found.pid} cannot be watched: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if status.st_size < lib.NNB_PAGE_HEADER or not lib.nnb_seals(fd) & 0x2:  # an unsealed page can shrink
                raise DeviceUnavailable(f"process {found.pid} has no statistics page that can be read")
            self._uid = status.st_uid
            most = lib.NNB_PAGE_HEADER + MOST_ROWS * stride()
            self._mapping = map_page(fd, min(status.st_size, most), mmap.PROT_READ)
        finally:
            os.close(fd)
        header = self._header = ffi.cast("nnb_page *", self._mapping.addr)
        fits = (
            bytes(ffi.buffer(header.magic, len(MAGIC))) == MAGIC
            and header.version == lib.NNB_PAGE_VERSION
            and header.row_bytes == stride()
            and lib.NNB_PAGE_HEADER + header.n_rows * stride() <= self._mapping.size
        )
        if not fits:
            raise DeviceUnavailable(
                f"process {found.pid} writes its statistics in another form: run the nnburst that it runs"
            )

    @property
    def name(self) -> str:
        return text_of(self._header.name)

    @property
    def user(self) -> str:
        """The user id, as text, if the service is a worker process for one user's models; otherwise ""."""
        _, _, user = self.name.partition(OF_USER)
        return user if user.isdecimal() else ""

    def look(self) -> ServiceStats:
        header, found = self._header, look_at_rows(self._mapping)
        now = lib.nnb_now_ns()
        rows = tuple(row for row in found if row.kind < RowKind.PROCESS)
        accounts = tuple(row for row in found if row.kind >= RowKind.PROCESS)
        return ServiceStats(self.name, self.pid, self._uid, header.since_ns, now, header.unwatched, rows, accounts)


def look(found: FoundPage) -> ServiceStats:
    """Read a service's statistics once.

    Args:
        found: A service that `find_services` has yielded.

    Raises:
        DeviceUnavailable: The service has ended or has another version, or its page contains more than any service
            writes.

    Example:
        >>> with nnburst.launch() as service:
        ...     (found,) = nnburst.watch.find_services(service.pid)
        ...     nnburst.watch.look(found).pid == service.pid
        True
    """
    return Viewer(found).look()
