"""Statistics that a service writes into shared memory, and readers that do not disturb the service.

A service has a page of shared memory with a row for the service itself, each model and each burst. `find_services` and
`look` read the page from any process of the same user, without a request.
"""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
