"""Captures: every file form and link, and TCP reassembled from any order of segments."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from captures import ACK, CLIENT, FIN, LINKS, RST, SERVER, SYN, Talk, pcap_file, pcapng_file, tcp_packet
from tailrace import pcap
from tailrace.errors import InputError

IPV6 = ("20010db8000000000000000000000001", "20010db8000000000000000000000002")


def events(
    data: bytes, port: int | None = None
) -> list[pcap.CapturedBytes | pcap.Gap | pcap.ConversationEnded]:
    streams = pcap.TcpStreams(port)
    events = [event for packet in pcap.packets(io.BytesIO(data)) for event in streams.feed(packet)]
    return events + list(streams.finish())


def pieces(data: bytes, port: int | None = None) -> list[Any]:
    return [event for event in events(data, port) if not isinstance(event, pcap.ConversationEnded)]


def joined(joining: list[pcap.CapturedBytes | pcap.Gap], *, from_client: bool | None) -> bytes:
    return b"".join(
        piece.data
        for piece in joining
        if isinstance(piece, pcap.CapturedBytes) and piece.from_client == from_client
    )


def talk() -> Talk:
    return Talk().open().send(CLIENT, b"request").send(SERVER, b"x" * 5000).close()


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("nanoseconds", [False, True])
def test_libpcap_in_both_orders_and_units(order: str, nanoseconds: bool) -> None:
    packets, link = talk().wrapped()
    data = pcap_file(packets, link, order=order, nanoseconds=nanoseconds)
    read = list(pcap.packets(io.BytesIO(data)))
    assert [packet.data for packet in read] == packets
    assert [packet.time_ns for packet in read][:2] == [1_700_000_000_500_000_000, 1_700_000_001_500_000_000]


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("kind", "resolution"), [(6, 6), (6, 9), (6, 3), (3, 6), (2, 6)])
def test_pcapng_in_both_orders_with_all_packet_blocks(order: str, kind: int, resolution: int) -> None:
    packets, link = talk().wrapped()
    data = pcapng_file(packets, link, order=order, kind=kind, resolution=resolution)
    data += pcapng_file(packets[:1], link, order="<" if order == ">" else ">")  # a second section
    read = list(pcap.packets(io.BytesIO(data)))
    assert [packet.data for packet in read] == [*packets, packets[0]]
    if kind != 3:
        assert read[1].time_ns == 1_700_000_001_500_000_000


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("hosts", [("10.0.0.1", "10.0.0.2"), IPV6])
def test_every_link_carries_both_ips(link: str, hosts: tuple[str, str]) -> None:
    made = Talk((hosts[0], 5), (hosts[1], 6)).open().send(CLIENT, b"ab").send(SERVER, b"cd").close()
    parts = pieces(pcap_file(*made.wrapped(link)))
    assert (joined(parts, from_client=True), joined(parts, from_client=False)) == (b"ab", b"cd")
    source = parts[0].source
    assert str(source) == ("10.0.0.1:5" if "." in hosts[0] else "[2001:db8::1]:5")


def test_ipv6_extension_headers_are_stepped_over() -> None:
    hop_by_hop = b"\x00" + b"\x2c\x01" + bytes(14)  # 16 bytes, then a fragment header
    whole_fragment = b"\x06\x00\x00\x00" + bytes(4)
    packet = tcp_packet((IPV6[0], 5), (IPV6[1], 6), 1, b"data", extension=hop_by_hop + whole_fragment)
    assert joined(pieces(pcap_file([packet], 101)), from_client=None) == b"data"
    part = b"\x2c" + b"\x06\x00\x00\x01" + bytes(4)  # more fragments follow
    packet = tcp_packet((IPV6[0], 5), (IPV6[1], 6), 1, b"data", extension=part)
    assert pieces(pcap_file([packet], 101)) == []


def test_who_opened_the_conversation_is_the_client_and_else_nobody_knows() -> None:
    late = Talk().send(CLIENT, b"a").send(SERVER, b"b")
    parts = pieces(pcap_file(*late.wrapped()))
    assert [(piece.from_client, piece.from_start) for piece in parts] == [(None, False), (None, False)]
    parts = pieces(pcap_file(*late.wrapped()), port=11210)
    assert [piece.from_client for piece in parts] == [True, False]
    assert pieces(pcap_file(*late.wrapped()), port=11211) == []


def test_a_port_that_is_used_again_is_another_conversation() -> None:
    first = Talk().open().send(CLIENT, b"one")
    again = Talk(seqs=[77_000, 88_000]).open().send(CLIENT, b"two")
    first.packets += again.packets
    parts = pieces(pcap_file(*first.wrapped()))
    assert [(piece.conversation, piece.data) for piece in parts] == [(1, b"one"), (2, b"two")]


def test_a_reset_ends_a_conversation() -> None:
    made = Talk().open().send(CLIENT, b"one")
    made.packets.append(tcp_packet(made.server, made.client, made.seqs[SERVER], flags=RST))
    made.packets += Talk(seqs=[5, 6]).open().send(CLIENT, b"two").packets
    assert [piece.conversation for piece in pieces(pcap_file(*made.wrapped()))] == [1, 2]


@pytest.mark.parametrize("end", [FIN, RST])
def test_what_comes_again_after_the_end_is_no_conversation_of_its_own(end: int) -> None:
    """A capture on all interfaces has each packet twice, and the last ones carry data and the end."""
    made = Talk().open().send(CLIENT, b"one").send(SERVER, b"two")
    for side, data in ((CLIENT, b"last"), (SERVER, b"words")):
        here, there = (made.client, made.server) if side == CLIENT else (made.server, made.client)
        made.packets.append(tcp_packet(here, there, made.seqs[side], data, flags=ACK | end))
    twice = [packet for packet in made.packets for _ in range(2)] + made.packets[3:5]
    parts = pieces(pcap_file(twice, 101))
    assert [(piece.conversation, piece.data) for piece in parts] == [
        (1, b"one"),
        (1, b"two"),
        (1, b"last"),
        (1, b"words"),
    ]


def test_what_is_new_after_the_end_is_another_conversation() -> None:
    made = talk()
    again = Talk(seqs=[made.seqs[CLIENT] + 50_000, made.seqs[SERVER] + 50_000]).send(CLIENT, b"new")
    parts = pieces(pcap_file(made.packets + again.packets, 101))
    assert [(piece.conversation, piece.data) for piece in parts][-1] == (2, b"new")


def test_ended_conversations_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcap, "MAX_ENDED", 3)
    talks = [Talk(("10.0.0.1", port)).open().send(CLIENT, b"x").close() for port in range(1000, 1010)]
    packets = [packet for talk in talks for packet in talk.packets]
    forgotten = [
        event.conversation
        for event in events(pcap_file(packets, 101))
        if isinstance(event, pcap.ConversationEnded)
    ]
    assert forgotten == [1, 2, 3, 4, 5, 6, 7]


def test_a_conversation_whose_ports_are_used_again_is_forgotten() -> None:
    first = Talk().open().send(CLIENT, b"one")
    for number in range(1, 4):  # without an end, with one, and again with one
        again = Talk(seqs=[number * 77_000, number * 88_000]).open().send(CLIENT, b"two").close()
        first.packets += again.packets
    told = [(type(event).__name__, event.conversation) for event in events(pcap_file(*first.wrapped()))]
    assert told == [
        ("CapturedBytes", 1),
        ("ConversationEnded", 1),
        ("CapturedBytes", 2),
        ("ConversationEnded", 2),
        ("CapturedBytes", 3),
        ("ConversationEnded", 3),
        ("CapturedBytes", 4),
    ]


def test_bytes_behind_a_gap_have_the_time_of_the_captures_end() -> None:
    made = Talk().open()
    made.send(CLIENT, b"abcdef", 2)
    del made.packets[-2]
    *_, last = pieces(pcap_file(*made.wrapped()))
    assert isinstance(last, pcap.CapturedBytes)
    assert last.data == b"ef"
    assert last.time_ns == 1_700_000_000_500_000_000 + (len(made.packets) - 1) * 10**9


def test_many_short_conversations_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcap, "MAX_CONVERSATIONS", 3)
    packets = [
        packet
        for port in range(1000, 1020)
        for packet in Talk(("10.0.0.1", port)).open().send(CLIENT, b"x").close().packets
    ]
    assert len(pieces(pcap_file(packets, 101))) == 20
    packets = [packet for port in range(9) for packet in Talk(("10.0.0.1", port + 1)).open().packets]
    with pytest.raises(InputError, match="more than 3 conversations"):
        pieces(pcap_file(packets, 101))


def test_a_segment_that_was_not_captured_is_a_gap() -> None:
    made = Talk().open()
    made.send(CLIENT, b"abcdef", 2)
    del made.packets[-2]
    assert [
        getattr(piece, "data", getattr(piece, "size", None)) for piece in pieces(pcap_file(*made.wrapped()))
    ] == [
        b"ab",
        2,
        b"ef",
    ]


def test_what_waits_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcap, "MAX_WAITING", 100)
    made = Talk().open()
    made.send(CLIENT, bytes(10)).send(CLIENT, b"y" * 300, 10)
    lost = made.packets.pop(3)
    made.packets.append(lost)  # it comes, but too late
    parts = pieces(pcap_file(*made.wrapped()))
    assert isinstance(parts[0], pcap.Gap) and parts[0].size == 10
    assert joined(parts, from_client=True) == b"y" * 300
    monkeypatch.setattr(pcap, "MAX_WAITING", 1 << 20)
    monkeypatch.setattr(pcap, "MAX_WAITING_IN_ALL", 100)
    with pytest.raises(InputError, match="missing"):
        pieces(pcap_file(*made.wrapped()))


def test_an_unknown_link_is_passed_over_and_remembered() -> None:
    streams = pcap.TcpStreams()
    for packet in pcap.packets(io.BytesIO(pcap_file([b"whatever"], 147))):
        assert list(streams.feed(packet)) == []
    assert streams.unknown_links == {147}


@given(
    data=st.binary(min_size=1, max_size=400),
    first=st.sampled_from([0, 1, 2**31 - 5, 2**32 - 30, 2**32 - 1]) | st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**32),
    extra=st.integers(0, 30),
)
def test_any_order_of_overlapping_segments_gives_the_stream(
    data: bytes, first: int, seed: int, extra: int
) -> None:
    """The stream is cut at random, segments are doubled, overlap and come in any order, across the wrap."""
    rng = random.Random(seed)
    cuts = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.randrange(20)))})
    parts = list(itertools.pairwise(cuts))
    for _ in range(extra):
        start = rng.randrange(len(data))
        parts.append((start, rng.randrange(start, len(data) + 1)))
    rng.shuffle(parts)
    client, server = ("10.0.0.1", 5), ("10.0.0.2", 6)
    packets = [tcp_packet(client, server, first - 1, flags=SYN)]
    packets += [tcp_packet(client, server, first + low, data[low:high]) for low, high in parts]
    told = pieces(pcap_file(packets, 101))
    assert joined(told, from_client=True) == data
    assert not any(isinstance(piece, pcap.Gap) for piece in told)


@given(
    segments=st.lists(
        st.tuples(st.booleans(), st.integers(0, 2**32 - 1), st.binary(max_size=8), st.integers(0, 0x1F)),
        max_size=30,
    )
)
def test_hostile_segments_end_in_bytes_and_gaps(
    segments: list[tuple[bool, int, bytes, int]],
) -> None:
    ends = (("10.0.0.1", 5), ("10.0.0.2", 6))
    packets = [
        tcp_packet(*(ends if way else ends[::-1]), seq, data, flags) for way, seq, data, flags in segments
    ]
    for piece in pieces(pcap_file(packets, 101)):
        assert (isinstance(piece, pcap.Gap) and piece.size > 0) or (
            isinstance(piece, pcap.CapturedBytes) and piece.data
        )


@given(st.data())
def test_any_damage_to_a_capture_is_an_input_error_or_other_packets(data: st.DataObject) -> None:
    packets, link = talk().wrapped()
    made = data.draw(st.sampled_from([pcap_file(packets, link), pcapng_file(packets, link)]))
    damaged = bytearray(made[: data.draw(st.integers(0, len(made)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InputError):
        pieces(bytes(damaged))


@given(st.binary(max_size=200), st.sampled_from([0, 1, 12, 101, 108, 113, 228, 276]))
def test_any_packet_gives_pieces_or_nothing(packet: bytes, link: int) -> None:
    pieces(pcap_file([packet], link))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "cut off"),
        (b"nonsense", "not a capture"),
        (pcap_file([b"x" * 50])[:-1], "cut off"),
        (pcap_file([b"x" * 50])[:30], "cut off"),
        (pcap_file([])[:20], "cut off"),
        (pcap_file([]) + bytes(8) + b"\xff" * 8, "damaged"),
        (pcapng_file([b"x" * 50])[:-1], "cut off"),
        (b"\x0a\x0d\x0d\x0a" + bytes(20), "without a byte order"),
        (pcapng_file([]) + b"\x06\0\0\0\x0d\0\0\0", "block of 13 bytes"),
        (pcapng_file([]) + b"\x06\0\0\0\xff\xff\xff\x7f", "damaged"),
        (pcapng_file([]) + b"\x06\0\0\0\x10\0\0\0\0\0\0\0\x14\0\0\0", "two lengths differ"),
        (pcapng_file([]) + b"\x06\0\0\0\x10\0\0\0\0\0\0\0\x10\0\0\0", "too short"),
    ],
)
def test_damage_is_named(data: bytes, what: str) -> None:
    with pytest.raises(InputError, match=what):
        pieces(data)
