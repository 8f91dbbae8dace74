"""The table of settings, the cluster map and the error map as values."""

from __future__ import annotations

import json

import pytest

from server.serverkit import Bench, ask
from tailrace.errors import UsageError
from tailrace.server.errormap import error_map
from tailrace.server.settings import Settings, table
from tailrace.server.topology import NodeAddress, bucket_map, global_map
from tailrace.store.base import StoreSettings
from tailrace.wire import admin, kv
from tailrace.wire.codes import Status


def test_defaults_are_those_of_the_store():
    ours, theirs = Settings().for_store(), StoreSettings()
    for name in StoreSettings.__dataclass_fields__:
        if name != "tombstone_value":
            assert getattr(ours, name) == getattr(theirs, name), name


def test_every_setting_of_the_store_can_be_set():
    names = {one.name for one in table()}
    assert set(StoreSettings.__dataclass_fields__) - names == {"tombstone_value"}


def test_values():
    made = Settings.parse(["max_frame=1m", "idle_timeout=5m", "checkpoint_share=30%", "last_write_wins=yes"])
    assert (made.max_frame, made.idle_timeout, made.checkpoint_share) == (1 << 20, 300.0, 0.3)
    assert made.for_store().last_write_wins is True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_frane=1", "max_frame"),
        ("max_frame", "NAME=VALUE"),
        ("max_frame=", "max_frame"),
        ("max_frame=1", "at least"),
        ("max_frame=1_000_000", "max_frame"),
        ("idle_timeout=inf", "idle_timeout"),
        ("idle_timeout=-1", "idle_timeout"),
        ("checkpoint_share=2", "checkpoint_share"),
        ("last_write_wins=2", "last_write_wins"),
        ("=", "no setting"),
    ],
)
def test_wrong_values(text, says):
    with pytest.raises(UsageError, match=says):
        Settings.parse([text])


def test_every_limit_is_kept_by_somebody():
    """A setting that nobody reads is a promise that nobody keeps."""
    from pathlib import Path

    import tailrace

    code = "".join(
        path.read_text()
        for path in Path(tailrace.__file__).parent.rglob("*.py")
        if path.name != "settings.py" and "cli" not in path.parts
    )
    for one in table():
        assert f".{one.name}" in code, one.name


def test_a_map_of_several_nodes():
    nodes = [NodeAddress(port=1, tls_port=2, host="10.0.0.1"), NodeAddress(port=3, host="::1", mgmt_port=9)]
    made = bucket_map("b", nodes, [[0, 1], [1, 0], [1, -1]], epoch=4, rev=5, this_node=1)
    content = json.loads(made.text)
    assert made.version == (4, 5)
    assert content["vBucketServerMap"]["serverList"] == ["10.0.0.1:1", "[::1]:3"]
    assert content["vBucketServerMap"]["numReplicas"] == 1
    assert content["nodesExt"][0] == {
        "services": {"kv": 1, "mgmt": 8091, "kvSSL": 2},
        "hostname": "10.0.0.1",
    }
    assert content["nodesExt"][1]["thisNode"] is True
    assert len(content["nodes"]) >= len(content["nodesExt"])
    assert set(json.loads(global_map(nodes, rev=1).text)) == {"rev", "revEpoch", "nodesExt"}


def test_the_error_map_knows_every_status_that_we_send():
    """Each status that the server's code names, in the map that it hands out."""
    import re
    from pathlib import Path

    import tailrace

    content = json.loads(error_map(2) or b"")
    folder = Path(tailrace.__file__).parent
    for path in [*(folder / "server").rglob("*.py"), *(folder / "store").glob("*.py")]:
        for name in set(re.findall(r"\bStatus\.([A-Z][A-Z0-9_]+)", path.read_text())):
            assert f"{Status[name]:x}" in content["errors"], name
    assert error_map(0) is None


def test_a_node_is_deterministic_under_one_seed():
    """The same clock, seed and requests give the same bytes: what a simulation counts on."""

    def run():
        bench = Bench()
        session = bench.session()
        out = []
        for at in range(50):
            frames = ask(
                bench,
                session,
                kv.Set(key=b"k%d" % (at % 7), value=b"v", opaque=at, framing=b"\x11\x03" if at % 3 else b""),
                admin.GetFailoverLog(),
                admin.SaslAuth(key=b"SCRAM-SHA256", value=b"n,,n=Administrator,r=x"),
            )
            bench.advance(0.1)
            bench.run_jobs()
            out += [frame.encode() for frame in frames]
        return out

    assert run() == run()
