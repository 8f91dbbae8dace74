"""Connection strings: what they mean, what they must not be, and that they never show a password."""

from __future__ import annotations

import dataclasses
import ipaddress
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.connstr import Address, ConnectionString, parse
from tailrace.errors import UsageError


def test_the_shortest_one_has_all_defaults() -> None:
    assert parse("couchbase://127.0.0.1") == ConnectionString((Address("127.0.0.1", 11210),), "default")
    assert parse("couchbases://db.example.") == ConnectionString(
        (Address("db.example.", 11207),), tls=True, name="db.example."
    )
    assert parse("couchbase://h/") == parse("couchbase://h")


def test_everything_at_once() -> None:
    where = parse("couchbase://ada:p%40ss%3a%2F@a:1,b,[::1]:65535,[fe80::1%25eth0]/travel-sample")
    assert where.username == "ada"
    assert where.password == "p@ss:/"
    assert where.bucket == "travel-sample"
    assert [str(address) for address in where.addresses] == [
        "a:1",
        "b:11210",
        "[::1]:65535",
        "[fe80::1%eth0]:11210",
    ]


def test_a_password_may_hold_colons_and_may_be_empty() -> None:
    assert parse("couchbase://ada:a:b:c@h").password == "a:b:c"
    assert parse("couchbase://ada:@h").password == ""
    assert parse("couchbase://ada@h").password is None


def test_the_environment_fills_what_is_missing() -> None:
    environ = {"TAILRACE_USERNAME": "eve", "TAILRACE_PASSWORD": "secret"}
    assert parse("couchbase://h", environ).username == "eve"
    assert parse("couchbase://h", environ).password == "secret"
    assert parse("couchbase://ada@h", environ) == parse("couchbase://ada:secret@h")
    assert parse("couchbase://ada:x@h", environ).password == "x"
    assert parse("couchbase://h", {"TAILRACE_PASSWORD": "secret"}).password is None
    assert parse("couchbase://h", {"TAILRACE_USERNAME": ""}).username is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "starts with couchbase://"),
        ("127.0.0.1:11210", "starts with couchbase://"),
        ("http://h", "starts with couchbase://"),
        ("COUCHBASE://h", "starts with couchbase://"),
        ("couchbase://", "host is missing"),
        ("couchbase:///bucket", "host is missing"),
        ("couchbase://a@", "host is missing"),
        ("couchbase://@h", "user name before '@' is missing"),
        ("couchbase://:pw@h", "user name before '@' is missing"),
        ("couchbase://h,", "not a host name"),
        ("couchbase://h,,g", "not a host name"),
        ("couchbase://-h", "not a host name"),
        ("couchbase://h-", "not a host name"),
        ("couchbase://h..g", "not a host name"),
        ("couchbase://h!", "not a host name"),
        ("couchbase://hö", "not a host name"),
        ("couchbase://" + "a" * 64, "not a host name"),
        ("couchbase://h:", "the port"),
        ("couchbase://h:0", "the port"),
        ("couchbase://h:65536", "the port"),
        ("couchbase://h:1_1", "the port"),
        ("couchbase://h:\N{ARABIC-INDIC DIGIT ONE}", "the port"),
        ("couchbase://h:+1", "the port"),
        ("couchbase://::1", "brackets"),
        ("couchbase://[::1", "brackets"),
        ("couchbase://[::1]x", "brackets"),
        ("couchbase://[::1]:", "the port"),
        ("couchbase://[1.2.3.4]", "not an IPv6"),
        ("couchbase://[]", "not an IPv6"),
        ("couchbase://h/a/b", "bucket's name"),
        ("couchbase://h/a b", "no blanks"),
        ("couchbase://h/a%20b", "bucket's name"),
        ("couchbase://h/" + "b" * 101, "bucket's name"),
        ("couchbase://h/b?x=1", "'x' is not an option"),
        ("couchbase://h?networks=external", "is it network?"),
        ("couchbase://h?network", "write name=value"),
        ("couchbase://h?network=a%20b", "network must be auto, default, external"),
        ("couchbase://h?tls_verify=none", "couchbases://"),
        ("couchbases://h?tls_verify=maybe", "peer or none"),
        ("couchbase://h?kv_connect_timeout=0", "more than 0"),
        ("couchbase://h?kv_connect_timeout=soon", "soon"),
        ("couchbase://h?enable_dns_srv=perhaps", "true or false"),
        ("couchbase://h?dns_nameserver=ns.example", "address of a name server"),
        ("couchbase://h?dns_nameserver=127.0.0.1&dns_port=x", "dns_port"),
        ("couchbase://h?dns_port=5353", "dns_nameserver, write both"),
        ("couchbase://h/b#x", "after a '?'"),
        ("couchbase://u%:p@h", "starts no code"),
        ("couchbase://u:%ff@h", "not UTF-8"),
        ("couchbase://u:%00@h", "NUL"),
        ("couchbase://h\n", "no blanks"),
        ("couchbase://" + ",".join(["h"] * 65), "up to 64 hosts"),
        ("couchbase://" + "h" * 9000, "up to 8192"),
    ],
)
def test_what_is_wrong_is_said(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        parse(text)


@pytest.mark.parametrize(
    "text", ["couchbase://u:hunter2/@h", "couchbase://u:hun@ter2@h", "couchbase://u:/hunter2@h"]
)
def test_a_raw_slash_or_at_sign_in_the_password_is_named_and_not_shown(text: str) -> None:
    with pytest.raises(UsageError, match="percent-encoded") as caught:
        parse(text)
    assert "hun" not in str(caught.value)


def test_the_rest_of_a_password_with_a_question_mark_is_not_shown() -> None:
    """The part before it looks like a port."""
    with pytest.raises(UsageError, match="percent-encoded, as %3F") as caught:
        parse("couchbase://ada:1234?hunter2@h/b")
    assert "hunter2" not in str(caught.value)


def test_no_text_shows_the_password() -> None:
    where = parse("couchbase://ada:hunter2@h/b")
    assert "hunter2" not in str(where) + repr(where)
    assert str(where) == "couchbase://ada@h/b"
    assert str(parse("couchbase://ada:hunter2@h:11210/b")) == "couchbase://ada@h:11210/b"


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("couchbase://a;b:1", (Address("a", 11210), Address("b", 1))),
        ("couchbase://a:1=mcd,b:2=kv,c:3=cccp", (Address("a", 1), Address("b", 2), Address("c", 3))),
        ("couchbase://a:8091=kv,[::1]:18091=kv", (Address("a", 8091), Address("::1", 18091))),
    ],
)
def test_forms_that_sdks_take(text: str, addresses: tuple[Address, ...]) -> None:
    where = parse(text)
    assert where.addresses == addresses
    assert parse(str(where)) == where


