"""The certificate of a server and its key."""

from __future__ import annotations

import os
import ssl


class TLS:
    """The certificate and its key, which can be reloaded when they were renewed.

    Raises:
        ValueError: a file cannot be read, they do not belong together, or the key has a password.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.reload()

    def reload(self) -> None:
        """Read the certificate files again, for new connections. If that fails, nothing changes."""
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self._load(self.context)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._cert, self._key, password=self._no_password)
        except ssl.SSLError as error:
            reason = error.reason or error.strerror or "not PEM"
            raise ValueError(
                f"tls_cert={self._cert}, tls_key={self._key}: {reason}: give a PEM certificate and its key"
            ) from None
        except OSError as error:  # the error does not say which file
            unread = next(
                (path for path in (self._cert, self._key) if not os.access(path, os.R_OK)), self._cert
            )
            raise ValueError(f"{unread}: {error.strerror}") from None

    def _no_password(self) -> str:
        raise ValueError(f"tls_key={self._key} has a password: give a key without")
