"""The reader and the key-value client over TLS: whom they trust, and how they identify themselves."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from certificates import make_certificate
from tailrace import Mutation, TlsOptions
from tailrace.client.kv import KvClient
from tailrace.errors import ConnectError, UsageError
from tailrace.testing.running import RunningNode

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("pki")
    authority = make_certificate(directory, "authority")
    return {
        "authority": authority,
        "server": make_certificate(directory, "server", issuer=authority),
        "client": make_certificate(directory, "client", issuer=authority),
        "stranger": make_certificate(directory, "stranger"),
    }


@pytest.fixture(scope="module")
def node(pki: dict[str, Any]) -> Iterator[RunningNode]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*pki["server"])
    context.load_verify_locations(pki["authority"][0])
    context.verify_mode = ssl.CERT_OPTIONAL
    with tailrace.testing.node(vbuckets=2, tls=context, users={"ada": "secret"}) as running:
        running.set(b"k", {"n": 1})
        yield running


def url(node: RunningNode, host: str = "127.0.0.1") -> str:
    return f"couchbases://ada:secret@{host}:{node.tls_port}/default"


def test_a_trusted_server(node: RunningNode, pki: dict[str, Any], connect: Callable[..., Any]) -> None:
    for host in ("127.0.0.1", "localhost"):
        source = connect(url(node, host), tls=TlsOptions(ca_file=pki["authority"][0]))
        assert [event.key for event in source.changes(end="now") if isinstance(event, Mutation)] == [b"k"]
    with KvClient(url(node), tls=TlsOptions(ca_file=pki["authority"][0])) as client:
        assert client.get("k").value == b'{"n": 1}'


def test_a_client_with_a_certificate(
    node: RunningNode, pki: dict[str, Any], connect: Callable[..., Any]
) -> None:
    cert, key = pki["client"]
    tls = TlsOptions(ca_file=pki["authority"][0], cert_file=cert, key_file=key)
    assert next(connect(url(node), tls=tls).batches(end="now")).num_rows == 1


def test_a_stranger_is_not_trusted(
    node: RunningNode, pki: dict[str, Any], connect: Callable[..., Any]
) -> None:
    for tls in (TlsOptions(), TlsOptions(ca_file=pki["stranger"][0])):
        with pytest.raises(ConnectError, match=r"(?i)certificate"):
            connect(url(node), tls=tls)
        with pytest.raises(ConnectError, match=r"(?i)certificate"):
            KvClient(url(node), tls=tls)
    source = connect(url(node), tls=TlsOptions(verify=False))
    assert source.high_seqnos()


def test_files_that_can_not_be_used(node: RunningNode, tmp_path: Path, connect: Callable[..., Any]) -> None:
    nothing = tmp_path / "nothing.pem"
    for tls in (
        TlsOptions(ca_file=nothing),
        TlsOptions(verify=False, cert_file=nothing),
        TlsOptions(verify=False, key_file=nothing),
    ):
        with pytest.raises(UsageError):
            connect(url(node), tls=tls)


def test_what_is_wrong_with_our_own_certificate_is_said(pki: dict[str, Any]) -> None:
    cert, _ = pki["client"]
    _, other_key = pki["stranger"]
    with pytest.raises(UsageError, match=r"private key; if the key is in another file.*--tls-key"):
        TlsOptions(cert_file=cert).context()
    with pytest.raises(UsageError, match="don't belong together"):
        TlsOptions(cert_file=cert, key_file=other_key).context()