def test_the_name_of_srv_records_is_taken_for_the_cluster() -> None:
    assert parse("couchbases://_couchbases._tcp.cb.example.com").name == "cb.example.com"


@pytest.mark.parametrize("port", [8091, 18091])
def test_the_port_of_the_management_is_no_place_for_data(port: int) -> None:
    with pytest.raises(UsageError, match=rf"{port} is where clusters are managed over HTTP, .*a:{port}=kv"):
        parse(f"couchbases://a:{port}/b")


def test_another_service_is_refused() -> None:
    with pytest.raises(UsageError, match="a:8091=http is not a key-value service"):
        parse("couchbase://a:8091=http")


def test_a_lone_name_without_a_port_may_be_a_cluster() -> None:
    assert parse("couchbases://cb.example.com/b").name == "cb.example.com"
    for text in ("cb.example.com:11207", "a.example,b.example", "127.0.0.1", "[::1]", "localhost"):
        assert parse(f"couchbase://{text}").name is None


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("couchbase://h?network=external", "network", "external"),
        ("couchbases://h/b?ca_cert_path=%2Ftmp%2Fca%20of.pem", "ca_file", "/tmp/ca of.pem"),
        ("couchbases://h/?trust_certificate=ca.pem", "ca_file", "ca.pem"),
        ("couchbases://h?certpath=ca.pem", "ca_file", "ca.pem"),
        ("couchbases://h?tls_verify=none", "verify", False),
        ("couchbases://h?ssl=no_verify", "verify", False),
        ("couchbase://h?kv_connect_timeout=2500", "connect_timeout_s", 2.5),
        ("couchbase://h?kv_connect_timeout=3s", "connect_timeout_s", 3.0),
        ("couchbase://h?enable_compression=TRUE", "compression", True),
        ("couchbase://h?dnssrv=off", "dns_srv", False),
        ("couchbase://h?dns_nameserver=::1&dns_port=5353", "nameserver", Address("::1", 5353)),
        ("couchbase://h?query_timeout=75s&timeout.kvTimeout=1s&network=x", "network", "x"),
    ],
)
def test_options_of_the_sdks(text: str, name: str, value: object) -> None:
    where = parse(text)
    assert getattr(where, name) == value
    assert parse(str(where)) == where


text_without_nul = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40)  # type: ignore[arg-type]
names = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,10}[A-Za-z0-9_])?", fullmatch=True)
hosts = st.one_of(
    st.lists(names, min_size=1, max_size=4).map(".".join),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.builds("{}%{}".format, st.just(ipaddress.ip_address("fe80::1")), names),
)
strings = st.builds(
    ConnectionString,
    st.lists(st.builds(Address, hosts, st.integers(1, 65535)), min_size=1, max_size=5).map(tuple),
    st.from_regex(r"[A-Za-z0-9_.%-]{1,100}", fullmatch=True),
    st.one_of(st.none(), text_without_nul.filter(bool)),
    st.none(),
    st.booleans(),
)


@given(strings, st.one_of(st.none(), text_without_nul))
def test_round_trip(given_: ConnectionString, password: str | None) -> None:
    secret = password if given_.username is not None else None
    whole = ConnectionString(given_.addresses, given_.bucket, given_.username, secret, given_.tls)
    assert parse(str(whole)) == given_
    text = str(whole) if secret is None else str(whole).replace("@", f":{quote(secret, safe='')}@", 1)
    assert parse(text) == whole


@given(st.one_of(st.text(), st.text().map("couchbase://".__add__)))
def test_any_text_gives_a_connection_string_or_a_usage_error(text: str) -> None:
    try:
        where = parse(text)
    except UsageError:
        return
    assert parse(str(where)) == dataclasses.replace(where, password=None)
