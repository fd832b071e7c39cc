"""Certificates of a cluster's hosts: made once, private, and believed only by their own authority's."""

import contextlib
import os
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from coordinator import limits
from coordinator.errors import BadIdentity
from coordinator.host import authority
from coordinator.host.identity import Identity, certificate_of, check_host, host_name, process_name
from coordinator.host.revoked import Revoked, fingerprint


def shakes_hands(server, client_identity, name):
    """A handshake in memory; the server's view of the caller."""
    context = ssl.create_default_context(cadata=client_identity.authority.decode())
    context.load_cert_chain(client_identity.path)
    pipes = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    (a_in, a_out), (b_in, b_out) = pipes
    caller = context.wrap_bio(a_in, a_out, server_hostname=name)
    called = server.context().wrap_bio(b_in, b_out, server_side=True)
    for _ in range(6):
        for end, out, into in ((caller, a_out, b_in), (called, b_out, a_in)):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
            into.write(out.read())
    return dict(part[0] for part in called.getpeercert()["subject"])["commonName"]


def test_hosts_of_one_authority_believe_each_other_and_no_other(tmp_path):
    head = Identity.load(authority.create(tmp_path / "ids"))
    host = Identity.load(authority.invite(tmp_path / "ids", "build-2"))
    other = Identity.load(authority.create(tmp_path / "other"))
    assert (head.name, host.name) == ("head", "build-2")
    assert shakes_hands(host, head, process_name("lane-0", "build-2")) == "head"
    with pytest.raises(ssl.SSLCertVerificationError):  # another host's name
        shakes_hands(host, head, process_name("lane-0", "build-3"))
    with pytest.raises(ssl.SSLError):
        shakes_hands(host, other, process_name("lane-0", "build-2"))


def test_files_are_private_and_never_replaced(tmp_path):
    path = authority.create(tmp_path)
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}
    with pytest.raises(BadIdentity, match="one already"):
        authority.create(tmp_path)
    authority.invite(tmp_path, "b")
    with pytest.raises(BadIdentity, match="one already"):
        authority.invite(tmp_path, "b")
    with pytest.raises(BadIdentity, match="no authority"):
        authority.invite(tmp_path / "empty", "b")
    assert b"PRIVATE" in (tmp_path / "authority.pem").read_bytes()
    assert path.read_bytes().count(b"PRIVATE KEY") == 2  # its own alone: begin and end
    os.chmod(path, 0o640)
    with pytest.raises(BadIdentity, match="this user alone"):
        Identity.load(path)


@pytest.mark.parametrize("name", ["a", "a" * 31, "build-2", "0"])
def test_names_that_a_host_may_have(name):
    assert check_host(name) == name


def test_a_shared_certificate_gives_names_that_no_other_certificate_has():
    assert (host_name("b", ""), host_name("b", "10-0-0-2")) == ("b", "b.10-0-0-2")
    assert {certificate_of(host_name("b", suffix)) for suffix in ("", "x")} == {"b"}
    for suffix in ("a.b", "a/b", "-", "x" * 32):
        with pytest.raises(BadIdentity):
            host_name("b", suffix)


@pytest.mark.parametrize("name", ["", "a" * 32, "-a", "a-", "a/b", "a.b", "A", "é", "a\n"])
def test_names_that_no_host_may_have(tmp_path, name):
    with pytest.raises(BadIdentity):
        check_host(name)
    with pytest.raises(BadIdentity):
        authority.invite(tmp_path, name)


def test_the_heads_name_is_not_given_away(tmp_path):
    authority.create(tmp_path)
    with pytest.raises(BadIdentity, match="own host"):
        authority.invite(tmp_path, "head")


def test_the_size_of_a_file(tmp_path):
    path = authority.create(tmp_path)
    text = path.read_bytes()
    path.write_bytes(text + b"\n" * (limits.IDENTITY_BYTES - len(text)))
    assert Identity.load(path).name == "head"
    path.write_bytes(text + b"\n" * (limits.IDENTITY_BYTES - len(text) + 1))
    with pytest.raises(BadIdentity, match="over"):
        Identity.load(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ids")
    return authority.create(folder).read_bytes(), authority.invite(folder, "b").read_bytes(), folder / "x.pem"


@given(st.integers(0, 2000), st.binary(max_size=40))
def test_any_other_bytes_are_refused_by_name(made, at, junk):
    _, good, path = made
    path.write_bytes(good[:at] + junk)
    path.chmod(0o600)
    if good[:at] + junk != good:
        with contextlib.suppress(BadIdentity):
            assert Identity.load(path).name == "b"  # junk after the last block, or none of it lost


def test_a_key_of_another_certificate_is_refused(made):
    head, host, path = made
    cut = head.index(b"-----BEGIN CERTIFICATE")
    path.write_bytes(head[:cut] + host[host.index(b"-----BEGIN CERTIFICATE") :])
    path.chmod(0o600)
    with pytest.raises(BadIdentity, match="belong together"):
        Identity.load(path)


def _der(path):
    data = path.read_bytes()
    return x509.load_pem_x509_certificate(data[data.index(b"-----BEGIN CERT") :]).public_bytes(Encoding.DER)


def test_who_is_revoked_by_name_or_by_fingerprint_is_on_the_list_from_then_on(tmp_path):
    authority.create(tmp_path)
    first, other = (_der(authority.invite(tmp_path, name)) for name in ("b", "c"))
    revoked = Revoked(tmp_path / "revoked")
    revoked.check(first)  # there is no list
    assert authority.revoke(tmp_path, "b") == fingerprint(first)
    revoked.check(other)
    with pytest.raises(BadIdentity, match="revoked"):
        revoked.check(first)
    assert authority.revoke(tmp_path, fingerprint(other)) == fingerprint(other)
    with pytest.raises(BadIdentity, match="revoked"):
        revoked.check(other)
    assert (tmp_path / "c.pem").exists()
    assert (tmp_path / "revoked").stat().st_mode & 0o777 == 0o600
    revoked.check(_der(authority.invite(tmp_path, "b")))  # the name again, with another certificate
    for nobody in ("d", "head", "../x", "sha256:x"):
        with pytest.raises(BadIdentity):
            authority.revoke(tmp_path, nobody)


@pytest.mark.parametrize("text", ["b", "sha256:00", "\xff", "sha256:" + "0" * 64 + " B", "# nobody"])
def test_a_list_that_cannot_be_read_lets_nobody_in(tmp_path, text):
    (tmp_path / "revoked").write_text(text, encoding="latin-1")
    revoked = Revoked(tmp_path / "revoked")
    for _ in range(2):
        with pytest.raises(BadIdentity, match="cannot read"):
            revoked.check(b"")
    (tmp_path / "revoked").unlink()
    revoked.check(b"")


def test_the_size_of_the_list(tmp_path):
    printed, path, most = f"sha256:{'0' * 64}", tmp_path / "revoked", limits.REVOKED_BYTES
    text = f"{printed}\n" * (most // 72 - 1) + f"{printed} "
    path.write_text(text.ljust(most, "a"))
    Revoked(path).check(b"")
    path.write_text(text.ljust(most + 1, "a"))
    with pytest.raises(BadIdentity, match="cannot read"):
        Revoked(path).check(b"")
