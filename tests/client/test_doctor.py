"""`tailrace doctor`: whatever can be wrong is made wrong once, over real sockets; it says what to do."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificate
from client.dns_server import DnsServer
from client.fake_server import FakeServer
from spark.local_jobs import LocalJobs
from tailrace.cli.main import main
from tailrace.client.doctor.examination import Examination
from tailrace.client.doctor.findings import Finding, Severity, numbers
from tailrace.client.srv_records import find_seeds
from tailrace.client.tls import TlsOptions
from tailrace.clock import ManualClock, SystemClock
from tailrace.connstr import Address, parse
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror
from tailrace.spark.rounds.table_findings import examine_table
from tailrace.table.opening import open_table
from tailrace.testing.running import RunningNode
from tailrace.wire.admin import StatResponse
from tailrace.wire.codes import DcpOpcode, Feature, Op, Status, VBucketState
from tailrace.wire.header import Frame
from tailrace.wire.message import Response

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with RunningNode() as running:
        for number in range(40):
            running.set(f"k{number}", {"n": number})
        yield running


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """Two vbuckets, and all that current servers have."""
    with FakeServer(lambda *_: None, vbuckets=2) as server:
        server.features = tuple(Feature)
        yield server


@pytest.fixture
def names() -> Iterator[DnsServer]:
    with DnsServer() as server:
        yield server


def examine(url: str, **options: Any) -> list[Finding]:
    """All findings; whatever is not well says what to do."""
    findings = list(Examination(parse(url), timeout_s=3.0, **options).findings())
    assert all(finding.way_out for finding in findings if finding.severity is not OK)
    return findings


def wrong(findings: list[Finding]) -> list[tuple[str, Severity]]:
    return [(finding.check, finding.severity) for finding in findings if finding.severity is not OK]


def text_of(findings: list[Finding], check: str) -> str:
    return " ".join(f"{finding.text} -> {finding.way_out}" for finding in findings if finding.check == check)


def refuse(status: Status) -> Any:
    def answer(_server: FakeServer, frame: Frame) -> bytes:
        return Response(opcode=frame.opcode, status=status, opaque=frame.opaque).encode()

    return answer


def with_value(frame: Frame, value: bytes, key: bytes = b"") -> bytes:
    return StatResponse(opcode=frame.opcode, opaque=frame.opaque, key=key, value=value).encode()


def test_a_healthy_node(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", node.url, "--json", "--strict"]) == 0
    *lines, counts = map(json.loads, capsys.readouterr().out.splitlines())
    assert {line["severity"] for line in lines} == {"ok"}
    assert counts == {"errors": 0, "warnings": 0, "ok": len(lines)}
    assert {line["check"] for line in lines} == {
        *("reach", "login", "features", "privileges", "map", "nodes"),
        *("vbuckets", "clock", "failover-logs", "disk"),
    }


def test_the_page_names_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    source = Path(__file__).parents[2] / "src" / "tailrace"
    code = "".join(path.read_text() for path in (source / "client" / "doctor").glob("*.py"))
    code += (source / "spark" / "rounds" / "table_findings.py").read_text()
    checks = set(re.findall(r'\b(?:ok|warning|error|made)\(\s*"([a-z-]+)"', code)) | {"names", "reach", "tls"}
    assert len(checks) > 12
    assert [check for check in sorted(checks) if f"| `{check}` |" not in page] == []


# names


def test_names(names: DnsServer, node: RunningNode) -> None:
    plain = f"couchbase://cluster.test/default?{names.options()}"
    names.records["_couchbase._tcp.cluster.test."] = [(node.port, "localhost."), (1, "localhost.")]
    findings = examine(plain)
    assert "name localhost:1, localhost:" in text_of(findings, "names")
    assert wrong(findings) == [("reach", WARNING)], "one of the two seeds is down, which matters little"

    del names.records["_couchbase._tcp.cluster.test."]
    names.records["_couchbases._tcp.cluster.test."] = [(11207, "localhost.")]
    findings = examine(plain)
    assert "write couchbases://cluster.test" in text_of(findings, "names")
    assert wrong(findings) == [("names", ERROR)], "that is all there is to say"

    names.refuses = True
    findings = examine(plain)
    assert ("names", WARNING) in wrong(findings)
    assert "dns_nameserver" in text_of(findings, "names")


def test_a_name_that_is_nobodys() -> None:
    findings = examine("couchbase://no-such-host.invalid:11210")
    assert wrong(findings) == [("names", ERROR)]


def test_a_seed_whose_name_is_gone(node: RunningNode) -> None:
    """As with a seed that does not answer: the others are enough to find the cluster."""
    findings = examine(f"couchbase://no-such-host.invalid:11210,127.0.0.1:{node.port}/default")
    assert wrong(findings) == [("names", WARNING)]
    assert "no-such-host.invalid has no address" in text_of(findings, "names")


def test_seeds_are_found_in_five_seconds_also_if_no_name_server_answers() -> None:
    """Both questions share the time; a server that did not answer the first is not asked the second."""
    asked: list[float] = []

    class Slow(SystemClock):
        def monotonic(self) -> float:
            asked.append(0.0)
            return 10.0 * len(asked)  # each question takes ten seconds

    with DnsServer() as names:
        where = parse(f"couchbase://cluster.test?{names.options()}")
        assert find_seeds(where, Slow()) == (Address("cluster.test", 11210),)
        assert names.asked == ["_couchbase._tcp.cluster.test."]
        names.asked.clear()
        names.refuses = True
        assert find_seeds(where) == (Address("cluster.test", 11210),)
        assert set(names.asked) == {"_couchbase._tcp.cluster.test."}


# sockets and TLS


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "couchbase://127.0.0.1:1/default"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("error    reach: can't connect to 127.0.0.1:1")
    assert "\n         -> " in shown.out
    assert shown.err == "tailrace: 1 error, 0 warnings, 0 ok\n"


def test_certificates(tmp_path: Path, node: RunningNode) -> None:
    cert, key = make_certificate(tmp_path, "node")
    stranger, _ = make_certificate(tmp_path, "stranger")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    with RunningNode(tls=context) as secure:
        url = f"couchbases://127.0.0.1:{secure.tls_port}/default"
        findings = examine(url, tls=TlsOptions(cert))
        assert wrong(findings) == [("tls", WARNING)]
        assert "expires in" in text_of(findings, "tls")
        findings = examine(url, tls=TlsOptions(cert, verify=False))
        assert "not checked" in text_of(findings, "tls")
        findings = examine(url, tls=TlsOptions(stranger))
        assert wrong(findings) == [("tls", ERROR)]
        assert "--tls-ca" in text_of(findings, "tls")
        clock = ManualClock(SystemClock.time_ns() / 1e9)
        findings = examine(url.replace("127.0.0.1", "127.0.0.2"), tls=TlsOptions(cert), clock=clock)
        assert wrong(findings) in ([("tls", ERROR)], [("reach", ERROR)])
        findings = examine(f"couchbase://127.0.0.1:{secure.tls_port}/default")
        assert wrong(findings) == [("login", ERROR)]
        said = text_of(findings, "login")
        assert said.startswith(f"127.0.0.1:{secure.tls_port}: closed the connection -> "), (
            "and not named twice"
        )
        assert "couchbases://" in said
    findings = examine(f"couchbases://127.0.0.1:{node.port}/default", tls=TlsOptions(cert))
    assert wrong(findings) == [("tls", ERROR)]
    assert "does not speak TLS" in text_of(findings, "tls")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_certificate_for_another_host(tmp_path: Path, host: str) -> None:
    """OpenSSL has different codes for a wrong address and a wrong name; the mistake is the same."""
    cert, key = make_certificate(tmp_path, "node", hosts="DNS:node1.example.com")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    with RunningNode(tls=context) as secure:
        findings = examine(f"couchbases://{host}:{secure.tls_port}/default", tls=TlsOptions(cert))
    assert wrong(findings) == [("tls", ERROR)]
    assert "use a name that the certificate has" in text_of(findings, "tls")


# login


def test_logins() -> None:
    with RunningNode(users={"ada": "secret"}) as guarded:
        port = guarded.port
        assert wrong(examine(f"couchbase://ada:secret@127.0.0.1:{port}/default")) == []
        for url in (
            f"couchbase://ada:wrong@127.0.0.1:{port}/default",
            f"couchbase://127.0.0.1:{port}/default",
            f"couchbase://ada:secret@127.0.0.1:{port}/other",
        ):
            assert wrong(examine(url)) == [("login", ERROR)]


def test_a_node_that_takes_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    """This happens in the middle: it is a finding like others, and the report ends there."""
    with RunningNode(settings={"max_connections": 1}) as full:
        assert main(["doctor", full.url, "--json"]) == 1
    *_, last, counts = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["severity"] == "error" and last["check"] in ("reach", "login")  # whichever came too soon
    assert counts["errors"] == 1


def test_privileges(fake: FakeServer) -> None:
    fake.answers[DcpOpcode.OPEN] = refuse(Status.EACCESS)
    fake.answers[Op.STAT] = refuse(Status.EACCESS)
    findings = examine(fake.url)
    assert wrong(findings) == [("privileges", ERROR), ("privileges", WARNING)]
    assert "data_dcp_reader" in text_of(findings, "privileges")
    assert "data_monitoring" in text_of(findings, "privileges")


def test_an_old_server(fake: FakeServer) -> None:
    fake.features = (Feature.SELECT_BUCKET,)
    fake.answers[DcpOpcode.OPEN] = refuse(Status.UNKNOWN_COMMAND)
    findings = examine(fake.url)
    assert set(wrong(findings)) == {("features", WARNING)}
    assert "collections" in text_of(findings, "features")
    assert "--dialect" in text_of(findings, "features")


# map and nodes


def test_no_map_and_no_vbuckets(fake: FakeServer) -> None:
    fake.answers[Op.GET_CLUSTER_CONFIG] = refuse(Status.KEY_ENOENT)
    assert wrong(examine(fake.url)) == [("map", ERROR)]
    del fake.answers[Op.GET_CLUSTER_CONFIG]
    fake.owners = []
    assert wrong(examine(fake.url)) == [("map", ERROR)]


def test_a_vbucket_without_active_or_replica(fake: FakeServer) -> None:
    fake.owners = [[0, -1], [-1, -1]]
    findings = examine(fake.url)
    assert wrong(findings) == [("vbuckets", ERROR), ("replicas", WARNING)]
    assert "1 vbucket (1)" in text_of(findings, "vbuckets")


def test_the_map_and_the_node_disagree(node: RunningNode) -> None:
    """As in the middle of a rebalance: the map names a node that is no longer the active."""
    node.set_vbucket_state(3, VBucketState.REPLICA)
    try:
        with FakeServer(lambda *_: None, vbuckets=16) as other:
            other.features = tuple(Feature)
            other.nodes = [node]  # type: ignore[list-item]
            findings = examine(other.url)
    finally:
        node.set_vbucket_state(3, VBucketState.ACTIVE)
    assert ("vbuckets", ERROR) in wrong(findings)
    assert "1 vbucket (3)" in text_of(findings, "vbuckets")


def test_nodes_that_are_down_or_elsewhere(fake: FakeServer) -> None:
    """The map names a second node that can't be reached by its inside address."""
    config = json.loads(fake.config())
    config["vBucketServerMap"] |= {
        "serverList": [f"$HOST:{fake.port}", "127.0.0.1:1"],
        "vBucketMap": [[0], [1]],
    }
    config["nodesExt"] = [
        {"services": {"kv": fake.port}, "thisNode": True},
        {"hostname": "127.0.0.1", "services": {"kv": 1}},
    ]

    def answer(_server: FakeServer, frame: Frame) -> bytes:
        return with_value(frame, json.dumps(config).encode())

    fake.answers[Op.GET_CLUSTER_CONFIG] = answer
    findings = examine(fake.url)
    assert wrong(findings) == [("nodes", ERROR)]
    assert "alternateAddresses" in text_of(findings, "nodes")
    for number, entry in enumerate(config["nodesExt"]):
        ports = {"kv": fake.port if not number else 2}
        entry["alternateAddresses"] = {"external": {"hostname": "127.0.0.1", "ports": ports}}
    assert "?network=external" in text_of(examine(fake.url + "?network=default"), "nodes")
    findings = examine(fake.url + "?network=nowhere")
    assert wrong(findings) == [("networks", ERROR)]
    assert "default, external" in text_of(findings, "networks")


