"""The official SDK finds three nodes by SRV records, reaches them by alternate addresses over TLS, and goes
on after a failover.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tailrace
from server.outside import NAME, VBUCKETS, outside_cluster, play
from tailrace.cli.main import main


def test_the_python_sdk_from_outside(tmp_path: Path) -> None:
    pytest.importorskip("couchbase")
    script = Path(__file__).with_name("sdk_outside.py")
    with outside_cluster(tmp_path) as cluster:
        play(cluster, [sys.executable, "-W", "ignore", str(script)])


def test_our_own_reader_and_doctor_from_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with outside_cluster(tmp_path) as cluster:
        for vbucket, (active, _) in enumerate(cluster.chains):
            cluster.nodes[active].set(f"key{vbucket}", vbucket, vbucket=vbucket)
        url = f"couchbases://{NAME}/default?{cluster.names.options()}&ca_cert_path={cluster.ca_file}"
        with tailrace.connect_sync(url) as source:
            keys = {
                change.key for change in source.changes(end="now") if isinstance(change, tailrace.Mutation)
            }
        assert len(keys) == VBUCKETS
        cluster.wait_for_replicas()
        assert main(["doctor", url]) == 0
        assert "networks: external is chosen by the hosts of the URL" in capsys.readouterr().out
        assert main(["doctor", url + "&network=default", "--timeout", "50ms"]) == 1
        assert "?network=external" in capsys.readouterr().out
