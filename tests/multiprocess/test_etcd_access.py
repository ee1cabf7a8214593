# SPDX-License-Identifier: Apache-2.0
"""An etcd that wants to see certificates or a password."""

import contextlib
import datetime
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from isthmus.elastic.core.records import Genesis
from isthmus.elastic.errors import EtcdUnavailable, JournalUnwritable
from isthmus.elastic.journal.etcd import EtcdAccess, EtcdClient
from isthmus.elastic.journal.etcd_store import EtcdStore
from isthmus.elastic.journal.etcd_wire import Done
from tests.multiprocess.etcd_cluster import Cluster, etcd_nodes, needs_etcd

NUM_TRIES = 20

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600), needs_etcd]

RECORD = Genesis(outer_step=1, digest=b"0" * 32, next_index=0)


class Authority:
    """Signs certificates, and writes them into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca_file = folder / f"{name}.pem"
        self.ca_file.write_bytes(self._pem(self._signed(self.name, self.key, is_authority=True)))

    def issue(self, name: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert_file, key_file = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert_file.write_bytes(self._pem(self._signed(subject, key, is_authority=False)))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert_file, key_file

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        local = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = x509.CertificateBuilder(self.name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        return builder.add_extension(local, critical=False).sign(self.key, hashes.SHA256())

    @staticmethod
    def _pem(certificate: x509.Certificate) -> bytes:
        return certificate.public_bytes(serialization.Encoding.PEM)


@contextlib.contextmanager
def opened(access: EtcdAccess, patience_s: float = 30.0) -> Iterator[EtcdStore]:
    store = EtcdStore(access, run_id="run", peer_id="one", address="one:7000", patience_s=patience_s)
    try:
        yield store
    finally:
        store.close()


def test_encrypted_connections_with_certificates_on_both_sides(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    server, ours, theirs = authority.issue("server"), authority.issue("ours"), stranger.issue("theirs")
    flags = ["--cert-file", str(server[0]), "--key-file", str(server[1])]
    flags += ["--trusted-ca-file", str(authority.ca_file), "--client-cert-auth"]
    with etcd_nodes(
        tmp_path, 1, flags=flags, ca_file=authority.ca_file, cert_file=ours[0], key_file=ours[1]
    ) as cluster:
        with opened(cluster.access) as store:
            assert store.try_to_lead() is None
            assert list(store.replay()) == []
            assert store.append(RECORD) == 0
        for wrong, complaint in (
            (replace(cluster.access, ca_file=stranger.ca_file), "CERTIFICATE_VERIFY_FAILED"),
            (replace(cluster.access, cert_file=theirs[0], key_file=theirs[1]), "SSL|reset|closed|Disconnected|Broken"),
            (EtcdAccess(endpoints=cluster.endpoints), "400|no etcd|reset|closed|Disconnected|BadStatusLine"),
        ):
            # The last attempt has little time, and what a busy machine does not finish in it "timed out".
            said: list[str] = []
            while not said or ("timed out" in said[-1] and len(said) < NUM_TRIES):
                with opened(wrong, patience_s=2.0) as store, pytest.raises(EtcdUnavailable) as caught:
                    store.try_to_lead()
                said.append(str(caught.value))
            assert re.search(complaint, said[-1]), said


def test_file_that_is_no_certificate_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing of the kind")
    with pytest.raises(OSError, match=r"PEM|X509|NO_CERT"):
        EtcdClient(EtcdAccess(endpoints=("127.0.0.1:1",), ca_file=tmp_path / "ca.pem"))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Cluster]:
    """An etcd with users: `isthmus` may write what it needs to, and nobody may do anything without a name."""
    with etcd_nodes(tmp_path, 1, flags=["--auth-token", "simple"]) as cluster:
        everything = {"permType": "READWRITE", "key": b"/isthmus/", "range_end": b"/isthmus0"}
        with contextlib.closing(EtcdClient(cluster.access)) as client:
            for path, request in (
                ("auth/user/add", {"name": "root", "password": "r"}),
                ("auth/user/grant", {"user": "root", "role": "root"}),
                ("auth/user/add", {"name": "isthmus", "password": "secret"}),
                ("auth/role/add", {"name": "writer"}),
                ("auth/role/grant", {"name": "writer", "perm": everything}),
                ("auth/user/grant", {"user": "isthmus", "role": "writer"}),
                ("auth/enable", {}),
            ):
                # One attempt: on a busy machine it takes a while, and nobody can be added twice.
                client.call(path, request, Done, timeout_s=30.0, attempt_s=30.0)
        yield cluster


def test_user_and_password_are_shown_and_shown_again_when_etcd_has_forgotten_them(guarded: Cluster) -> None:
    access = replace(guarded.access, user="isthmus", password="secret")
    with opened(access) as store:
        assert store.try_to_lead() is None
        assert list(store.replay()) == []
        assert store.append(RECORD) == 0
        (node,) = guarded.nodes
        node.kill()  # its tokens are in its memory
        guarded.start(node)
        guarded.until_ready(access)
        assert store.append(RECORD) == 1
        assert store.keep_alive()
    for wrong in (guarded.access, replace(access, password="wrong"), replace(access, user="nobody")):
        with opened(wrong) as store, pytest.raises(JournalUnwritable, match="etcd refuses"):
            store.try_to_lead()
    assert "secret" not in repr(access)


def test_user_who_may_not_write_there_is_refused(guarded: Cluster) -> None:
    access = replace(guarded.access, user="isthmus", password="secret")
    with contextlib.closing(EtcdClient(access)) as client, pytest.raises(Exception, match="permission denied"):
        client.call("kv/put", {"key": b"/elsewhere", "value": b""}, Done, timeout_s=5.0)
