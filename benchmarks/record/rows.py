"""Every row of the record, in the order of the table, which is also the order inside a round."""

from __future__ import annotations

from nnburst.cli.bench import rows
from nnburst.cli.bench.case import Case

from .cache import CACHE_CASES
from .lock import LOCK_CASES
from .memory import INPUT_CASES, SLOT_CASES, STATE_CASES
from .queues import QUEUE_CASES


def all_cases() -> tuple[Case, ...]:
    """Return the rows of `nnburst bench` with those that only concern who works on this package."""
    line, *others = rows.all_cases()
    return (line, *QUEUE_CASES, *others, *INPUT_CASES, *STATE_CASES, *SLOT_CASES, *CACHE_CASES, *LOCK_CASES)