def test_two_clusters_and_two_maps(fake: FakeServer) -> None:
    with FakeServer(lambda *_: None, vbuckets=2) as other:
        other.features = tuple(Feature)
        fake.nodes = other.nodes = [fake, other]
        fake.owners = other.owners = [[0], [1]]
        other.revision = 9
        assert wrong(examine(fake.url)) == [("map", WARNING)]
        for server, uuid in ((fake, "aa"), (other, "bb")):

            def answer(server: FakeServer, frame: Frame, uuid: str = uuid) -> bytes:
                value = json.dumps(json.loads(server.config()) | {"uuid": uuid}).encode()
                return with_value(frame, value)

            server.answers[Op.GET_CLUSTER_CONFIG] = answer
        findings = examine(fake.url)
        assert wrong(findings) == [("map", ERROR)]
        assert "more than one cluster" in text_of(findings, "map")


def test_replicas(fake: FakeServer) -> None:
    with FakeServer(lambda *_: None, vbuckets=2) as other:
        other.features = tuple(Feature)
        fake.nodes = other.nodes = [fake, other]
        fake.owners = other.owners = [[0, 1], [0, 1]]
        fake.high_seqnos, other.high_seqnos = {0: 50, 1: 50}, {0: 50, 1: 50}
        assert wrong(examine(fake.url)) == []
        other.high_seqnos = {0: 20}
        findings = examine(fake.url)
        assert wrong(findings) == [("replicas", ERROR), ("replicas", WARNING)]
        assert "1 vbucket (0), by 30 changes" in text_of(findings, "replicas")
        assert "no replica of 1 vbucket (1)" in text_of(findings, "replicas")


