"""A cluster's own certificate authority: made once, it invites hosts by a file each, and takes invitations back.

Not here: what the files are used for (identity). Invariants: a file is written whole, 0600, and never over another one;
the authority's key stays in `authority.pem` and goes to no host.
"""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.errors import BadIdentity
from coordinator.host.identity import DOMAIN, HEAD, check_host, head_name
from coordinator.host.revoked import REVOKED, fingerprint

AUTHORITY = "authority.pem"
FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
_DER = serialization.Encoding.DER
_DAY = datetime.timedelta(days=1)
_VALID = 3650 * _DAY  # nobody renews what nobody sees: whoever is to be kept out is on the list of the revoked


def create(folder: Path) -> Path:
    """A new authority in that folder, and the head's identity; the head's file. `BadIdentity` when there is one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "expressway cluster authority")])
    certificate = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / AUTHORITY, _pem(key) + _pem(certificate))
    return _issue(folder, HEAD, head_name())


def invite(folder: Path, host: str) -> Path:
    """The identity of one more host; its file. `BadIdentity` for a name that is taken, or without an authority."""
    if check_host(host) == HEAD:
        raise BadIdentity(f"{HEAD!r} is the name of the coordinator's own host")
    return _issue(folder, host, f"*.{host}.{DOMAIN}")


def revoke(folder: Path, host: str) -> str:
    """Puts a host's certificate on the list of those that count no longer, by its name or `sha256:…`; its fingerprint.

    The file of a named one is removed, so that the name can be invited again. `BadIdentity` when there is none.
    """
    path = folder / f"{host}.pem"
    printed = host if FINGERPRINT.fullmatch(host) else ""
    if not printed:
        if check_host(host) == HEAD:
            raise BadIdentity("the head's own certificate is replaced by a new authority")
        try:
            printed = fingerprint(x509.load_pem_x509_certificate(_certificate(path)).public_bytes(_DER))
        except (OSError, ValueError):
            raise BadIdentity(f"{path}: no certificate; name it by its fingerprint, sha256:…") from None
    line = printed if host == printed else f"{printed} {host}"
    with open(os.open(folder / REVOKED, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    if host != printed:
        path.unlink()
    return printed


def _certificate(path: Path) -> bytes:
    data = path.read_bytes()
    return data[data.index(b"-----BEGIN CERTIFICATE") :]


def _issue(folder: Path, host: str, covers: str) -> Path:
    path = folder / AUTHORITY
    try:
        signer = serialization.load_pem_private_key(path.read_bytes(), None)
        authority = x509.load_pem_x509_certificate(_certificate(path))
    except (OSError, ValueError):
        raise BadIdentity(f"{path}: no authority; `expressway cluster init` makes one") from None
    assert isinstance(signer, ec.EllipticCurvePrivateKey), "as `create` made it"
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]), authority.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(covers)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    made = folder / f"{host}.pem"
    _write(made, _pem(key) + _pem(certificate) + _pem(authority))
    return made


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)  # hosts' clocks differ
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem(thing: ec.EllipticCurvePrivateKey | x509.Certificate) -> bytes:
    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(serialization.Encoding.PEM)
    return thing.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise BadIdentity(f"{path}: there is one already; it is not replaced") from None
