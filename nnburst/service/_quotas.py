"""How much one connection may own in a service, and how much of it is in use."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields

from ..errors import ResourceExhausted

__all__ = ["Charge", "Ledger", "Quotas"]


@dataclass(frozen=True, slots=True)
class Quotas:
    """The most that one connection may own at a time.

    `mapped_bytes` counts every pool and queue it handed over, `buffer_bytes` what its driver-managed buffers take.
    """

    models: int = 64
    bursts: int = 64
    buffers: int = 1024
    buffer_bytes: int = 4 << 30
    mapped_bytes: int = 16 << 30
    fds: int = 1024


class Charge:
    """A part of a quota that is in use. `release` is idempotent."""

    __slots__ = ("_amounts", "_ledger")

    def __init__(self, ledger: Ledger, amounts: dict[str, int]) -> None:
        self._ledger = ledger
        self._amounts = amounts

    def release(self) -> None:
        """Give it back."""
        amounts, self._amounts = self._amounts, {}
        self._ledger.refund(amounts)


class Ledger:
    """Counts against `Quotas`."""

    def __init__(self, quotas: Quotas) -> None:
        self._limits = {field.name: int(getattr(quotas, field.name)) for field in fields(quotas)}
        self._used = dict.fromkeys(self._limits, 0)
        self._lock = threading.Lock()

    @property
    def used(self) -> dict[str, int]:
        """Amounts in use now, by name of the quota."""
        with self._lock:
            return dict(self._used)

    def charge(self, **amounts: int) -> Charge:
        """Take from the quotas; all or nothing.

        Raises:
            ResourceExhausted: One would be exceeded (RESOURCE_EXHAUSTED_TRANSIENT).
        """
        with self._lock:
            for name, amount in amounts.items():
                if self._used[name] + amount > self._limits[name]:
                    raise ResourceExhausted(
                        f"this connection may own {self._limits[name]} {name}, has {self._used[name]} and wants "
                        f"{amount} more: close objects that are not needed, or raise the service's quota"
                    )
            for name, amount in amounts.items():
                self._used[name] += amount
        return Charge(self, amounts)

    def refund(self, amounts: dict[str, int]) -> None:
        """Give back what `charge` took."""
        with self._lock:
            for name, amount in amounts.items():
                self._used[name] -= amount
