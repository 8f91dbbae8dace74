"""TLS with certificates that are made here."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from server.serverkit import TIMEOUT_S, Wire
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, kv

x509 = pytest.importorskip("cryptography.x509")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    directory = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / "cert.pem", directory / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_file, key_file


def a_node(certificate: tuple[Path, Path], **settings: Any) -> RunningNode:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return tailrace.testing.node(vbuckets=4, tls=context, settings=settings)


@pytest.fixture
def node(certificate: tuple[Path, Path]) -> Iterator[RunningNode]:
    with a_node(certificate) as running:
        yield running


def trusting(certificate: tuple[Path, Path]) -> Callable[..., Any]:
    context = ssl.create_default_context(cafile=str(certificate[0]))
    return lambda plain: context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_commands_over_tls(node: RunningNode, certificate: tuple[Path, Path]) -> None:
    with Wire(node.tls_port or 0, wrap=trusting(certificate)) as secure, Wire(node.port) as plain:
        secure.ok(kv.Set(key=b"a", value=b"x" * 1_000_000))
        assert plain.ok(kv.Get(key=b"a")).value == b"x" * 1_000_000
        assert secure.ok(kv.Get(key=b"a")).value == b"x" * 1_000_000
        config = secure.ok(admin.GetClusterConfig()).value
        assert f'"kvSSL":{node.tls_port}'.encode() in config


def test_pipelined_over_tls(node: RunningNode, certificate: tuple[Path, Path]) -> None:
    with Wire(node.tls_port or 0, wrap=trusting(certificate)) as secure:
        secure.send(*[kv.Set(key=b"k%d" % at, value=b"v" * at, opaque=at) for at in range(2000)])
        assert [secure.frame().opaque for _ in range(2000)] == list(range(2000))


def test_the_node_stops_while_a_tls_connection_is_being_closed(
    node: RunningNode, certificate: tuple[Path, Path]
) -> None:
    """It is closed because of what it sent, and once more because the node stops."""
    with Wire(node.tls_port or 0, wrap=trusting(certificate)) as rude:
        rude.send(b"\0" * 24)
        rude.is_closed()
        node.restart()
    with Wire(node.port) as plain:
        plain.ok(admin.Noop())


def test_plain_bytes_on_the_tls_port(node: RunningNode) -> None:
    with Wire(node.tls_port or 0) as wrong:
        wrong.send(admin.Noop())
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                wrong.frame()
    with Wire(node.port) as plain:
        plain.ok(admin.Noop())


def test_a_handshake_that_does_not_come_is_given_up(certificate: tuple[Path, Path]) -> None:
    with (
        a_node(certificate, auth_timeout=2) as node,
        socket.create_connection(("127.0.0.1", node.tls_port), timeout=TIMEOUT_S) as silent,
    ):
        assert silent.recv(1) == b""


def test_the_sdk_over_tls(node: RunningNode, certificate: tuple[Path, Path]) -> None:
    pytest.importorskip("couchbase")
    from server.test_sdk import PARTS, make_collections, run_sdk

    make_collections(node.port)
    address = f"127.0.0.1:{node.tls_port}"
    assert run_sdk(address, "Administrator", "password", str(certificate[0])) == PARTS
