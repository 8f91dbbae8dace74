"""Clusters behind names: SRV records, networks with their own addresses, buckets that are created again."""

from __future__ import annotations

import json
import random
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
from certificates import make_certificate
from client.dns_server import DnsServer
from client.fake_server import FakeServer, accepted, marker, mutation
from tailrace.client.cluster_map import ClusterMap, MapContext
from tailrace.client.kv import KvClient
from tailrace.client.nodes import Nodes
from tailrace.client.srv_records import find_seeds
from tailrace.cluster.takeover import _Node
from tailrace.connstr import Address, parse
from tailrace.errors import ConnectError, RemoteProtocolError, UsageError
from tailrace.protocol.dcp.reader import ReaderSettings
from tailrace.testing.running import RunningNode

PLAIN, SECURE = "_couchbase._tcp.cluster.test.", "_couchbases._tcp.cluster.test."


@pytest.fixture
def names() -> Iterator[DnsServer]:
    with DnsServer() as server:
        yield server


def url(names: DnsServer, options: str = "", *, scheme: str = "couchbase") -> str:
    return f"{scheme}://cluster.test/default?{names.options()}{options}"


# SRV


def test_seeds_are_the_targets_with_their_ports(names: DnsServer) -> None:
    names.records[PLAIN] = [(11210, "node2.test."), (31210, "node1.test."), (11210, "node2.test.")]
    assert find_seeds(parse(url(names))) == (Address("node1.test", 31210), Address("node2.test", 11210))
    assert names.asked == [PLAIN]


def test_with_tls_another_name_is_asked_for(names: DnsServer) -> None:
    names.records[SECURE] = [(11207, "node1.test.")]
    assert find_seeds(parse(url(names, scheme="couchbases"))) == (Address("node1.test", 11207),)
    assert names.asked == [SECURE]


def test_a_cluster_that_is_only_known_with_tls_says_so(names: DnsServer) -> None:
    names.records[SECURE] = [(11207, "node1.test.")]
    with pytest.raises(ConnectError, match=r"write couchbases://cluster\.test"):
        find_seeds(parse(url(names)))


@pytest.mark.parametrize("refuses", [False, True])
def test_a_name_without_records_is_a_node(names: DnsServer, refuses: bool) -> None:
    names.refuses = refuses
    assert find_seeds(parse(url(names))) == (Address("cluster.test", 11210),)


@pytest.mark.parametrize(
    "text",
    [
        "couchbase://cluster.test:11210?",
        "couchbase://cluster.test,other.test?",
        "couchbase://127.0.0.1?",
        "couchbase://localhost?",
        "couchbase://[::1]?",
        "couchbase://cluster.test?enable_dns_srv=false&",
    ],
)
def test_what_is_no_lone_name_is_not_looked_up(names: DnsServer, text: str) -> None:
    where = parse(text + names.options())
    assert find_seeds(where) == where.addresses
    assert names.asked == []


def test_readers_and_the_key_value_client_find_a_node_by_name(names: DnsServer) -> None:
    with RunningNode() as node:
        names.records[PLAIN] = [(node.port, "localhost."), (1, "localhost.")]
        with KvClient(url(names)) as client:
            client.set(b"key", b"{}")
        with tailrace.connect_sync(url(names)) as source:
            assert [
                change.key for change in source.changes(end="now") if isinstance(change, tailrace.Mutation)
            ]


def test_a_cluster_that_moves_is_found_again(names: DnsServer) -> None:
    """The first node is gone for good; its name leads to another one with the same bucket."""

    def stream(connection: Any, request: Any) -> None:
        first = request.start_seqno + 1
        connection.send(accepted(request), marker(request, first, first), mutation(request, first))

    with FakeServer(stream) as new, FakeServer(stream) as old:
        old.revision = 50  # the other cluster has revisions of its own
        names.records[PLAIN] = [(old.port, "localhost.")]
        with tailrace.connect_sync(url(names), retry_for_s=60.0) as source:
            changes = source.changes()
            seqnos = []
            for change in changes:
                if isinstance(change, tailrace.Mutation):
                    seqnos.append(change.seqno)
                    if len(seqnos) == 1:
                        names.records[PLAIN] = [(new.port, "localhost.")]
                        old.stop()
                    else:
                        break
    assert seqnos == [1, 2]