def test_clocks(node: RunningNode) -> None:
    findings = examine(node.url, clock=ManualClock(SystemClock.time_ns() / 1e9 - 3600))
    assert wrong(findings) == [("clock", WARNING)]
    assert re.search(r"3[6-9]\d\d s ahead of", text_of(findings, "clock"))  # the node's goes on meanwhile


def test_failovers_again_and_again() -> None:
    vbucket = 5
    with RunningNode() as unsteady:
        for _ in range(10):
            unsteady.set("again", 1, vbucket=vbucket)
            unsteady.rewind(vbucket, unsteady.high_seqno(vbucket) - 1)
        findings = examine(unsteady.url)
    assert wrong(findings) == [("failover-logs", WARNING)]
    assert "1 vbucket (5)" in text_of(findings, "failover-logs")


def test_disks(fake: FakeServer) -> None:
    def answer(_server: FakeServer, frame: Frame) -> bytes:
        figures = {"ep_flusher_state": "paused", "ep_commit_failed": "3"}
        parts = [with_value(frame, text.encode(), name.encode()) for name, text in figures.items()]
        return b"".join([*parts, with_value(frame, b"")])

    fake.answers[Op.STAT] = answer
    assert wrong(examine(fake.url)) == [("disk", ERROR), ("disk", WARNING)]


