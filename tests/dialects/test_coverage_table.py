"""No row of the table of messages and flags is empty, and no test covers what does not exist."""

from __future__ import annotations

from dialects.coverage_table import covered, implemented, not_for_readers, required, rows


def test_every_message_and_flag_is_sent_over_a_real_socket() -> None:
    assert [row.id for row in rows() if not row.node_tests] == []


def test_our_reader_meets_every_message_and_flag_that_is_for_readers() -> None:
    assert [row.id for row in rows() if bool(row.reader_tests) == bool(row.why_no_reader)] == []
    assert not_for_readers() <= set(required())


def test_every_message_and_flag_is_implemented_somewhere() -> None:
    assert [row.id for row in rows() if not implemented(row.declared)] == []


def test_only_what_exists_is_covered() -> None:
    assert set(covered()) <= set(required())


def test_the_table_has_every_flag_and_every_code() -> None:
    ids = set(required())
    assert {f"tap.connect.flag.0x{1 << bit:02x}" for bit in range(9)} <= ids
    assert {f"tap.opaque.{code}" for code in range(9)} <= ids
    assert len([name for name in ids if name.startswith("upr-a.")]) == 15
