"""The readers of the simulated cluster: a model of a mirror, and a reader of any copy.

Both run the product's own reader and its whole resume policy (`client.resume`) over simulated connections.
They are models in what they do with the changes: they keep them in a list per vbucket, publish a state only
where a snapshot ends, and go back where they are told to.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable

from cluster.sim_network import HOST, Dial
from tailrace.client.catalog import Catalog
from tailrace.client.events import Deletion, Expiration, Mutation, Rollback, SeqnoAdvanced
from tailrace.client.nodes import KnownNode, Nodes
from tailrace.client.progress import Progress, SavedPosition
from tailrace.client.read_options import ReadOptions
from tailrace.client.resume import Reading
from tailrace.connstr import Address, ConnectionString
from tailrace.errors import ConnectError, TailraceError
from tailrace.model import MAX_U64
from tailrace.protocol.dcp.reader import DcpReader, ReaderSettings


class _Link:
    """A reader's connection to a node."""

    def __init__(self, reader: Mirror, address: Address) -> None:
        self.closed = False
        self.opened = False
        self.error: Exception = ConnectError("the connection was cut")
        self.address = address
        self.reader = reader
        self.machine: DcpReader | None = None

    @property
    def wants_data(self) -> bool:
        return not self.closed and self.machine is not None and not self.machine.is_swamped

    def take(self) -> bytes:
        return b"" if self.machine is None else self.machine.data_to_send()

    def give(self, data: bytes, now: float) -> None:
        assert self.machine is not None
        try:
            self.machine.receive_data(data)
            self.machine.process(now)
            if not self.opened and self.machine.granted is not None:
                self.opened = True
                self.reader.nodes.opened(self.address, now)
        except TailraceError as error:
            self.error = error
            self.closed = True

    def tick(self, now: float) -> None:
        assert self.machine is not None
        timer = self.machine.next_timer()
        if timer is not None and timer <= now:
            try:
                self.machine.handle_timer(now)
            except ConnectError as error:
                self.error = error
                self.closed = True

    def lost(self) -> None:
        self.closed = True
        self.reader.lose(self)