# networks


def cluster_config(**entries: Any) -> dict[str, Any]:
    """Two nodes that don't answer at their own addresses, but can be reached from outside."""
    return {
        "rev": 1,
        "revEpoch": 1,
        "uuid": "aa",
        "nodesExt": [
            {
                "hostname": f"10.0.0.{number}",
                "services": {"kv": 11210, "kvSSL": 11207, "mgmt": 8091},
                "alternateAddresses": {
                    "external": {
                        "hostname": f"node{number}.example.com",
                        "ports": {"kv": 31210 + number, "kvSSL": 31310 + number, "mgmt": 31091},
                    },
                    "vpn": {"hostname": f"node{number}.vpn"},
                },
            }
            for number in (1, 2)
        ],
        "vBucketServerMap": {
            "serverList": ["10.0.0.1:11210", "10.0.0.2:11210"],
            "vBucketMap": [[0, 1], [1, -1]],
        },
    } | entries


ASKED = Address("whatever.example.com", 31211)


@pytest.mark.parametrize(
    ("network", "seed", "tls", "addresses"),
    [
        ("auto", "10.0.0.2:11210", False, ["10.0.0.1:11210", "10.0.0.2:11210"]),
        ("auto", "10.0.0.2:8091", False, ["10.0.0.1:11210", "10.0.0.2:11210"]),
        ("auto", "node2.example.com:31212", False, ["node1.example.com:31211", "node2.example.com:31212"]),
        ("auto", "node2.example.com:31091", True, ["node1.example.com:31311", "node2.example.com:31312"]),
        ("auto", "node1.vpn:11210", False, ["node1.vpn:11210", "node2.vpn:11210"]),
        ("auto", "node1.vpn:11207", True, ["node1.vpn:11207", "node2.vpn:11207"]),
        ("auto", "balancer.example.com:1", False, ["node1.example.com:31211", "node2.example.com:31212"]),
        ("auto", "10.0.0.2:1", False, ["node1.example.com:31211", "node2.example.com:31212"]),
        ("default", "node1.example.com:31211", True, ["10.0.0.1:11207", "10.0.0.2:11207"]),
        ("external", "10.0.0.1:11210", False, ["node1.example.com:31211", "node2.example.com:31212"]),
        ("vpn", "10.0.0.1:11210", True, ["node1.vpn:11207", "node2.vpn:11207"]),
    ],
)
def test_the_network_decides_on_the_addresses(
    network: str, seed: str, tls: bool, addresses: list[str]
) -> None:
    host, port = seed.rsplit(":", 1)
    context = MapContext(tls, network, (Address("nobody", 1), Address(host, int(port))))
    parsed = ClusterMap.parse(json.dumps(cluster_config()).encode(), ASKED, context)
    assert parsed is not None
    assert [str(address) for address in parsed.nodes] == addresses
    assert parsed.replicas_of(0) == [parsed.nodes[1]] and parsed.replicas_of(1) == [None]


@pytest.mark.parametrize("hostname", [{}, {"hostname": "$HOST"}])
def test_a_node_without_a_name_does_not_stand_for_those_that_have_one(hostname: dict[str, str]) -> None:
    """The node that was asked may leave its own name out; its ports may be those of all the others."""
    config = cluster_config()
    del config["nodesExt"][0]["hostname"]
    config["nodesExt"][0] |= hostname
    config["nodesExt"][1]["services"]["kvSSL"] = 21207
    for network, addresses in (
        ("external", ["node1.example.com:31311", "node2.example.com:31312"]),
        ("default", ["10.0.0.1:11207", "10.0.0.2:21207"]),
    ):
        parsed = ClusterMap.parse(json.dumps(config).encode(), ASKED, MapContext(True, network, ()))
        assert parsed is not None
        assert [str(address) for address in parsed.nodes] == addresses


def test_without_other_addresses_there_is_one_network() -> None:
    config = cluster_config(nodesExt=[])
    parsed = ClusterMap.parse(json.dumps(config).encode(), ASKED, MapContext(False, "auto", (ASKED,)))
    assert parsed is not None and parsed.network == "default"


