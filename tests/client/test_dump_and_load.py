"""Load recreates what dump and tail --json write: each document byte for byte, in its collection."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import tailrace.testing
from tailrace.cli.main import main
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.protocol.script import ask
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import Datatype
from tailrace.wire.fields import join_xattrs
from tailrace.wire.kv import Set, SetWithMeta

DOCUMENTS = {
    # a key in three collections, text that is not JSON, a JSON string, numbers that a float can't hold
    ("", "k"): b'{"price": 1.10, "big":12345678901234567890.12345678901234567890, "far":1e400, "n":[1, 2]}',
    ("shop.orders", "k"): b'"text"',
    ("shop.customers", "k"): b"text",
    ("", "empty"): b"",
    ("", "number"): b"0.1000",
    ("shop.orders", "bytes"): b"\xff\x00",
    ("", "value"): b'{"value": {"value": 2.50}}',
}
COLLECTIONS = ["shop.orders", "shop.customers"]


@pytest.fixture
def source() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=4) as node, KvClient(node.url) as client:
        client.set_manifest(with_changes(client.manifest(), COLLECTIONS, []))
        for (collection, key), value in DOCUMENTS.items():
            client.set(key, value, collection=collection, flags=7, datatype=0)
        yield node


@pytest.mark.parametrize("command", [["dump"], ["tail", "--to", "now", "--json"]])
def test_documents_come_back_as_they_were(
    source: RunningNode, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], command: list[str]
) -> None:
    assert main([command[0], source.url, *command[1:]]) == 0
    lines = tmp_path / "documents.jsonl"
    lines.write_bytes(capfdbinary.readouterr().out)
    with tailrace.testing.node(vbuckets=16) as target, KvClient(target.url) as client:
        # a collection that is not there is an error, not another place
        assert main(["load", target.url, "--from", str(lines)]) == 1
        assert b"shop." in capfdbinary.readouterr().err
        client.set_manifest(with_changes(client.manifest(), ["other.x", *COLLECTIONS], []))
        assert main(["load", target.url, "--from", str(lines)]) == 0
        with KvClient(source.url) as before:
            for (collection, key), value in DOCUMENTS.items():
                loaded, there = (holder.get(key, collection=collection) for holder in (client, before))
                assert (loaded.value, loaded.flags, loaded.datatype) == (value, 7, there.datatype)


@pytest.mark.parametrize("command", [["dump"], ["tail", "--to", "now", "--json"]])
def test_documents_without_their_values_are_not_loaded(
    source: RunningNode, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], command: list[str]
) -> None:
    # an empty value would replace each of them
    assert main([command[0], source.url, "--no-value", *command[1:]]) == 0
    lines = tmp_path / "documents.jsonl"
    lines.write_bytes(capfdbinary.readouterr().out)
    written = [json.loads(line) for line in lines.read_bytes().splitlines()]
    changes = [line for line in written if line["op"] == "mutation"]
    assert len(changes) == len(DOCUMENTS) and not any(
        {"value", "value_base64"} & set(change) for change in changes
    )
    assert main(["load", source.url, "--from", str(lines)]) == 1
    assert b"it has no value" in capfdbinary.readouterr().err
    assert source.get("number") == 0.1


def test_lines_of_a_collection_say_its_name(
    source: RunningNode, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["dump", source.url]) == 0
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    with KvClient(source.url) as client:
        orders = client.collection_id("shop.orders")
    named = {(line.get("scope"), line.get("collection"), line.get("collection_id")) for line in lines}
    assert len(lines) == len(DOCUMENTS)
    assert ("shop", "orders", orders) in named and (None, None, None) in named and len(named) == 3


def test_dump_has_xattrs_if_they_are_asked_for(
    source: RunningNode, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    request = SetWithMeta(
        key=b"\0with",
        value=join_xattrs({"note": b'"x"'}, b"{}"),
        datatype=Datatype.JSON | Datatype.XATTR,
        rev_seqno=1,
        meta_cas=1,
    )
    with KvClient(source.url) as client:
        request.vbucket = client.vbucket_of("with")
        client._on(request.vbucket, lambda: ask(request, "set with meta"))
    for options, xattrs in (([], None), (["--xattrs"], {"note": "x"})):
        assert main(["dump", source.url, *options]) == 0
        lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
        assert [line.get("xattrs") for line in lines if line.get("key") == "with"] == [xattrs]


@pytest.mark.parametrize("command", [["dump"], ["tail", "--to", "now", "--json"]])
def test_xattrs_come_back_as_they_were(
    source: RunningNode, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], command: list[str]
) -> None:
    xattrs = {"note": b'{"n":[1,"\xc3\xa4"]}', "_sync": b"7"}
    sets = {b"with": b"{}", b"raw": b"\xff", b"text": b"text", b"empty": b""}
    lines = tmp_path / "documents.jsonl"
    with tailrace.testing.node(vbuckets=16) as target, KvClient(target.url) as client:
        for key, body in sets.items():
            request = Set(key=b"\0" + key, value=join_xattrs(xattrs, body), flags=5, datatype=Datatype.XATTR)
            request.vbucket = client.vbucket_of(key)
            client._on(request.vbucket, lambda asked=request: ask(asked, "set"))
        assert main([command[0], target.url, *command[1:], "--xattrs"]) == 0
        lines.write_bytes(capfdbinary.readouterr().out)
    assert main(["load", source.url, "--from", str(lines)]) == 0
    assert main(["dump", source.url, "--xattrs"]) == 0
    keys = {key.decode() for key in sets}
    before, after = (
        {
            line["key"]: [line.get(name) for name in ("value", "value_base64", "datatype", "flags", "xattrs")]
            for line in map(json.loads, text.splitlines())
            if line.get("key") in keys and "collection" not in line
        }
        for text in (lines.read_bytes(), capfdbinary.readouterr().out)
    )
    assert set(before) == keys and after == before
    assert before["with"][-1] == {"note": {"n": [1, "ä"]}, "_sync": 7}


def test_load_reads_stdin(
    source: RunningNode, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    stdin = io.BytesIO(b'{"key":"piped","value":[1]}\n')
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stdin))
    assert main(["load", source.url, "--from", "-", "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["writes"] == 1
    assert source.get("piped") == [1]
