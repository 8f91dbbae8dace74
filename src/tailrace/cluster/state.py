"""The state of a cluster in a file: its nodes, and which of them has which vbucket.

It is on disk before anything follows from it.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import ClusterError, UsageError
from ..files import DiskFiles, Files
from ..rng import unique_name
from .layout import Chain, balanced

__all__ = ["ClusterState"]

STATE_FILE = "cluster.json"


class ClusterState:
    """The nodes and the chains of a cluster in a directory."""

    def __init__(self, directory: Path, files: Files | None = None) -> None:
        """``files`` keeps the state; it defaults to the directory."""
        self.directory = directory
        self.bucket = "default"
        self.bucket_uuid = ""
        """The same on all nodes, whatever uuid their own parts of the bucket have."""
        self.vbuckets = 0
        self.replicas = 0
        self.rev = 0
        self.settings: list[str] = []
        self.ports: dict[str, int] = {}
        self.chains: list[Chain] = []
        self.out: set[str] = set()
        """Nodes that have no part in the cluster: failed over, or not rebalanced in yet."""
        self._files = DiskFiles(directory) if files is None else files

    @property
    def _exists(self) -> bool:
        return STATE_FILE in self._files.names("")

    def create(
        self, *, nodes: int, bucket: str, vbuckets: int, replicas: int, ports: list[int], settings: list[str]
    ) -> None:
        """Create a cluster; nothing runs yet."""
        if self._exists:
            raise UsageError(f"{str(self.directory)!r} already has a cluster")
        self._files.make_directory("")
        self.bucket, self.vbuckets, self.replicas, self.settings = bucket, vbuckets, replicas, settings
        self.bucket_uuid = unique_name()
        names = [f"n{number}" for number in range(1, nodes + 1)]
        self.ports = dict(zip(names, ports, strict=True))
        self.chains = balanced([()] * vbuckets, names, replicas)
        self.save()

    def load(self) -> bool:
        """Load a cluster that was stopped; False if there is none."""
        if not self._exists:
            return False
        file = self._files.open(STATE_FILE)
        try:
            content = json.loads(file.read(file.size, 0))
            self.bucket, self.vbuckets = content["bucket"], content["vbuckets"]
            self.bucket_uuid = content.get("bucket_uuid", "")
            self.replicas, self.rev = content["replicas"], content["rev"]
            self.ports = {node["name"]: node["port"] for node in content["nodes"]}
            self.out = {node["name"] for node in content["nodes"] if node["out"]}
            self.chains = [tuple(chain) for chain in content["chains"]]
            self.settings = content["settings"]
            # A takeover that was under way is undone when the nodes are made to match the chains, which still
            # name the old node.
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"{str(self.directory / STATE_FILE)!r} is damaged: {error}") from None
        finally:
            file.close()
        return True

    def save(self) -> None:
        """Write the state to disk."""
        content = {
            "bucket": self.bucket,
            "bucket_uuid": self.bucket_uuid,
            "vbuckets": self.vbuckets,
            "replicas": self.replicas,
            "rev": self.rev,
            "settings": self.settings,
            "nodes": [
                {"name": name, "port": port, "out": name in self.out} for name, port in self.ports.items()
            ],
            "chains": [list(chain) for chain in self.chains],
        }
        self._files.replace(STATE_FILE, json.dumps(content).encode() + b"\n")

    def commit(self, chains: list[Chain]) -> None:
        """Make these the chains from now on."""
        self.chains = chains
        self.rev += 1
        self.save()
