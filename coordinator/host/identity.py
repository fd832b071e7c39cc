"""Who a host of a cluster is: one private file with its key, its certificate and the cluster's authority, as PEM.

    head.pem       CN head      head.expressway.internal      the coordinator's host
    NAME.pem       CN NAME      *.NAME.expressway.internal     another host: its supervisor and lanes are names below it

Not here: making the files (authority), connections. Invariants: a file that others may read is refused; both ends of
every connection between hosts show a certificate of the same authority, and nobody else's is believed.
"""

from __future__ import annotations

import os
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.x509.oid import NameOID

from coordinator import limits
from coordinator.errors import BadIdentity

HEAD = "head"
DOMAIN = "expressway.internal"  # ".internal" is nobody's: these names are never looked up
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,29}[a-z0-9])?")
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]{1,40})-----\n[A-Za-z0-9+/=\n]+-----END \1-----\n")


@dataclass(frozen=True, slots=True)
class Identity:
    """A host's own key and certificate, and whom it believes. `load` makes one."""

    name: str
    path: Path
    key: bytes
    certificate: bytes
    authority: bytes

    @classmethod
    def load(cls, path: Path) -> Identity:
        """From a file of this user alone. `BadIdentity` says what is wrong with it."""
        text = _read_private(path)
        found = [(match[1], match[0].encode()) for match in _BLOCK.finditer(text)]
        if [kind for kind, _ in found] != ["PRIVATE KEY", "CERTIFICATE", "CERTIFICATE"]:
            raise BadIdentity(f"{path}: expected a key, its certificate and the authority's, as PEM")
        (_, key), (_, certificate), (_, authority) = found
        try:
            subject = x509.load_pem_x509_certificate(certificate).subject
            name = str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        except (ValueError, IndexError):
            raise BadIdentity(f"{path}: its certificate cannot be read") from None
        identity = cls(check_host(name), path, key, certificate, authority)
        identity.context()  # a key and a certificate that do not belong together are found here
        return identity

    def context(self) -> ssl.SSLContext:
        """For a server of asyncio that speaks HTTP/2 with holders of a certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=self.authority.decode("ascii"))
            context.load_cert_chain(self.path, password=lambda: "")
        except (OSError, ValueError):
            raise BadIdentity(f"{self.path}: no key and certificate that belong together") from None
        context.set_alpn_protocols(["h2"])
        return context

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server: callers show a certificate of the authority."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC client."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def head_name() -> str:
    """What the coordinator's certificate is for."""
    return f"{HEAD}.{DOMAIN}"


def process_name(process: str, host: str) -> str:
    """What a host's certificate covers: one of its processes."""
    return f"{process}.{host}.{DOMAIN}"


def host_name(certificate: str, suffix: str) -> str:
    """The name of a host by that of its certificate, which several hosts may share: then a suffix tells them apart, and
    no other certificate's host can have the name. `BadIdentity` for one that cannot be."""
    return f"{check_host(certificate)}.{check_host(suffix)}" if suffix else check_host(certificate)


def certificate_of(host: str) -> str:
    """The name in the certificate of a host of that name."""
    return host.partition(".")[0]


def check_host(name: str) -> str:
    """The name, if a host may have it. `BadIdentity` when not."""
    if not _NAME.fullmatch(name):
        raise BadIdentity(f"host name {name[:64]!r}: 1 to 31 of a-z, 0-9 and '-', neither first nor last a '-'")
    return name


def _read_private(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise BadIdentity(f"{path}: must be a file of this user alone (chmod 600)")
            data = file.read(limits.IDENTITY_BYTES + 1)
    except OSError as error:
        raise BadIdentity(f"{path}: {error.strerror}; `expressway cluster init` and `invite` make one") from None
    if len(data) > limits.IDENTITY_BYTES:
        raise BadIdentity(f"{path}: over {limits.IDENTITY_BYTES} bytes")
    try:
        return data.decode("ascii")
    except ValueError:
        raise BadIdentity(f"{path}: no PEM") from None
