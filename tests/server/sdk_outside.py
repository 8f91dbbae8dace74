"""The official SDK on a cluster behind names; in a process of its own, because its core can take one down.

python sdk_outside.py CLUSTER_NAME DNS_PORT CA_FILE

Writes, says so, and waits for a line before it goes on, so that the nodes can change meanwhile.
"""

import sys
import time
from datetime import timedelta
from typing import Any

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.exceptions import CouchbaseException
from couchbase.kv_range_scan import PrefixScan
from couchbase.options import ClusterOptions, ClusterTimeoutOptions

KEYS = [f"key::{number}" for number in range(60)]


def main(name: Any, dns_port: Any, ca_file: Any) -> None:
    options = ClusterOptions(
        PasswordAuthenticator("Administrator", "password", cert_path=ca_file),
        timeout_options=ClusterTimeoutOptions(
            kv_timeout=timedelta(seconds=30), bootstrap_timeout=timedelta(seconds=60)
        ),
        dns_nameserver="127.0.0.1",
        dns_port=int(dns_port),
    )
    cluster = Cluster(f"couchbases://{name}", options)
    bucket = cluster.bucket("default")
    cluster.wait_until_ready(timedelta(seconds=60))
    collection = bucket.default_collection()
    for key in KEYS:
        collection.upsert(key, {"round": "before"})
    assert len({collection.get(key).content_as[dict]["round"] for key in KEYS}) == 1
    copies = set()
    deadline = time.monotonic() + 60
    while True not in copies:
        try:
            copies |= {result.is_replica for result in collection.get_all_replicas(KEYS[0])}
        except CouchbaseException:
            assert time.monotonic() < deadline
        assert time.monotonic() < deadline, copies
    assert collection.get_any_replica(KEYS[1]).content_as[dict] == {"round": "before"}
    scanned = sorted(document.id for document in collection.scan(PrefixScan("key::")))
    assert scanned == sorted(KEYS), scanned
    print("before", flush=True)
    sys.stdin.readline()
    for key in KEYS:
        assert collection.get(key).content_as[dict] == {"round": "before"}, key
        collection.upsert(key, {"round": "after"})
    assert {collection.get(key).content_as[dict]["round"] for key in KEYS} == {"after"}
    print("after", flush=True)


main(*sys.argv[1:])
