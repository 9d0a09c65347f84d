"""Limits on the resources that one connection, and one user, may have in a service at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict, fields

from ..._core.leaving import Closing
from ...errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from ...watch.page import Row

NO_LIMIT = 1 << 62
_OF_USERS = (
    *("connections", "process_bytes", "process_fds", "process_threads", "processors"),
    *("new_connections", "log_lines"),
)
_SHOWN = {
    **dict.fromkeys(("mapped_bytes", "buffer_bytes", "working_bytes"), "bytes"),
    "fds": "fds",
    "requests": "threads",
}
"""Counters in a connection's row of statistics, by the quota whose use they show."""


class Quotas(Struct, frozen=True):
    """Limits for one connection, or for all connections of a user.

    Attributes:
        connections: Open connections of a user.
        models, bursts, buffers: Number of open models, bursts and buffers.
        buffer_bytes: Bytes of driver-managed buffers.
        mapped_bytes: Bytes of all pools and queues that the client has sent.
        fds: Descriptors that the client has sent.
        requests: Running executions without a burst. A fenced execution counts until its client has released it.
        working_bytes: Working memory of bound requests and their runs, in bytes. Pools count in `mapped_bytes`.
        process_bytes, process_fds: Private memory (weights included) and descriptors of the process that runs a
            user's own models. The kernel enforces both (RLIMIT_DATA, RLIMIT_NOFILE).
        process_threads: Threads of the process that runs a user's own models. A process with more threads is ended.
        processors: Processors that a user's own models may keep busy on average. A control group enforces this limit.
        new_connections: New connections of a user in ten seconds.
        log_lines: Log lines of each process in ten seconds; further lines are only counted.
    """

    connections: int = 1
    models: int = 64
    bursts: int = 64
    buffers: int = 1024
    buffer_bytes: int = 4 << 30
    mapped_bytes: int = 16 << 30
    fds: int = 1024
    requests: int = 64
    working_bytes: int = 2 << 30
    process_bytes: int = NO_LIMIT
    process_fds: int = NO_LIMIT
    process_threads: int = NO_LIMIT
    processors: int = NO_LIMIT
    new_connections: int = NO_LIMIT
    log_lines: int = NO_LIMIT

    def replace(self, values: Mapping[str, int], option: str = "quotas", *, of_user: bool = False) -> Quotas:
        """Return these quotas with some of them replaced.

        Args:
            values: New values by name.
            option: Name of the option that gave the values, for error messages.
            of_user: True for a user's quotas, which include `connections`.

        Raises:
            InvalidArgument: There is no such quota, or its value is not a whole number.
        """
        if not isinstance(values, Mapping):
            raise InvalidArgument(f"{option}={values!r}: give a dict of numbers by the names of quotas")
        known = asdict(self)
        names = [name for name in known if of_user or name not in _OF_USERS]
        for name, value in values.items():
            if name not in names or not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgument(f"{option}: {name}={value!r}: give a whole number for one of {', '.join(names)}")
        return Quotas(**{**known, **values})


PER_USER = Quotas(
    256, 512, 1024, 8192, 8 << 30, 32 << 30, 16384, 512, 8 << 30,
    process_fds=65536, process_threads=8192, new_connections=5000, log_lines=100,
)  # fmt: skip
"""Default quotas of one user of a shared service."""


UNLIMITED = Quotas(*[NO_LIMIT] * len(fields(Quotas)))
"""Quotas of a broker, which acts for the operator."""


class Charge(Closing):
    """A part of a quota that is in use until `release` or the end of a ``with`` block. `release` is idempotent."""

    __slots__ = ("_above", "_amounts", "_ledger")

    def __init__(self, ledger: Ledger, amounts: dict[str, int], above: Charge | None) -> None:
        self._ledger = ledger
        self._amounts = amounts
        self._above = above

    def release(self) -> None:
        amounts, self._amounts = self._amounts, {}
        self._ledger.refund(amounts)
        if self._above is not None:
            self._above.release()

    close = release


class Ledger:
    """Counter of the resources in use, which enforces `Quotas`.

    Args:
        owner: Name of the owner, for error messages.
        above: A second ledger to charge, such as the ledger of the user.
        row: Row of statistics that shows the amounts in use.
    """

    def __init__(
        self, quotas: Quotas, owner: str = "this connection", above: Ledger | None = None, row: Row | None = None
    ) -> None:
        self._limits: dict[str, int] = asdict(quotas)
        self._row = row
        self._update_row(self._limits, "most_")
        self._used = dict.fromkeys(self._limits, 0)
        self._lock = threading.RLock()  # the garbage collector may release a charge while this thread has the lock
        self._owner = owner
        self._prefix = "" if owner == "this connection" else "user."
        self._above = above

    @property
    def used(self) -> dict[str, int]:
        with self._lock:
            return dict(self._used)

    def charge(self, **amounts: int) -> Charge:
        """Charge all amounts, or none if a quota would be exceeded.

        Raises:
            ResourceExhausted: A quota would be exceeded (RESOURCE_EXHAUSTED_TRANSIENT).
        """
        self._add(amounts)
        try:
            return Charge(self, amounts, None if self._above is None else self._above.charge(**amounts))
        except ResourceExhausted:
            self.refund(amounts)
            raise

    def _add(self, amounts: dict[str, int]) -> None:
        with self._lock:
            for name, amount in amounts.items():
                if self._used[name] + amount > self._limits[name]:
                    launched = "" if self._prefix else f", launch(quotas={{{name!r}: N}})"
                    raise ResourceExhausted(
                        f"{self._owner} may have {self._limits[name]} {name}, has {self._used[name]} and wants "
                        f"{amount} more: close what is not needed, or raise the service's quota (nnburst serve --quota "
                        f"{self._prefix}{name}=N{launched})"
                    )
            for name, amount in amounts.items():
                self._used[name] += amount
        self._update_row(amounts)

    def _update_row(self, amounts: Mapping[str, int], prefix: str = "", sign: int = 1) -> None:
        if self._row is not None:
            for name, amount in amounts.items():
                if name in _SHOWN and amount:
                    self._row.count(prefix + _SHOWN[name], sign * amount)

    def refund(self, amounts: dict[str, int]) -> None:
        """Give back amounts that `charge` took."""
        with self._lock:
            for name, amount in amounts.items():
                self._used[name] -= amount
        self._update_row(amounts, sign=-1)

    def close(self) -> None:
        if self._row is not None:
            self._row.close()
