"""The certificate and key of a server, which can be replaced while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from ..errors import InvalidArgument


class Certificate:
    """A certificate and its key, read from files for both protocols.

    Args:
        certificate: A file in PEM, with the chain behind it.
        key: Its private key, a file in PEM without a password.

    Attributes:
        context: For HTTP; each new connection gets the certificate that was read last.
        pair: Key and certificate, for gRPC.

    Raises:
        InvalidArgument: A file is not given or cannot be read, or they do not belong together.
    """

    def __init__(self, certificate: str | None, key: str | None) -> None:
        if certificate is None or key is None:
            raise InvalidArgument("--oip-cert and --oip-key go together; give both")
        self._files = certificate, key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.sni_callback = self._present  # which is called without a name, too
        self.renew()

    def renew(self) -> None:
        """Read the files again. On an error, raised as by the constructor, the old certificate stays."""
        certificate, key = self._files
        try:
            latest = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            latest.load_cert_chain(certificate, key, password="")
            self.pair = Path(key).read_bytes(), Path(certificate).read_bytes()
        except OSError as error:  # errors of ssl are OSErrors, too
            raise InvalidArgument(f"--oip-cert {certificate}, --oip-key {key}: {error}") from None
        self._latest = latest

    def _present(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Have a connection that begins use the latest: a context keeps a certificate for each kind of key."""
        connection.context = self._latest
