"""A connection to the gRPC door, as the client and the commands open it: plain, or with TLS.

Not here: the door's own certificate (tls), calls. Invariant: what is told to use TLS never speaks plain.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from coordinator import limits
from coordinator.errors import BadOption

ANSWER_BYTES = 64 << 20
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", ANSWER_BYTES),
    # a server that is gone without a word is noticed while an answer is awaited
    ("grpc.keepalive_time_ms", round(1e3 * limits.GRPC_PING_S)),
    ("grpc.keepalive_timeout_ms", round(1e3 * limits.GRPC_PING_TIMEOUT_S)),
)


@dataclass(frozen=True, slots=True)
class Trust:
    """TLS, and whom to believe: the certificates in `ca` (PEM), or those that the system trusts."""

    ca: Path | None = None
    server_name: str | None = None  # in the certificate, where it is not the host that is dialled

    def pem(self) -> bytes:
        """What is trusted. `BadOption` when there is nothing."""
        context = ssl.create_default_context()
        if self.ca is None:
            return "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True))).encode()
        try:
            data = self.ca.read_bytes()
            context.load_verify_locations(cadata=data.decode("ascii"))
        except (OSError, ValueError) as error:
            raise BadOption(f"{self.ca}: no certificates in PEM") from error
        return data


def open_channel(target: str, tls: Trust | None = None) -> grpc.aio.Channel:
    """A channel; it dials with its first call. `BadOption` when the certificates cannot be used."""
    if tls is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    name = tls.server_name or ("localhost" if target.startswith("unix:") else None)  # else gRPC takes the path for one
    named = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(tls.pem()), options=(*_OPTIONS, *named))
