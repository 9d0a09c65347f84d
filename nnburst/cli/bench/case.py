"""What a row of the benchmark is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from .placement import APART, Cpus
from .sampling import Samples


@dataclass(frozen=True, slots=True)
class Subject:
    """A row that is set up and ready to be measured.

    Attributes:
        sample: Takes a number of samples.
        server_pid: Process to pin to the server's CPU, or None if the row pins its own threads.
        park: Stops the server, so that it leaves its CPU to other rows, or None if it sleeps by itself.
        unpark: Undoes `park`.
    """

    sample: Callable[[int], Samples]
    server_pid: int | None = None
    park: Callable[[], None] | None = None
    unpark: Callable[[], None] | None = None


class Bench:
    """What the rows of one run share."""

    def __init__(self, cpus: Cpus, directory: str, polling_window: float, stack: ExitStack) -> None:
        self.cpus = cpus
        self.directory = directory
        self.polling_window = polling_window
        self._stack = stack
        self._services: dict[str, Any] = {}

    def service(self, device: str = "nnburst-noop") -> Any:
        """The service child with that device, started on first use and ended with the run."""
        if device not in self._services:
            from ...runtime import launch

            self._services[device] = self._stack.enter_context(launch(devices=[device]))
        return self._services[device]


@dataclass(frozen=True, slots=True)
class Case:
    """One row.

    Attributes:
        key: Name for ``--only`` and in the JSON file.
        group: Which paragraph of the table it stands in: the letters of ``docs/benchmarks.md``.
        title: Name in the table.
        wait: ``poll`` (looks until there is something) or ``block`` (sleeps in the kernel).
        payload_bytes: What the caller hands over per round trip.
        open: Sets the row up for as long as the context lasts.
        placement: `APART` or `ONE_CORE`.
        module: What must be importable, or None.
        distribution: What pip must install for it.
    """

    key: str
    group: str
    title: str
    wait: str
    payload_bytes: int
    open: Callable[[Bench], AbstractContextManager[Subject]]
    placement: str = APART
    module: str | None = None
    distribution: str | None = None

    def why_not(self, cpus: Cpus) -> str:
        """Return why the row cannot run here, or an empty string."""
        if self.placement == APART and not cpus.two:
            return "skipped: needs 2 CPUs, this process may use 1"
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"not installed: pip install {self.distribution} (or 'nnburst[bench]')"
        return ""
