"""The certificate and key of a server, which can be replaced while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from ..errors import InvalidArgument


class Certificate:
    """A certificate and its key, read from files.

    Args:
        certificate: PEM file of the certificate, followed by its chain.
        key: PEM file of the private key, without a password.

    Attributes:
        context: TLS context for HTTP. New connections get the certificate that was read last.
        pair: Contents of the key file and the certificate file, for gRPC.

    Raises:
        InvalidArgument: A file is missing or cannot be read, or the key does not belong to the certificate.
    """

    def __init__(self, certificate: str | None, key: str | None) -> None:
        if certificate is None or key is None:
            raise InvalidArgument("--oip-cert and --oip-key go together; give both")
        self._files = certificate, key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.sni_callback = self._present  # it is called even if the client sends no name
        self.renew()

    def renew(self) -> None:
        """Read the files again. If this raises an error (see the constructor), the old certificate stays in use."""
        certificate, key = self._files
        try:
            latest = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            latest.load_cert_chain(certificate, key, password="")
            self.pair = Path(key).read_bytes(), Path(certificate).read_bytes()
        except OSError as error:  # errors of ssl are OSErrors, too
            raise InvalidArgument(
                f"--oip-cert {certificate}, --oip-key {key}: give PEM files, and a key without a password that belongs "
                f"to the certificate: {error}"
            ) from None
        self._latest = latest

    def _present(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._latest
