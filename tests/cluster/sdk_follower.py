"""The official SDK against a cluster that changes; run in a process of its own, because its core can take one
down.

python sdk_follower.py HOST:PORT,HOST:PORT

Each line on stdin is a round: all keys are written and read back, and the line comes back. A single operation
may fail while the map changes; the round goes on until all have succeeded, with the same connection to the
cluster all the time.
"""

import sys
import time
from datetime import timedelta
from typing import Any

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.exceptions import CouchbaseException
from couchbase.options import ClusterOptions, ClusterTimeoutOptions

KEYS = [f"key-{number}" for number in range(40)]
PATIENCE_S = 120.0


def until_done(act: Any) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return act()
        except CouchbaseException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> None:
    timeouts = ClusterTimeoutOptions(
        bootstrap_timeout=timedelta(seconds=60),
        connect_timeout=timedelta(seconds=60),
        kv_timeout=timedelta(seconds=10),
    )
    options = ClusterOptions(PasswordAuthenticator("Administrator", "password"), timeout_options=timeouts)
    cluster = Cluster.connect(f"couchbase://{sys.argv[1]}", options)
    collection = cluster.bucket("default").default_collection()
    for line in sys.stdin:
        text = line.strip()
        for key in KEYS:
            until_done(lambda key=key, text=text: collection.upsert(key, {"round": text}))
        for key in KEYS:
            content = until_done(lambda key=key: collection.get(key)).content_as[dict]
            assert content == {"round": text}, (key, content)
        print(text, flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
