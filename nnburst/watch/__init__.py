"""Statistics that a service writes about itself while it works, and their readers, which do not disturb it.

A service has a `Page` of shared memory with a row for each burst, each model and itself. Its threads count there with
plain stores; `find_services` and `look` read it from any process of the same user, without a request.
"""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
