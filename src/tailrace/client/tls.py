"""TLS for clients: which certificates to trust, and which one to show."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace
from pathlib import Path

from .. import paths
from ..connstr import ConnectionString
from ..errors import UsageError

__all__ = ["TlsOptions", "tls_context", "with_url"]


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files in PEM form. Without ``ca_file`` the system's authorities are trusted."""

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    """Our own certificate, for servers that want one from their clients."""
    key_file: str | Path | None = None
    """Its key, if that is not in ``cert_file``."""
    verify: bool = True
    """False accepts any certificate: for a test network, never for a password."""

    def context(self) -> ssl.SSLContext:
        """The settings for Python's ssl module; `UsageError` names a file that can't be used."""
        ca_file, cert_file, key_file = (
            None if given is None else str(paths.file(given, what, must_exist=True))
            for given, what in (
                (self.ca_file, "the CA file"),
                (self.cert_file, "the certificate"),
                (self.key_file, "the key"),
            )
        )
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"the CA file {str(self.ca_file)!r} can't be used: {error}") from None
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if cert_file is not None:
            try:
                context.load_cert_chain(cert_file, key_file)
            except (OSError, ssl.SSLError) as error:
                raise UsageError(self._unusable(error)) from None
        elif key_file is not None:
            raise UsageError("a key file without a certificate is of no use; give the certificate too")
        return context

    def _unusable(self, error: OSError) -> str:
        """An error message: OpenSSL only says that something in one of two files is wrong."""
        cert, key = str(self.cert_file), str(self.key_file)
        if self.key_file is None:
            return (
                f"{cert!r} is not a PEM file with a certificate and its private key; if the key is in "
                "another file, give that too: --tls-key, key_file in Python, tlsClientKey in Spark"
            )
        return (
            f"the certificate {cert!r} and the key {key!r} don't belong together, or one of them is not a "
            f"PEM file: {getattr(error, 'reason', None) or error}"
        )


def tls_context(where: ConnectionString, options: TlsOptions | None) -> ssl.SSLContext | None:
    """The options with what the connection string adds, for connections to a cluster; None without TLS."""
    return with_url(where, options).context() if where.tls else None


def with_url(where: ConnectionString, options: TlsOptions | None) -> TlsOptions:
    """The options with what the connection string adds."""
    given = options or TlsOptions()
    ca_file = where.ca_file if given.ca_file is None else given.ca_file
    return replace(given, ca_file=ca_file, verify=given.verify and where.verify)
