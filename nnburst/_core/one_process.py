"""Objects that cannot leave the process that made them."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from ..errors import InvalidArgument


class OneProcess:
    """Base of such objects: pickling or copying one says what to do instead."""

    __slots__ = ()
    _instead = "make one in each process"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse.

        Raises:
            InvalidArgument: Always.
        """
        raise InvalidArgument(
            f"{type(self).__name__} objects belong to the process that made them and cannot be pickled or copied; "
            f"{self._instead}"
        )
