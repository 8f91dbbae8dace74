"""What can be asked of a node by who decides which vbuckets it has."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..protocol.script import Script, ask, expect
from ..wire.admin import (
    DelVBucket,
    GetCollectionsManifest,
    Replicate,
    SetClusterConfig,
    SetCollectionsManifest,
    SetVBucket,
)
from ..wire.codes import Datatype, VBucketState
from ..wire.message import Message

__all__ = ["Report", "Row", "Steering"]

T = TypeVar("T")

Row = dict[str, Any]
"""How a vbucket stands: state, seqnos, where it comes from."""

Report = dict[int, Row]
"""How vbuckets stand."""


class Steering(ABC):
    """A node that is told what to do; how it is reached is a matter of who does it."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket

    @abstractmethod
    def _run(self, script: Script[T]) -> T:
        """Have this conversation with the node."""

    def report(self, sources: Sequence[Mapping[str, Any]] | None = None) -> Report:
        """How each of its vbuckets stands; with ``sources`` after it was told where they come from."""
        value = b"" if sources is None else json.dumps({"sources": list(sources)}).encode()
        request = Replicate(value=value, datatype=int(Datatype.JSON) if value else 0)
        answer = self._run(ask(request, "replicate"))
        return {int(number): row for number, row in json.loads(answer.value)["vbuckets"].items()}

    def set_states(self, states: Mapping[int, VBucketState]) -> None:
        """Create vbuckets or change their states."""
        self._all([SetVBucket(vbucket=number, state=int(state)) for number, state in states.items()])

    def delete(self, vbuckets: Sequence[int]) -> None:
        """Forget vbuckets and all that they hold."""
        self.set_states(dict.fromkeys(vbuckets, VBucketState.DEAD))
        self._all([DelVBucket(vbucket=number) for number in vbuckets])

    def set_map(self, text: bytes, epoch: int, rev: int) -> None:
        """Give it the bucket's cluster map; its clients are told."""
        request = SetClusterConfig(
            key=self.bucket.encode(), value=text, epoch=epoch, revision=rev, datatype=int(Datatype.JSON)
        )
        self._run(ask(request, "set cluster config"))

    def manifest(self) -> dict[str, Any]:
        """Its collections."""
        found: dict[str, Any] = json.loads(
            self._run(ask(GetCollectionsManifest(), "get collections manifest")).value
        )
        return found

    def set_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Give it the collections of another node."""
        value = json.dumps(manifest).encode()
        self._run(ask(SetCollectionsManifest(value=value), "set collections manifest"))

    def _all(self, requests: list[Message]) -> None:
        if requests:
            self._run(_all(requests))


def _all(requests: list[Message]) -> Script[None]:
    answers = yield requests
    for answer, request in zip(answers, requests, strict=True):
        expect(answer, f"{request.name()} of vbucket {request.vbucket}")
