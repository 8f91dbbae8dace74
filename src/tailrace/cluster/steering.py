"""What a node can be told to do with its vbuckets, by a coordinator or a takeover."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from time import sleep
from typing import Any, TypeVar

from .. import rng as rng_
from ..client.retry import TEMPORARY, Backoff
from ..clock import SYSTEM
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

RETRY_FOR_S = 10.0
"""How long a request that a node can't fulfil now is repeated."""

Row = dict[str, Any]
"""What a node reports about a vbucket: state, seqnos, where it comes from."""

Report = dict[int, Row]
"""The rows of all its vbuckets, by number."""


class Steering(ABC):
    """A node that is told what to do; subclasses know how it is reached."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket

    @abstractmethod
    def _run(self, script: Script[T]) -> T:
        """Have this conversation with the node."""

    def report(self, sources: Sequence[Mapping[str, Any]] | None = None) -> Report:
        """The report on its vbuckets; ``sources`` first sets where it receives them from."""
        value = b"" if sources is None else json.dumps({"sources": list(sources)}).encode()
        request = Replicate(value=value, datatype=int(Datatype.JSON) if value else 0)
        answer = self._run(ask(request, "replicate"))
        return {int(number): row for number, row in json.loads(answer.value)["vbuckets"].items()}

    def set_states(self, states: Mapping[int, VBucketState]) -> None:
        """Create vbuckets or change their states."""
        self._all([SetVBucket(vbucket=number, state=int(state)) for number, state in states.items()])

    def delete(self, vbuckets: Sequence[int]) -> None:
        """Delete vbuckets and all that they hold."""
        self.set_states(dict.fromkeys(vbuckets, VBucketState.DEAD))
        self._all([DelVBucket(vbucket=number) for number in vbuckets])

    def set_map(self, text: bytes, epoch: int, rev: int) -> None:
        """Give it the bucket's cluster map, which it passes on to its clients."""
        request = SetClusterConfig(
            key=self.bucket.encode(), value=text, epoch=epoch, revision=rev, datatype=int(Datatype.JSON)
        )
        self._run(ask(request, "set cluster config"))

    def manifest(self) -> dict[str, Any]:
        """Its collections."""
        answer: dict[str, Any] = json.loads(
            self._run(ask(GetCollectionsManifest(), "get collections manifest")).value
        )
        return answer

    def set_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Give it the collections of another node."""
        value = json.dumps(manifest).encode()
        self._run(ask(SetCollectionsManifest(value=value), "set collections manifest"))

    def _all(self, requests: Sequence[Message]) -> None:
        """Send all of these; those that the node can't do now are sent again for a while."""
        backoff = Backoff(rng_.source(), first_s=0.01, most_s=0.5)
        deadline = SYSTEM.monotonic() + RETRY_FOR_S
        while requests:
            is_last = SYSTEM.monotonic() > deadline
            requests = self._run(_refused(requests, may_refuse=not is_last))
            if requests:
                sleep(backoff.next_s())


def _refused(requests: Sequence[Message], *, may_refuse: bool) -> Script[list[Message]]:
    """Those of the requests that the node can't do now; any other refusal is an error."""
    answers = yield requests
    refused = []
    for answer, request in zip(answers, requests, strict=True):
        if may_refuse and answer.status in TEMPORARY:
            refused.append(request)
        else:
            expect(answer, f"{request.name()} of vbucket {request.vbucket}")
    return refused
