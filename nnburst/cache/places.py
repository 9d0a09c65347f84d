"""Where things are kept by default."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from .reasons import CacheReason, CacheRejected


def default_cache_directory() -> Path:
    """Where compilations are cached: ``NNBURST_CACHE_DIR``, else the user's cache home, else `CacheRejected`."""
    return _given("NNBURST_CACHE_DIR") or _base("XDG_CACHE_HOME", ".cache") / "nnburst" / "v1"


def default_state_directory() -> Path:
    """Where key and trust store are: ``NNBURST_STATE_DIR``, else the user's state home, else `CacheRejected`."""
    return _given("NNBURST_STATE_DIR") or _base("XDG_STATE_HOME", ".local/state") / "nnburst" / "v1"


def _given(variable: str) -> Path | None:
    """A variable of our own; not one that another user may have set for a privileged process."""
    given = os.environ.get(variable)
    return Path(given) if given and os.getuid() == os.geteuid() else None


def _base(variable: str, below_home: str) -> Path:
    """A directory of the XDG specification; relative paths do not count there."""
    given = os.environ.get(variable, "")
    return Path(given) if os.path.isabs(given) else _home() / below_home


def _home() -> Path:
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a container with a user id without a name
            home = ""
    if not os.path.isabs(home):
        raise CacheRejected(
            CacheReason.NO_STORE, "this user has no home directory; set NNBURST_CACHE_DIR and NNBURST_STATE_DIR"
        )
    return Path(home)
