"""Access tokens of network clients: ``Authorization: Bearer TOKEN``."""

from __future__ import annotations

import hmac
import os
import stat

from ..errors import InvalidArgument

_LEAST = 16
"""Minimum length of a token in characters: a shorter one can be guessed."""


class Tokens:
    """The tokens of a file with one ``NAME:TOKEN`` per line. Lines that begin with ``#`` are ignored.

    Args:
        file: Path of a file that only its owner may read or write. None admits every client.

    Raises:
        InvalidArgument: The file cannot be read, other users may read it, or a line is malformed.
    """

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._tokens: dict[str, bytes] | None = None
        self.renew()

    def renew(self) -> None:
        """Read the file again. If the constructor would raise an error, raise it and keep the old tokens."""
        if self._file is None:
            return
        try:
            with open(self._file, encoding="utf-8") as file:
                status = os.fstat(file.fileno())
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"--token-file {self._file} cannot be read: {error}") from None
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
            raise InvalidArgument(f"--token-file {self._file} may be read by others: chmod 600 {self._file}")
        found = {}
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.startswith("#"):
                name, _, token = line.strip().partition(":")
                if not name or len(token) < _LEAST or name in found:
                    raise InvalidArgument(
                        f"--token-file {self._file}, line {number}: write NAME:TOKEN, each name once, with {_LEAST} "
                        "characters or more in a token (openssl rand -hex 24 makes one)"
                    )
                found[name] = token.encode()
        self._tokens = found

    def admit(self, header: str | None) -> bool:
        """Return True if an Authorization header has a valid token, or if no token is needed.

        The duration of the check reveals nothing about the valid tokens.
        """
        if self._tokens is None:
            return True
        scheme, _, token = (header or "").partition(" ")
        candidate = token.strip().encode(errors="replace")
        found = [hmac.compare_digest(candidate, known) for known in self._tokens.values()]
        return scheme.lower() == "bearer" and any(found)


EVERYONE = Tokens(None)
"""Tokens that admit every client, even one without a token."""
