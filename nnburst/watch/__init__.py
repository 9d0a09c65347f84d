"""Watching without disturbing: what a service writes about itself while it works, and looking at it from elsewhere.

A service has a `Page` of shared memory with a row for each burst, each model and itself. Its threads count there with
plain stores; `find_services` and `look` read it from any process of the same user, without a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ._report import report
    from .page import MOST_ROWS, Page, Row, private_row
    from .reader import FoundPage, Viewer, find_services, look
    from .stats import COUNTERS, Histogram, Latency, RowKind, RowStats, ServiceStats, row_stats
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "._report": "report",
            ".page": "MOST_ROWS Page Row private_row",
            ".reader": "FoundPage Viewer find_services look",
            ".stats": "COUNTERS Histogram Latency RowKind RowStats ServiceStats row_stats",
        },
    )

__all__ = [
    "COUNTERS",
    "MOST_ROWS",
    "FoundPage",
    "Histogram",
    "Latency",
    "Page",
    "Row",
    "RowKind",
    "RowStats",
    "ServiceStats",
    "Viewer",
    "find_services",
    "look",
    "private_row",
    "report",
    "row_stats",
]