# a table


def of_table(url: str, path: Path, **options: Any) -> list[Finding]:
    examination = Examination(parse(url))
    list(examination.findings())
    assert examination.facts is not None
    return list(examine_table(open_table(path), parse(url).bucket, examination.facts, **options))


def test_a_table_against_its_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "people"
    with RunningNode(4, buckets=["other"], settings={"tombstone_age": 7200}) as node:
        for number in range(20):
            node.set(f"k{number}", {"n": number}, vbucket=number % 4)
        mirror = build_mirror(LocalJobs(), node.url, path, once=True, in_background=False)
        mirror.prepare()
        mirror.run()
        close_idle_sources()
        assert wrong(of_table(node.url, path)) == []
        assert main(["doctor", node.url, str(path)]) == 0
        assert "table: version" in capsys.readouterr().out

        node.set("more", {}, vbucket=0)
        later = ManualClock(SystemClock.time_ns() / 1e9 + 4000)
        findings = of_table(node.url, path, clock=later)
        assert wrong(findings) == [("purge", WARNING)]
        assert "deletions are kept for 2 hours" in text_of(findings, "purge")

        node.rewind(1, 2)
        findings = of_table(node.url, path)
        assert wrong(findings) == [("table", WARNING)]
        assert "1 vbucket (1)" in text_of(findings, "table")

        assert main(["doctor", node.url.replace("/default", "/other"), str(path)]) == 1
        assert "mirrors bucket 'default', not 'other'" in capsys.readouterr().out
        assert main(["doctor", node.url, str(tmp_path / "nothing")]) == 1

        examination = Examination(parse(node.url))
        list(examination.findings())
        facts = examination.facts
        assert facts is not None
        facts.purge_seqnos[2] = 100
        findings = list(examine_table(open_table(path), "default", facts))
        assert ("purge", ERROR) in wrong(findings)
        facts.collections = frozenset()
        assert "was dropped" in text_of(list(examine_table(open_table(path), "default", facts)), "table")
    with RunningNode(8) as made_anew:
        findings = of_table(made_anew.url, path)
        assert wrong(findings) == [("table", ERROR)]
        assert "created again" in text_of(findings, "table")


def test_vbuckets_for_people() -> None:
    assert numbers([3]) == "1 vbucket (3)"
    assert numbers([7, 3, 4, 5]) == "4 vbuckets (3-5, 7)"
    assert numbers(range(0, 40, 2)).endswith("14, …)")