def test_a_network_that_there_is_not() -> None:
    context = MapContext(False, "externa", ())
    with pytest.raises(ConnectError, match="no network 'externa', it has default, external, vpn"):
        ClusterMap.parse(json.dumps(cluster_config()).encode(), ASKED, context)


def test_a_node_that_is_not_on_the_network_is_named() -> None:
    config = cluster_config()
    del config["nodesExt"][1]["alternateAddresses"]["external"]
    with pytest.raises(ConnectError, match=r"10\.0\.0\.2:11210 has no address on the network 'external'"):
        ClusterMap.parse(json.dumps(config).encode(), ASKED, MapContext(False, "external", ()))


def behind(node: RunningNode, tls_port: int | None = None) -> bytes:
    """A map of a node that does not answer at its own address."""
    ports = {"kv": node.port, "mgmt": 8091} | ({} if tls_port is None else {"kvSSL": tls_port})
    entry = {
        "hostname": "127.0.0.2",
        "services": {"kv": 1, "kvSSL": 1, "mgmt": 8091},
        "alternateAddresses": {"external": {"hostname": "localhost", "ports": ports}},
    }
    return json.dumps(
        {
            "rev": 1,
            "revEpoch": 9,
            "name": "default",
            "uuid": "aa",
            "nodesExt": [entry],
            "vBucketServerMap": {"serverList": ["127.0.0.2:1"], "vBucketMap": [[0]] * node.vbuckets},
        }
    ).encode()


def test_from_outside_with_tls_and_a_name(names: DnsServer, tmp_path: Path) -> None:
    """Nothing listens at the node's own address; its TLS port is found by the name, which is checked."""
    cert, key = make_certificate(tmp_path, "node")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    with RunningNode(tls=context) as node:
        assert node.tls_port is not None
        names.records[SECURE] = [(node.tls_port, "localhost.")]
        where = url(names, f"&ca_cert_path={cert}", scheme="couchbases")
        with KvClient(where) as client:
            client.set(b"key", b"{}")
        with _Node(parse(f"couchbase://127.0.0.1:{node.port}/default"), tailrace.TlsOptions()) as control:
            control.set_map(behind(node, node.tls_port), epoch=9, rev=1)
        for options in ("", "&network=external"):
            with tailrace.connect_sync(where + options) as source:
                keys = [
                    change.key
                    for change in source.changes(end="now")
                    if isinstance(change, tailrace.Mutation)
                ]
            assert keys == [b"key"]
            with KvClient(where + options) as client:
                assert client.get(b"key").value == b"{}"
        with pytest.raises(tailrace.TailraceError, match=r"127\.0\.0\.2:1"):
            tailrace.connect_sync(where + "&network=default", retry_for_s=0.2).__enter__().high_seqnos()


# buckets that are created again


def test_a_bucket_that_was_made_again_is_an_error() -> None:
    nodes = Nodes(
        parse("couchbase://127.0.0.1:1/travel"),
        ReaderSettings("test"),
        agent="test",
        allow_plain=False,
        retry_for_s=60.0,
        rng=random.Random(1),
    )
    seed = Address("127.0.0.1", 1)
    assert nodes.apply(json.dumps(cluster_config()).encode(), seed)
    assert not nodes.apply(json.dumps(cluster_config(uuid="bb")).encode(), seed)  # an old map that comes late
    assert nodes.apply(json.dumps(cluster_config(rev=2)).encode(), seed)
    with pytest.raises(
        RemoteProtocolError, match="'travel' was deleted and created again: its uuid is bb and was aa"
    ):
        nodes.apply(json.dumps(cluster_config(rev=3, uuid="bb")).encode(), seed)


def test_options_of_the_string_count_unless_said_otherwise() -> None:
    source = tailrace.connect("couchbase://h?kv_connect_timeout=2s&compression=on")
    assert source.options.connect_timeout_s == 2.0 and source.options.compression
    source = tailrace.connect("couchbase://h?kv_connect_timeout=2s", connect_timeout_s=3.0)
    assert source.options.connect_timeout_s == 3.0
    with pytest.raises(UsageError, match="CA file"):
        tailrace.connect("couchbases://h?ca_cert_path=/nowhere/ca.pem")