class Mirror:
    """A model of a mirror: what it holds and what it has published of each vbucket."""

    PLACE = "mirror"
    NODES: type[Nodes] = Nodes
    READING: type[Reading] = Reading
    OPTIONS = ReadOptions(retry_for_s=1e9)

    def __init__(
        self, rng: random.Random, ports: dict[str, int], dial: Dial, now: Callable[[], float]
    ) -> None:
        self._rng = rng
        self._dial = dial
        self._now = now
        self._where = ConnectionString(tuple(Address(HOST, port) for port in ports.values()))
        self.on_publish: Callable[[int, int, int, dict[bytes, bytes]], None] = lambda *_: None
        self.on_rollback: Callable[[int, int], None] = lambda vbucket, seqno: None
        self.held: dict[int, list[tuple[int, bytes, bytes | None]]] = {}
        self.published: dict[int, tuple[int, dict[bytes, bytes]]] = {}
        self._saved: dict[int, SavedPosition] = {}
        self._links: list[_Link] = []
        self._begin()

    def _begin(self) -> None:
        settings = ReaderSettings(self.PLACE, buffer_bytes=64 << 10, noop_interval_s=20.0)
        self.nodes = self.NODES(
            self._where, settings, agent="sim", allow_plain=False, retry_for_s=1e9, rng=self._rng
        )
        self.reading = self.READING(self.nodes, Catalog("default"), self.OPTIONS, self._saved, rng=self._rng)

    def restart(self) -> None:
        """A kill: what was published stays, with the positions that were saved with it."""
        for link in self._links:
            link.closed = True
        self._links = []
        for vbucket, held in self.held.items():
            kept = self._saved[vbucket].position.seqno if vbucket in self._saved else 0
            held[:] = [version for version in held if version[0] <= kept]
        self._begin()

    def can_read(self, ports: list[int]) -> bool:
        """A vbucket whose copies are at these ports."""
        return True

    def lose(self, link: _Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self.reading.link_closed(link.address, link.error)

    def turn(self) -> None:
        """Do what is due: connect, ask, take what came."""
        now = self._now()
        self.reading.turn(now)
        for address in sorted(self.nodes.to_connect(now), key=lambda target: target.port):
            link = _Link(self, address)
            if not self._dial(self.PLACE, address.port, link):
                self._unreachable(address, now)
                continue
            link.machine = self.nodes.connected(address, now)
            self._links.append(link)
        for address in self.nodes.to_disconnect():
            for link in self._links:
                assert link.machine is not None
                if link.address == address and link.machine.next_chunk() is None:
                    link.closed = True
                    self._links.remove(link)
                    self.nodes.dropped(address)
                    break
        try:
            while (piece := self.reading.take(now)) is not None:
                for event in piece.events():
                    self._apply(event)
                self.reading.finish(piece)
                self._saved = self.reading.to_save()
        except ConnectError:
            self.restart()  # no node could be reached: a real one ends, and is started again

    def _unreachable(self, address: Address, now: float) -> None:
        with contextlib.suppress(ConnectError):
            self.nodes.lost(address, ConnectError("refused"), now)

    def _apply(self, event: object) -> None:
        if isinstance(event, Rollback):
            self.on_rollback(event.vbucket, event.seqno)
            held = self.held.setdefault(event.vbucket, [])
            held[:] = [version for version in held if version[0] <= event.seqno]
            self._publish(event.vbucket, event.vb_uuid, event.seqno)
        elif isinstance(event, Mutation | Deletion | Expiration):
            value = event.value if isinstance(event, Mutation) else None
            self.held.setdefault(event.vbucket, []).append((event.seqno, event.key, value))
            if event.seqno == event.snapshot[1]:
                self._publish(event.vbucket, event.vb_uuid, event.seqno)
        elif isinstance(event, SeqnoAdvanced) and event.seqno == event.snapshot[1]:
            self._publish(event.vbucket, event.vb_uuid, event.seqno)

    def has_part(self, vbucket: int) -> bool:
        """Whether it has changes that it has not published, because the rest of their snapshot is missing."""
        published, _ = self.published.get(vbucket, (0, {}))
        return any(seqno > published for seqno, _, _ in self.held.get(vbucket, []))

    def _publish(self, vbucket: int, vb_uuid: int, seqno: int) -> None:
        state: dict[bytes, bytes] = {}
        for _, key, value in self.held.get(vbucket, []):
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
        self.published[vbucket] = seqno, state
        self.on_publish(vbucket, vb_uuid, seqno, state)


class CautiousMirror(Mirror):
    """Takes only what all copies have on disk: nothing that it was given is ever taken back."""

    OPTIONS = ReadOptions(retry_for_s=1e9, persisted_only=True)
    on_loss: Callable[[int, list[int]], None]

    def _begin(self) -> None:
        super()._begin()
        self._made_on: dict[tuple[int, int], int] = getattr(self, "_made_on", {})

    def _apply(self, event: object) -> None:
        if isinstance(event, Rollback):
            held = [version[0] for version in self.held.get(event.vbucket, []) if version[0] > event.seqno]
            lost = [seqno for seqno in held if not self._will_come_again(event.vbucket, seqno)]
            if lost:
                self.on_loss(event.vbucket, lost)
        elif isinstance(event, Mutation | Deletion | Expiration):
            self._made_on[event.vbucket, event.seqno] = event.vb_uuid
        super()._apply(event)

    def _will_come_again(self, vbucket: int, seqno: int) -> bool:
        """Whether the vbucket still has what it had there: a snapshot may be sent anew from its start."""
        log = self.reading.progress[vbucket].history
        branch = log and log.range_of(self._made_on[vbucket, seqno], MAX_U64)
        return bool(branch and seqno <= branch.upper)


class _OneNode(Nodes):
    """Asks one node for everything, whatever the map says."""

    home: Address

    def move(self, home: Address) -> None:
        """No map says so, and `need` is only called when one does."""
        self.home = home
        self._needed = (home,)

    def need(self, vbuckets: Iterable[int], *, copies_of: Iterable[int] = ()) -> None:
        self._needed = (self.home,)

    def node_of(self, vbucket: int) -> KnownNode | None:
        return self._node(self.home)


class _AnyCopy(Reading):
    """A reading that takes vbuckets that are not active, too."""

    def _request(self, progress: Progress, node: KnownNode) -> None:
        assert node.link is not None
        progress.requested(self._now)
        value = self._catalog.request_value(node.link, progress.stream.purge_seqno)
        node.link.open_stream(progress.stream, value=value)


class CopyReader(Mirror):
    """Reads all that one node has, active or not, and goes on at the next one with what it holds."""

    PLACE = "copy reader"
    NODES = _OneNode
    READING = _AnyCopy

    def _begin(self) -> None:
        super()._begin()
        assert isinstance(self.nodes, _OneNode)
        self.nodes.home = self._rng.choice(self._where.addresses)

    def move(self) -> None:
        """Move to some node; parts of an unfinished snapshot are kept."""
        for link in list(self._links):
            link.closed = True
            self.lose(link)
        assert isinstance(self.nodes, _OneNode)
        self.nodes.move(self._rng.choice(self._where.addresses))

    def can_read(self, ports: list[int]) -> bool:
        assert isinstance(self.nodes, _OneNode)
        return self.nodes.home.port in ports
