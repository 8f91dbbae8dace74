"""Three nodes that can only be reached from outside: their own addresses in the map answer nobody, and DNS
knows the cluster by SRV records alone.
"""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import sleep

from certificates import make_certificate
from client.dns_server import DnsServer
from tailrace.server.node import Node
from tailrace.server.served_map import AlternateAddress, NodeAddress, bucket_map
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import VBucketState

NODES, VBUCKETS = 3, 16
NAME = "cluster.test"
UUID = "c0" * 16


class OutsideCluster:
    """Nodes with TLS; `fail_over` takes one away and has its vbuckets go on at their replicas."""

    def __init__(self, nodes: list[RunningNode], names: DnsServer, ca_file: Path) -> None:
        self.nodes = nodes
        self.names = names
        self.ca_file = ca_file
        self.chains = [[vbucket % NODES, (vbucket + 1) % NODES] for vbucket in range(VBUCKETS)]
        self._rev = 0
        self._lost: set[int] = set()
        names.records[f"_couchbases._tcp.{NAME}."] = [(node.tls_port or 0, "localhost.") for node in nodes]
        for at, node in enumerate(nodes):
            for vbucket, (active, replica) in enumerate(self.chains):
                if at not in (active, replica):
                    node.set_vbucket_state(vbucket, VBucketState.DEAD)
                elif at == replica:
                    node.replicate([vbucket], nodes[active])
        self.push_map()

    def push_map(self) -> None:
        """Give every node the newest map."""
        self._rev += 1
        addresses = [
            NodeAddress(
                port=11210,
                tls_port=11207,
                host=f"192.0.2.{at + 1}",  # for documentation: nobody answers there
                alternates=(AlternateAddress("external", "localhost", node.port, node.tls_port),),
            )
            for at, node in enumerate(self.nodes)
        ]
        for at, node in enumerate(self.nodes):
            if at not in self._lost:
                served = bucket_map(
                    "default", addresses, self.chains, epoch=2, rev=self._rev, this_node=at, uuid=UUID
                )
                node.call(partial(Node.set_map, name="default", new=served))

    def wait_for_replicas(self) -> None:
        """Until every replica has what its active has."""
        for vbucket, (active, replica) in enumerate(self.chains):
            while self.nodes[replica].high_seqno(vbucket) < self.nodes[active].high_seqno(vbucket):
                sleep(0.01)

    def fail_over(self, lost: int) -> None:
        """A node dies, and the replicas of its vbuckets become active."""
        self.nodes[lost].kill()
        self._lost.add(lost)
        for vbucket, (active, replica) in enumerate(self.chains):
            if active == lost:
                self.nodes[replica].replicate([vbucket], None)
                self.nodes[replica].set_vbucket_state(vbucket, VBucketState.ACTIVE)
                self.chains[vbucket] = [replica, -1]
            elif replica == lost:
                self.chains[vbucket] = [active, -1]
        self.push_map()


@contextmanager
def outside_cluster(folder: Path) -> Iterator[OutsideCluster]:
    """The cluster, from ``with`` to the end of its block."""
    cert, key = make_certificate(folder, "outside")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    with ExitStack() as stack:
        names = stack.enter_context(DnsServer())
        nodes = [stack.enter_context(RunningNode(VBUCKETS, tls=context)) for _ in range(NODES)]
        yield OutsideCluster(nodes, names, cert)


def play(cluster: OutsideCluster, program: list[str]) -> None:
    """Run a program that writes, waits while a node is failed over, and goes on."""
    with subprocess.Popen(
        [*program, NAME, str(cluster.names.port), str(cluster.ca_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line == "before\n", line + process.stderr.read()[-3000:]
            assert f"_couchbases._tcp.{NAME}." in cluster.names.asked
            cluster.wait_for_replicas()
            cluster.fail_over(1)
            process.stdin.write("go on\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line == "after\n", line + process.stderr.read()[-3000:]
        finally:
            process.kill()
