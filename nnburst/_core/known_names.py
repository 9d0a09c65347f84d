"""Objects that refuse attributes which they do not have: a setting with a typing error in its name has no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class KnownNames:
    """Base of such objects. Their public attributes are those of their classes, among them names that are annotated.

    Reading costs nothing. A class that sets one in a fast loop has slots for all instead, and `object.__setattr__`.
    Subclasses that users write may have attributes of their own. Names in ``_remedies`` cannot be set, and what to do
    instead is said.
    """

    __slots__ = ()
    _known_names: ClassVar[frozenset[str] | None] = None
    _remedies: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        annotated = (name for base in cls.__mro__ for name in vars(base).get("__annotations__", ()))
        cls._known_names = frozenset((*dir(cls), *annotated)) if cls.__module__.startswith("nnburst.") else None

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute.

        Raises:
            AttributeError: There is none of that name, or it cannot be replaced.
        """
        if name[0] != "_":
            self._check_name(name)
        object.__setattr__(self, name, value)

    def _check_name(self, name: str) -> None:
        kind, known = type(self).__name__, self._known_names
        if name in self._remedies:
            said = f"{name!r} of {kind} objects cannot be replaced; {self._remedies[name]}"
        elif known is None or name in known:
            return
        else:
            from difflib import get_close_matches

            public = (known_name for known_name in known if known_name[0] != "_")
            close = get_close_matches(name, public, 1)
            remedy = f"; did you mean {close[0]!r}?" if close else ""
            said = f"{kind} objects have no attribute {name!r} to set{remedy}"
        raise AttributeError(said, name=name, obj=self)
