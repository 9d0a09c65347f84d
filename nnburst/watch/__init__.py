"""Statistics that a service writes into shared memory while it works, and readers that do not disturb it.

A service has a `Page` of shared memory with a row for itself, each model and each burst. Its threads update the rows
with plain stores. `find_services` and `look` read the page from any process of the same user, without a request.
"""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
