"""The certificate of the doors, as both of them want it.

Not here: when a door needs one (config). Invariant: a pair that cannot be used is a `BadOption` before a door opens.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from coordinator.errors import BadOption


@dataclass(frozen=True, slots=True)
class Tls:
    """Where the certificate (with its chain) and its key lie, as PEM."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """For HTTP. `BadOption` when the files are no pair."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise BadOption(f"{self.certificate}, {self.key}: no certificate and key that belong together") from error
        return context

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC. `BadOption` when the files are no pair."""
        self.context()  # gRPC itself would say nothing
        return grpc.ssl_server_credentials([(self.key.read_bytes(), self.certificate.read_bytes())])


def named_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """From two options, of which there are both or none."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadOption("--tls-cert and --tls-key belong together")
    tls = Tls(certificate.absolute(), key.absolute())
    tls.context()
    return tls
